"""Ranks that try each other's memory: threads, with tensors for GPU memory, and one fault at a time."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from titan_mega_moe import doctor, peers

LIMIT = 0.5  # seconds


class Tensors:
    """Memory of three ranks; rank 1 has the fault."""

    def __init__(self, parts: list[torch.Tensor], rank: int, fault: str) -> None:
        self.parts, self.fault = parts, fault if rank == 1 else "none"

    def allocate(self) -> None:
        if self.fault == "allocate":
            raise RuntimeError("out of fabric\nand a long stack")

    def map(self) -> list[torch.Tensor]:
        if self.fault == "map":
            raise RuntimeError("no peer access")
        if self.fault == "map late":  # as a rendezvous that hangs
            time.sleep(4 * LIMIT)
        parts = list(self.parts)
        if self.fault == "lost":
            parts[2] = parts[2].clone()
        if self.fault == "write":
            parts[0] = parts[0].as_subclass(Unmapped)
        if self.fault == "answer":
            parts[0] = parts[0].as_subclass(Wrong)
        return parts


class Unmapped(torch.Tensor):
    def __setitem__(self, at, value):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Wrong(torch.Tensor):
    """Reads back another value than was written."""

    def __getitem__(self, at):
        return torch.tensor(7)


def try_all(fault: str) -> tuple[peers.Found, float]:
    """What rank 0 collects, and the seconds that took."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    start = time.monotonic()
    parts = [torch.zeros(3, dtype=torch.int64) for _ in range(3)]
    deadline = start + (LIMIT if fault == "map late" else 20)

    def rank(number: int) -> tuple[peers.Found, float] | None:
        store = dist.TCPStore("localhost", server.port, wait_for_workers=False)
        peers.try_peers(Tensors(parts, number, fault), store, number, range(3), deadline)
        return (peers.collect(store, 3, deadline), time.monotonic() - start) if number == 0 else None

    with ThreadPoolExecutor(3) as threads:
        return next(threads.map(rank, range(3)))


ALL = {f"{a} {b}" for a in range(3) for b in range(3) if a != b}


@pytest.mark.parametrize(
    ("fault", "bad", "failed"),
    [
        ("none", {}, {}),
        ("write", {"1 0": "an illegal memory access"}, {}),
        ("lost", {"1 2": "what rank 1 wrote did not arrive"}, {}),
        ("answer", {"1 0": "read 7 back"}, {}),
        ("allocate", None, {1: "cannot allocate symmetric memory: out of fabric"}),
        ("map", None, {1: "cannot map its peers' memory: no peer access"}),
        ("map late", None, {1: "does not answer; it was about to map the memory of its peers"}),
    ],
)
def test_each_pair_is_good_or_has_its_reason(monkeypatch, fault, bad, failed):
    monkeypatch.setattr(peers, "_LATER", 0.2)
    got, seconds = try_all(fault)
    assert {rank: text in got.failed[rank] for rank, text in failed.items()} == dict.fromkeys(got.failed, True)
    if bad is None:  # no rank may touch what another one could not share
        assert (got.good, got.bad) == ([], {})
    else:
        assert {pair: text in got.bad[pair] for pair, text in bad.items()} == dict.fromkeys(got.bad, True)
        assert set(got.good) == ALL - set(bad) and len(got.good) == len(set(got.good))
    assert seconds < 3 * LIMIT
    lines = list(doctor.peer_lines(got, 3))
    assert all(line.ok for line in lines) == (fault == "none")
    for _, text in (*(bad or {}).items(), *failed.items()):
        assert sum(text in line.text and line.ok is False for line in lines) == 1
