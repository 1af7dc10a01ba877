"""Runs routing.py's kernels for every rank of a group in one process, under Triton's interpreter, and compares.

A program of its own: the interpreter has to be chosen before the kernels are defined. Arguments: EP, then the seed.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from tests.op.triton import tables_oracle
from titan_mega_moe.op.symm_buffer import SymmBuffer, layout
from titan_mega_moe.op.triton import routing


def compare(all_ids: list[torch.Tensor], local_experts: int, t_max: int, calls: int) -> None:
    ep, K = len(all_ids), all_ids[0].shape[1]
    scores = [torch.rand(ids.shape) for ids in all_ids]
    _, nbytes = layout(ep, t_max, 64, K)
    memories = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(ep)]
    sizes = routing.Sizes(ep, t_max, K, local_experts)
    buffers = [SymmBuffer(memories, rank, t_max, 64, K) for rank in range(ep)]
    scratch = [routing.Scratch(sizes, torch.device("cpu")) for _ in range(ep)]
    for call in range(1, 2 * calls, 2):
        for rank in range(ep):
            scratch[rank].counters.fill_(7)
            routing.announce(buffers[rank], scratch[rank], sizes, all_ids[rank], scores[rank])
        for rank in range(ep):
            assert buffers[rank].epoch.item() == call
            assert buffers[rank].view("routed").tolist() == [call] * ep
            assert scratch[rank].counters.eq(0).all() and scratch[rank].arrived.eq(0).all()
            words = torch.full((sizes.words,), -77, dtype=torch.int32)
            tables = routing.Tables(words, sizes)
            routing.receive(buffers[rank], scratch[rank], sizes)
            routing.build(buffers[rank], scratch[rank], tables, sizes)
            buffers[rank].check()
            check(tables, tables_oracle.tables(all_ids, scores, rank, local_experts, t_max))
        for rank in range(ep):  # a call that does not route
            scratch[rank].counters.fill_(7)
            routing.begin_call(buffers[rank], scratch[rank])
        for rank in range(ep):
            assert buffers[rank].epoch.item() == call + 1 and scratch[rank].counters.eq(0).all()
            assert buffers[rank].view("routed").tolist() == [call + 1] * ep
            routing.meet_peers(buffers[rank], scratch[rank])
            buffers[rank].check()


def check(tables: routing.Tables, want: dict) -> None:
    number = len(want["tiles"])
    assert tables.num_tiles[0].item() == number
    assert tables.tiles.view(-1, 4)[:number].tolist() == want["tiles"]
    assert tables.tiles_of[: len(want["tiles_of"])].tolist() == want["tiles_of"]
    assert tables.tokens[: len(want["tokens"])].tolist() == want["tokens"]
    assert tables.expert_rows[: len(want["expert_rows"])].tolist() == want["expert_rows"]
    for row, source in want["rows"].items():
        assert tables.rows[row].item() == source, (row, source)
    for row, score in want["scores"].items():
        assert abs(tables.scores[row].item() - score) < 1e-7
    row_of, K = tables.row_of.tolist(), len(tables.row_of)
    assert {i: r for i, r in enumerate(row_of) if r not in (-1, -77)} == want["row_of"], K


def too_many_tokens(ep: int) -> None:
    """A rank with more tokens than the buffers hold is named by every rank."""
    t_max, K = 16, 2
    sizes = routing.Sizes(ep, t_max, K, 2)
    _, nbytes = layout(ep, t_max, 64, K)
    memories = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(ep)]
    for rank in range(ep):
        T = 17 if rank == ep - 1 else 5
        buffer = SymmBuffer(memories, rank, t_max, 64, K)
        ids = torch.zeros(T, K, dtype=torch.int64)
        routing.announce(buffer, routing.Scratch(sizes, torch.device("cpu")), sizes, ids, torch.rand(T, K))
    for rank in range(ep):
        buffer = SymmBuffer(memories, rank, t_max, 64, K)
        buffer.epoch.fill_(1)
        tables = routing.Tables(torch.zeros(sizes.words, dtype=torch.int32), sizes)
        scratch = routing.Scratch(sizes, torch.device("cpu"))
        routing.receive(buffer, scratch, sizes)
        routing.build(buffer, scratch, tables, sizes)
        assert tables.tokens[:ep].tolist() == [5] * (ep - 1) + [0]
        try:
            buffer.check()
        except RuntimeError as error:
            assert f"rank {ep - 1} of the expert-parallel group has 17 tokens" in str(error), error
            assert "hold 16" in str(error) and "max_tokens" in str(error)
        else:
            raise AssertionError("17 tokens passed")


def wrong_ids(ep: int) -> None:
    """An id that no rank has is named; -1 is not wrong."""
    t_max, K = 8, 2
    sizes = routing.Sizes(ep, t_max, K, 2)
    _, nbytes = layout(ep, t_max, 64, K)
    for bad in (2 * ep, -2, None):
        memories = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(ep)]
        buffer = SymmBuffer(memories, 0, t_max, 64, K)
        ids = torch.tensor([[0, 2 * ep - 1], [-1, 1 if bad is None else bad]])
        routing.announce(buffer, routing.Scratch(sizes, torch.device("cpu")), sizes, ids, torch.rand(2, K))
        try:
            buffer.check()
        except RuntimeError as error:
            assert bad is not None and f"expert id {bad};" in str(error) and f"0 to {2 * ep - 1}" in str(error), error
        else:
            assert bad is None, bad


def silent_peer(ep: int) -> None:
    """A wait for entries that never come ends, and says for how long it lasted, for whom and since when."""
    t_max, K = 8, 2
    sizes = routing.Sizes(ep, t_max, K, 2)
    _, nbytes = layout(ep, t_max, 64, K)
    memories = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(ep)]
    buffer, scratch = SymmBuffer(memories, 0, t_max, 64, K), routing.Scratch(sizes, torch.device("cpu"))
    routing._POLLS_PER_SECOND, buffer.timeout_seconds = 1, 5
    routing.announce(buffer, scratch, sizes, torch.zeros(3, K, dtype=torch.int64), torch.rand(3, K))
    waits = {
        "expert ids": lambda: routing.receive(buffer, scratch, sizes),
        "start": lambda: routing.meet_peers(buffer, scratch),
    }
    for what, wait in waits.items():
        buffer.error.zero_()
        wait()
        try:
            buffer.check()
        except RuntimeError as error:
            assert f"rank 0 of the expert-parallel group waited 5 s for the {what} of rank 1" in str(error), error
            assert "(call 1, the last that came was 0)" in str(error), error
        else:
            raise AssertionError("a peer that sends nothing went unnoticed")


# Local experts, K, t_max. The interpreter's time grows with EP squared: the larger groups get what is left to see.
CASES = {
    1: [(1, 1, 40), (3, 2, 300), (16, 8, 137), (33, 4, 64)],
    2: [(1, 1, 40), (3, 2, 300), (16, 8, 137), (5, 4, 64)],
    4: [(1, 1, 40), (3, 2, 300)],
    8: [(3, 2, 40)],
}


def main(ep: int, seed: int) -> None:
    torch.manual_seed(seed)
    if ep == 1:
        compare([torch.tensor([[1, 0], [1, -1], [0, 1]])], 2, 3, 1)
    for local_experts, K, t_max in CASES.get(ep, CASES[8]):
        experts = local_experts * ep
        K = min(K, experts)
        tokens = [int(torch.randint(0, t_max + 1, ())) for _ in range(ep)]
        tokens[0] = t_max
        ids = [torch.rand(T, experts).argsort(1)[:, :K].contiguous() for T in tokens]
        for one in ids:
            one[torch.rand(one.shape) < 0.2] = -1  # slots without an expert
        compare(ids, local_experts, t_max, 2)
        for one in ids:
            one[:, 0] = experts - 1  # everything to one expert
            one[:, 1:] = -1
        ids[-1] = ids[-1][:0]  # a rank without tokens
        compare(ids, local_experts, t_max, 1)
        if ep == 1:  # where that was all: everything to one expert, of one rank
            compare([torch.full((t_max, K), -1).index_fill(1, torch.tensor([0]), experts - 1)], local_experts, t_max, 1)
    too_many_tokens(ep)
    wrong_ids(ep)
    if ep == 2:
        silent_peer(ep)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
