"""Whether the ranks of a host reach each other's GPU memory: symmetric memory, tried for real.

    python -m titan_mega_moe.peers FILE    a rank's part; rank 0 writes what `Found` holds to FILE as JSON

Each rank allocates a little symmetric memory, maps its peers', writes to each, reads that back, and looks for what the
peers wrote to it. Ranks wait for each other only through the store and never longer than the limit; a rank that stops
answering is named with the last thing that it was about to do, and is ended.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

LIMIT_SECONDS = 60.0
_GAVE_UP = "gave up: "
_LATER = 5.0  # seconds that rank 0 leaves the others to say how far they came, and all to end


class Memory(Protocol):
    """One rank's part of memory that a group shares."""

    def allocate(self) -> None:
        """Make this rank's part, zeros. Raises RuntimeError if it cannot."""

    def map(self) -> list[torch.Tensor]:
        """Every rank's part, int64 of the group's size, by rank in the group. A collective; RuntimeError as above."""


class SymmetricMemory:
    """torch's, on this rank's GPU."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def allocate(self) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        torch.cuda.set_device(self._device)
        self._mine = symm_mem.empty(self._group.size(), dtype=torch.int64, device=self._device).zero_()
        torch.cuda.synchronize(self._device)

    def map(self) -> list[torch.Tensor]:
        import torch.distributed._symmetric_memory as symm_mem

        self._handle = symm_mem.rendezvous(self._mine, self._group)
        size = self._group.size()
        return [self._handle.get_buffer(rank, (size,), torch.int64) for rank in range(size)]


@dataclass
class Found:
    """What one rank or all of them found. A pair is "writer owner", ranks."""

    good: list[str] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    """Pair -> reason."""
    failed: dict[int, str] = field(default_factory=dict)
    """Rank -> what kept it from trying any pair."""


def try_peers(memory: Memory, store: dist.Store, rank: int, ranks: range, deadline: float) -> Found:
    """This rank's part, among `ranks` that share the memory. Publishes what it found for `collect`; never raises.

    deadline: of time.monotonic(), for all waiting.
    """
    found, peers = Found(), [r for r in ranks if r != rank]

    def about_to(do: str) -> None:
        store.set(f"{rank} does", do)

    def all_did(what: str, reason: str | None) -> bool:
        """Say how it went here; whether it went well on all, once all have said."""
        store.set(f"{rank} {what}", reason or "")
        if reason is not None:
            found.failed[rank] = reason
        about_to("wait for the other ranks")
        keys = [f"{r} {what}" for r in ranks]
        if not _waited(store, keys, deadline):
            late = next((r for r, key in zip(ranks, keys, strict=True) if not store.check([key])), rank)
            raise RuntimeError(f"rank {late} {_last_word(store, late)}")
        return not any(store.multi_get(keys))

    try:
        about_to("allocate symmetric memory")
        if all_did("allocated", _reason(memory.allocate, "cannot allocate symmetric memory")):
            parts: list[torch.Tensor] = []
            about_to("map the memory of its peers")
            if all_did("mapped", _reason(lambda: parts.extend(memory.map()), "cannot map its peers' memory")):
                for peer in peers:
                    about_to(f"write to rank {peer}")
                    _note(found, rank, peer, _written(parts[peer - ranks.start], rank - ranks.start, rank, peer))
                all_did("wrote", None)
                about_to("read its own memory")
                own = parts[rank - ranks.start].tolist()
                for peer in peers:
                    if own[peer - ranks.start] != _word(peer, rank):
                        _note(found, peer, rank, f"what rank {peer} wrote did not arrive")
    except RuntimeError as error:  # a rank that does not answer, or a broken GPU
        found.failed.setdefault(rank, f"{_GAVE_UP}{_first_line(error)}")
    store.set(f"{rank} found", json.dumps(asdict(found)))
    return found


def collect(store: dist.Store, world_size: int, deadline: float) -> Found:
    """What all ranks found, with a sentence for each that has not said anything soon after the deadline."""
    total = Found()
    for rank in range(world_size):
        if not _waited(store, [f"{rank} found"], deadline + _LATER):
            total.failed[rank] = _last_word(store, rank)
            continue
        part = json.loads(store.get(f"{rank} found"))
        total.good += part["good"]
        total.bad |= part["bad"]
        total.failed |= {int(r): reason for r, reason in part["failed"].items()}
    reasons = {rank: reason for rank, reason in total.failed.items() if not reason.startswith(_GAVE_UP)}
    total.failed = reasons or total.failed  # those that waited for another in vain have nothing to add
    total.good = [pair for pair in total.good if pair not in total.bad]
    return total


def _waited(store: dist.Store, keys: list[str], deadline: float) -> bool:
    """Whether all keys are there by the deadline, of time.monotonic(). A store's own wait takes seconds to fail."""
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _last_word(store: dist.Store, rank: int) -> str:
    does = store.get(f"{rank} does").decode() if store.check([f"{rank} does"]) else "begin"
    return f"does not answer; it was about to {does}"


def between_ranks() -> Found | None:
    """Under torchrun: try the GPUs of each host's ranks. What rank 0 returns is all ranks'; None on the others."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    first = rank - int(os.environ["LOCAL_RANK"])
    # By default the signal ends the process wherever it hangs, even in a driver's call that holds the interpreter.
    signal.alarm(int(LIMIT_SECONDS + 4 * _LATER))
    ranks = range(first, first + here)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_SECONDS))
        group: object = dist.group.WORLD
        if here < size:
            group = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
    except RuntimeError as error:
        reason = f"the {size} ranks did not meet within {LIMIT_SECONDS:.0f} s: {_first_line(error)}"
        return Found(failed={rank: reason}) if rank == 0 else None
    assert isinstance(group, dist.ProcessGroup)
    signal.alarm(int(LIMIT_SECONDS + 4 * _LATER))
    store = dist.PrefixStore("peers", dist.distributed_c10d._get_default_store())
    memory = SymmetricMemory(group, torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    deadline = time.monotonic() + LIMIT_SECONDS
    try_peers(memory, store, rank, ranks, deadline)
    found = collect(store, size, deadline) if rank == 0 else None
    if found is not None:
        store.set("collected", "")
    else:
        with suppress(RuntimeError):  # rank 0 may serve the store, and be gone
            _waited(store, ["collected"], deadline + 2 * _LATER)
    dist.destroy_process_group()
    signal.alarm(0)
    return found


def _written(part: torch.Tensor, at: int, writer: int, owner: int) -> str | None:
    """Write to a peer's memory and read back; the reason if that failed."""
    try:
        part[at] = _word(writer, owner)
        if part.is_cuda:
            torch.cuda.synchronize(part.device)
        read = int(part[at])
    except RuntimeError as error:
        return _first_line(error)
    return None if read == _word(writer, owner) else f"wrote {_word(writer, owner)} and read {read} back"


def _word(writer: int, owner: int) -> int:
    return (writer + 1) << 20 | (owner + 1)


def _note(found: Found, writer: int, owner: int, reason: str | None) -> None:
    if reason is None:
        found.good.append(f"{writer} {owner}")
    else:
        found.bad[f"{writer} {owner}"] = reason


def _reason(call: Callable[[], object], what: str) -> str | None:
    try:
        call()
    except RuntimeError as error:
        return f"{what}: {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def main(args: list[str]) -> int:
    from titan_mega_moe import launch

    launch.die_with_launcher()
    found = between_ranks()
    if found is not None:
        Path(args[0]).write_text(json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
