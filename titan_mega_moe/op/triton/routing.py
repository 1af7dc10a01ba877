"""Routing tables, made on the device: which rows this rank's experts get, in which order, and where they come from.

Five kernels, no host synchronisation, no shape that depends on the routing:

    publish  this rank's expert ids and scores to every rank's symmetric buffer, then a flag; begins the call's epoch
             (in a backward, which routes as its forward did, `begin` raises the flag alone)
    count    per (local expert, block of entries): how many; waits for the flags, as `meet` does in a backward
    scan     per local expert: where each block's rows start, and where each source's
    tiles    the tile list, ascending by chunk; the rows that only pad
    place    row -> (source, token), its score, and (source, token, slot) -> row

An entry is one (token, slot). Sources go by ring distance, this rank first: distance d is rank (rank + d) % EP. Rows
are sorted by expert, distance, token, slot, so the order, and with it every sum's order, is fixed by the routing alone.
Example, EP=1, two experts, ids [[1, 0], [1, -1], [0, 1]]: expert 0 has the entries 1 and 4, expert 1 has 0, 2 and 5;
rows 0 and 1 hold tokens 0 and 2, rows 128 to 130 tokens 0, 1 and 2; two tiles, (0, 0, 2, 0) and (1, 128, 3, 0).
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl

from titan_mega_moe.op.symm_buffer import SymmBuffer, subs_of

BLOCK = 256  # entries of one program
STEP = 128  # entries of one of its steps
TILE = 128  # rows; an expert starts at a multiple of it
MAX_LOCAL_EXPERTS = 128
_POLLS_PER_SECOND = 1_000_000


def max_rows(ep_size: int, t_max: int, top_k: int, local_experts: int) -> int:
    """R: rows that can meet on one rank, every expert padded to whole tiles.

    All K slots of a token may come to one rank; with fewer experts than that they would have to repeat one.
    """
    return -(-(ep_size * t_max * top_k + local_experts * (TILE - 1)) // TILE) * TILE


@dataclass(frozen=True)
class Sizes:
    ep_size: int
    t_max: int
    top_k: int
    local_experts: int

    @property
    def rows(self) -> int:
        return max_rows(self.ep_size, self.t_max, self.top_k, self.local_experts)

    @property
    def blocks(self) -> int:
        """Programs of one source."""
        return triton.cdiv(self.t_max * self.top_k, BLOCK)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Tables by name and length, in int32 words: whole 16 bytes each."""
        needed = {
            "tiles": 4 * (self.rows // TILE),
            "rows": self.rows,
            "scores": self.rows,
            "row_of": self.ep_size * self.t_max * self.top_k,
            "expert_rows": 2 * self.local_experts,
            "tiles_of": self.ep_size,
            "tokens": self.ep_size,
            "num_tiles": 1,
        }
        return {name: -(-length // 4) * 4 for name, length in needed.items()}

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Of each table in Tables.words, in bytes."""
        ends = accumulate(self.lengths.values(), initial=0)
        return {name: 4 * start for name, start in zip(self.lengths, ends, strict=False)}

    @property
    def words(self) -> int:
        return sum(self.lengths.values())


class Tables:
    """One int32 tensor (so that it is saved for the backward as one) and its parts.

    tiles [R / 128, 4] expert, first row, valid rows, chunk; rows [R] source * t_max + token or -1; scores [R] float32,
    0 where a row pads; row_of [EP, t_max, K] a row or -1; expert_rows [e, 2] first row and number of rows; tiles_of
    [EP] tiles of each chunk; tokens [EP] tokens of each rank; num_tiles [1]. Beyond num_tiles and beyond an expert's
    tiles nothing is defined.
    """

    def __init__(self, words: torch.Tensor, sizes: Sizes) -> None:
        self.words = words
        vars(self).update(zip(sizes.lengths, words.split(list(sizes.lengths.values())), strict=True))
        self.scores = self.scores.view(torch.float32)
        base = words.data_ptr()
        self.addresses = {name: base + offset for name, offset in sizes.offsets.items()}

    tiles: torch.Tensor
    rows: torch.Tensor
    scores: torch.Tensor
    row_of: torch.Tensor
    expert_rows: torch.Tensor
    tiles_of: torch.Tensor
    tokens: torch.Tensor
    num_tiles: torch.Tensor


class Scratch:
    """What the kernels leave for each other; one for all layers."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.compiled: dict[Any, Any] = {}  # by kernel
        e, ep, all_blocks = sizes.local_experts, sizes.ep_size, sizes.ep_size * sizes.blocks
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.arrived = torch.zeros(ep + 1, **ints)  # programs that have published, and columns that have
        # What gemm.cu counts, zero when a call begins: tiles done [EP], tickets [EP], tokens summed [EP, subs].
        self.counters = torch.zeros(ep * (2 + subs_of(sizes.t_max)), **ints)
        self.done, self.tickets, self.summed = self.counters.split([ep, ep, ep * subs_of(sizes.t_max)])
        self.counts = torch.empty(e, **ints)
        self.bounds = torch.empty(e, ep + 1, **ints)
        self.starts = torch.empty(e, all_blocks, **ints)


@triton.jit
def _pointer(peers, rank, offset, dtype: tl.constexpr):
    return (tl.load(peers + rank) + offset).to(tl.pointer_type(dtype))


@triton.jit
def _begin_epoch(epoch, counters, number, PAD: tl.constexpr):
    places = tl.arange(0, PAD)
    tl.store(counters + places, tl.zeros((PAD,), tl.int32), mask=places < number)
    tl.store(epoch, tl.load(epoch) + 1)


@triton.jit
def begin(peers, routed_offset, epoch, counters, number, rank, EP: tl.constexpr, PAD: tl.constexpr):
    """A call that needs no routing (the backward) begins, and every rank is told."""
    for d in tl.static_range(EP):
        flag = _pointer(peers, (rank + d) % EP, routed_offset, tl.int32) + (EP - d) % EP
        tl.atomic_xchg(flag, tl.load(epoch) + 1, sem="release", scope="sys")
    tl.debug_barrier()  # the epoch has been read
    _begin_epoch(epoch, counters, number, PAD)


@triton.jit
def _wait(flag, wanted, error, polls):
    """The flag's value, at least `wanted` unless the time is over or something else went wrong."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    turns = 0
    while (seen < wanted) & (turns < polls):
        if turns % 4096 == 0:
            polls = tl.where(tl.load(error, volatile=True) == 0, polls, 0)  # after an error nothing waits
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        turns += 1
    return seen


@triton.jit(do_not_specialize=["polls"])
def meet(routed, epoch, error, polls):
    """Grid (EP - 1): until the peer at that distance has begun this call. It has ended the one before by then, and
    rows may be sent to it."""
    d = tl.program_id(0) + 1
    wanted = tl.load(epoch)
    seen = _wait(routed + d, wanted, error, polls)
    if seen < wanted:
        tl.store(error + 1, d)
        tl.store(error + 2, wanted)
        tl.store(error + 3, seen)
        tl.store(error, 6)  # START


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["ids", "scores"])
def publish(
    ids, scores, T, peers, ids_offset, scores_offset, tokens_offset, routed_offset, arrived, epoch, counters, number,
    error, experts, rank, t_max, EP: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, EP). Column d serves rank (rank + d) % EP; its last program raises the flag there, and the last
    column begins the epoch here. T above t_max publishes the number alone, so that every rank can say why it stops."""
    d = tl.program_id(1)
    to = (rank + d) % EP
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (entries < T * K) & (t_max >= T)
    at = rank * t_max * K + entries
    expert = tl.load(ids + entries, mask=mask, other=-1)
    wrong = (expert < -1) | (expert >= experts)
    if (d == 0) & (tl.max(wrong.to(tl.int32), 0) == 1):
        tl.store(error + 1, 0)
        tl.store(error + 2, experts)
        tl.store(error + 3, tl.max(tl.where(wrong, expert, -2147483648), 0).to(tl.int32))
        tl.store(error, 5)  # IDS
    tl.store(_pointer(peers, to, ids_offset, tl.int32) + at, tl.where(wrong, -1, expert).to(tl.int32), mask=mask)
    tl.store(_pointer(peers, to, scores_offset, tl.float32) + at, tl.load(scores + entries, mask=mask), mask=mask)
    if tl.program_id(0) == 0:
        tl.store(_pointer(peers, to, tokens_offset, tl.int32) + rank, T)
    tl.debug_barrier()  # all of the program's stores precede its arrival
    if tl.atomic_add(arrived + d, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1:
        tl.store(arrived + d, 0)
        flag = _pointer(peers, to, routed_offset, tl.int32) + (EP - d) % EP
        tl.atomic_xchg(flag, tl.load(epoch) + 1, sem="release", scope="sys")
        if tl.atomic_add(arrived + EP, 1, sem="acq_rel", scope="gpu") == EP - 1:
            tl.store(arrived + EP, 0)
            _begin_epoch(epoch, counters, number, PAD)


@triton.jit
def _experts(ids, source, entries, tokens, rank, t_max, K: tl.constexpr, E: tl.constexpr):
    """Local expert of each entry of a source, out of [0, E) where it has none here."""
    T = tl.load(tokens + source)
    mask = entries < tl.where(t_max >= T, T, 0) * K
    return tl.load(ids + source * t_max * K + entries, mask=mask, other=-1) - rank * E


@triton.jit(do_not_specialize=["polls"])
def count(
    ids, tokens, routed, epoch, error, counted, rank, t_max, polls,
    EP: tl.constexpr, K: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, EP). counted[e, distance * blocks + block] = entries of the block for local expert e."""
    d = tl.program_id(1)
    source = (rank + d) % EP
    wanted = tl.load(epoch)
    seen = _wait(routed + d, wanted, error, polls)
    too_many = tl.load(tokens + source) > t_max
    if (seen < wanted) | too_many:
        tl.store(error + 1, d)
        tl.store(error + 2, wanted)
        tl.store(error + 3, tl.where(too_many, tl.load(tokens + source), seen))
        tl.store(error, tl.where(too_many, 4, 1))  # TOKENS, ROUTING
    experts = tl.arange(0, E_PAD)
    total = tl.zeros((E_PAD,), tl.int32)
    for step in tl.static_range(0, BLOCK, STEP):
        entries = tl.program_id(0) * BLOCK + step + tl.arange(0, STEP)
        here = _experts(ids, source, entries, tokens, rank, t_max, K, E)
        total += tl.sum((here[:, None] == experts[None, :]).to(tl.int32), 0)
    column = d * tl.num_programs(0) + tl.program_id(0)
    tl.store(counted + experts * (EP * tl.num_programs(0)) + column, total, mask=experts < E)


@triton.jit
def scan(starts, bounds, counts, blocks, EP: tl.constexpr, COLUMNS_PAD: tl.constexpr):
    """Grid (e). In place: counts per block -> the block's first place within the expert. bounds[e, d] = rows from
    sources nearer than d; bounds[e, EP] = counts[e] = all."""
    expert = tl.program_id(0)
    columns = tl.arange(0, COLUMNS_PAD)
    mask = columns < EP * blocks
    here = starts + expert * EP * blocks + columns
    counted = tl.load(here, mask=mask, other=0)
    before = tl.cumsum(counted, 0) - counted
    tl.store(here, before, mask=mask)
    total = tl.sum(counted, 0)
    for d in tl.static_range(EP):
        tl.store(bounds + expert * (EP + 1) + d, tl.sum(tl.where(columns == d * blocks, before, 0), 0))
    tl.store(bounds + expert * (EP + 1) + EP, total)
    tl.store(counts + expert, total)


@triton.jit
def _first_tiles(counts, E: tl.constexpr, E_PAD: tl.constexpr, TILE: tl.constexpr):
    """Number of tiles of every expert and the first of each."""
    experts = tl.arange(0, E_PAD)
    number = (tl.load(counts + experts, mask=experts < E, other=0) + TILE - 1) // TILE
    return number, tl.cumsum(number, 0) - number


@triton.jit
def tiles(
    counts, bounds, tile_list, expert_rows, tiles_of, num_tiles, rows, scores, tokens, tokens_out, t_max,
    EP: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (e). Tile j of an expert belongs to chunk d, the distance of its last valid row."""
    expert = tl.program_id(0)
    experts = tl.arange(0, E_PAD)
    mine = experts == expert
    number, first = _first_tiles(counts, E, E_PAD, TILE)
    all_counts = tl.load(counts + experts, mask=experts < E, other=0)
    count = tl.load(counts + expert)
    row = tl.sum(tl.where(mine, first, 0), 0) * TILE
    tl.store(expert_rows + 2 * expert, row)
    tl.store(expert_rows + 2 * expert + 1, count)
    pads = count + tl.arange(0, TILE)
    end = (count + TILE - 1) // TILE * TILE
    tl.store(rows + row + pads, tl.full((TILE,), -1, tl.int32), mask=pads < end)
    tl.store(scores + row + pads, tl.zeros((TILE,), tl.float32), mask=pads < end)

    place = 0  # in the tile list
    complete = tl.zeros((E_PAD,), tl.int32)  # tiles of nearer chunks
    for d in tl.static_range(EP):
        bound = tl.load(bounds + experts * (EP + 1) + d + 1, mask=experts < E, other=0)
        until = tl.where(bound == all_counts, number, bound // TILE)
        of_chunk = until - complete
        begin_j = tl.sum(tl.where(mine, complete, 0), 0)
        end_j = tl.sum(tl.where(mine, until, 0), 0)
        at = place + tl.sum(tl.where(experts < expert, of_chunk, 0), 0)
        for some in range(begin_j, end_j, TILE):
            j = some + tl.arange(0, TILE)
            record = tile_list + 4 * (at + j - begin_j)
            tl.store(record, tl.zeros((TILE,), tl.int32) + expert, mask=j < end_j)
            tl.store(record + 1, row + j * TILE, mask=j < end_j)
            tl.store(record + 2, tl.minimum(count - j * TILE, TILE), mask=j < end_j)
            tl.store(record + 3, tl.full((TILE,), d, tl.int32), mask=j < end_j)
        total = tl.sum(of_chunk, 0)
        if expert == 0:
            tl.store(tiles_of + d, total)
            T = tl.load(tokens + d)
            tl.store(tokens_out + d, tl.where(t_max >= T, T, 0))
        place += total
        complete = until
    if expert == 0:
        tl.store(num_tiles, place)


@triton.jit
def place(
    ids, scores_in, tokens, counts, starts, rows, scores, row_of, rank, t_max,
    EP: tl.constexpr, K: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, EP). Entries keep their order within an expert."""
    d = tl.program_id(1)
    source = (rank + d) % EP
    experts = tl.arange(0, E_PAD)
    _, first = _first_tiles(counts, E, E_PAD, TILE)
    column = d * tl.num_programs(0) + tl.program_id(0)
    next_row = first * TILE + tl.load(starts + experts * (EP * tl.num_programs(0)) + column, mask=experts < E, other=0)
    T = tl.load(tokens + source)
    limit = tl.where(t_max >= T, T, 0) * K
    for step in tl.static_range(0, BLOCK, STEP):
        entries = tl.program_id(0) * BLOCK + step + tl.arange(0, STEP)
        here = _experts(ids, source, entries, tokens, rank, t_max, K, E)
        chosen = (here[:, None] == experts[None, :]).to(tl.int32) * (experts < E).to(tl.int32)[None, :]
        row = tl.sum(chosen * (tl.cumsum(chosen, 0) - 1 + next_row[None, :]), 1)
        valid = (here >= 0) & (here < E)
        at = source * t_max * K + entries
        tl.store(rows + row, source * t_max + entries // K, mask=valid)
        tl.store(scores + row, tl.load(scores_in + at, mask=valid, other=0.0), mask=valid)
        tl.store(row_of + at, tl.where(valid, row, -1), mask=entries < limit)
        next_row += tl.sum(chosen, 0)


def _run(scratch: Scratch, kernel: Any, grid: tuple[int, ...], *args: Any) -> None:
    """kernel[grid](*args) without looking at every argument again: a workspace's differ in values and
    addresses alone, and what may be aligned less, or be 1, is not specialized on."""
    if (compiled := scratch.compiled.get(kernel)) is not None:
        compiled[grid + (1,) * (3 - len(grid))](*args)
    else:
        scratch.compiled[kernel] = kernel[grid](*args)  # None from the interpreter


def begin_call(buffer: SymmBuffer, scratch: Scratch) -> None:
    """Begins a call that needs no routing."""
    number = len(scratch.counters)
    _run(
        scratch, begin, (1,),
        buffer.peers, buffer.regions["routed"].offset, buffer.epoch, scratch.counters, number, buffer.rank,
        buffer.ep_size, triton.next_power_of_2(number),
    )  # fmt: skip


def meet_peers(buffer: SymmBuffer, scratch: Scratch) -> None:
    """Waits until every peer has begun this call, too."""
    if buffer.ep_size > 1:
        polls, flags = _POLLS_PER_SECOND * buffer.timeout_seconds, buffer.view("routed")
        _run(scratch, meet, (buffer.ep_size - 1,), flags, buffer.epoch, buffer.error, polls)


def announce(buffer: SymmBuffer, scratch: Scratch, sizes: Sizes, ids_TK: torch.Tensor, scores_TK: torch.Tensor) -> None:
    """First kernel: this rank's entries go to every rank. ids int64, scores float32, both contiguous."""
    T, K = ids_TK.shape
    offsets = (buffer.regions[name].offset for name in ("ids", "scores", "tokens", "routed"))
    _run(
        scratch, publish, (triton.cdiv(buffer.t_max * K, BLOCK), buffer.ep_size),
        ids_TK, scores_TK, T, buffer.peers, *offsets, scratch.arrived, buffer.epoch, scratch.counters,
        len(scratch.counters), buffer.error, sizes.ep_size * sizes.local_experts, buffer.rank, buffer.t_max,
        buffer.ep_size, K, BLOCK, triton.next_power_of_2(len(scratch.counters)),
    )  # fmt: skip


def receive(buffer: SymmBuffer, scratch: Scratch, sizes: Sizes) -> None:
    """Second kernel: waits for every rank's entries, and counts them."""
    ep, K, e = sizes.ep_size, sizes.top_k, sizes.local_experts
    _run(
        scratch, count, (sizes.blocks, ep),
        buffer.view("ids"), buffer.view("tokens"), buffer.view("routed"), buffer.epoch, buffer.error, scratch.starts,
        buffer.rank, buffer.t_max, _POLLS_PER_SECOND * buffer.timeout_seconds, ep, K, e, triton.next_power_of_2(e),
        BLOCK, STEP,
    )  # fmt: skip


def build(buffer: SymmBuffer, scratch: Scratch, tables: Tables, sizes: Sizes) -> None:
    """The other three kernels: fills the tables."""
    ep, K, e = sizes.ep_size, sizes.top_k, sizes.local_experts
    pad, blocks, rank, t_max = triton.next_power_of_2(e), sizes.blocks, buffer.rank, buffer.t_max
    ids, scores, tokens = buffer.view("ids"), buffer.view("scores"), buffer.view("tokens")
    _run(
        scratch, scan, (e,),
        scratch.starts, scratch.bounds, scratch.counts, blocks, ep, triton.next_power_of_2(ep * blocks),
    )  # fmt: skip
    _run(
        scratch, tiles, (e,),
        scratch.counts, scratch.bounds, tables.tiles, tables.expert_rows, tables.tiles_of, tables.num_tiles,
        tables.rows, tables.scores, tokens, tables.tokens, t_max, ep, e, pad, TILE,
    )  # fmt: skip
    _run(
        scratch, place, (blocks, ep),
        ids, scores, tokens, scratch.counts, scratch.starts, tables.rows, tables.scores, tables.row_of, rank, t_max,
        ep, K, e, pad, TILE, BLOCK, STEP,
    )  # fmt: skip
