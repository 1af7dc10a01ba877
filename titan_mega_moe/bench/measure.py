"""Times, memory, errors and the machine's ceilings. Functions that take a Ranks are collectives of it."""

import gc
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from titan_mega_moe.bench.layers import TENSORS, Bound, Inputs, Layer, Shape

BF16_BYTES = 2
# A value rounded once to bf16 is at most this far off, relative to itself.
BF16_ROUNDING = 2.0**-9


@dataclass(frozen=True)
class Protocol:
    """A burst is `timed` calls in a row after `warmups`; sustained is the mean of so many in a row."""

    warmups: int = 3
    timed: int = 10
    bursts: int = 5
    sustained: int = 60
    pause_s: float = 0.05  # before each burst, for the clocks to recover


@dataclass(frozen=True)
class Ranks:
    """This rank's device and the group that measures together; group None for one rank."""

    device: torch.device
    group: ProcessGroup | None

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def meet(self) -> None:
        """Wait for the device and for every rank."""
        if self.cuda:
            torch.cuda.synchronize()
        if self.group is not None:
            dist.barrier(self.group)

    def reduce(self, values: list[float], op: Any = dist.ReduceOp.SUM) -> list[float]:
        """Elementwise over all ranks."""
        t = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.group is not None:
            dist.all_reduce(t, op, group=self.group)
        return t.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        values = [value] * self.size
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def most(self, values: list[float]) -> list[float]:
        return self.reduce(values, dist.ReduceOp.MAX)


def times(call: Callable[[], object], ranks: Ranks, protocol: Protocol) -> dict[str, Any]:
    """Milliseconds of one call, of the slowest rank: median of the bursts, each burst, and sustained."""
    bursts = []
    for _ in range(protocol.bursts):
        ranks.meet()
        time.sleep(protocol.pause_s)
        for _ in range(protocol.warmups):
            call()
        bursts.append(_mean_ms(call, protocol.timed, ranks))
    ranks.meet()
    last = _mean_ms(call, protocol.sustained, ranks)
    *slowest, sustained = ranks.most([*bursts, last])
    return {"burst_ms": statistics.median(slowest), "bursts_ms": slowest, "sustained_ms": sustained}


def _mean_ms(call: Callable[[], object], count: int, ranks: Ranks) -> float:
    if not ranks.cuda:
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) * 1e3 / count
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def work(inputs: Inputs, ranks: Ranks) -> dict[str, dict[str, float]]:
    """What has to be done per GPU, in the forward and in both passes: flops, bytes to others, of memory.

    Flops count the group's rows over EP. Bytes to others: a token's row once to each rank that needs it, and
    one partial sum back; of the rank with the most to send. Memory: weights, tokens and gradients once each.
    """
    s, ep = inputs.shape, ranks.size
    e = s.E // ep
    rows = ranks.reduce([float((inputs.ids_TK >= 0).sum())])[0] / ep
    home_TK = torch.where(inputs.ids_TK < 0, ep, inputs.ids_TK // e)
    needed = home_TK.new_zeros(len(home_TK), ep + 1).scatter_(1, home_TK, 1)
    me = 0 if inputs.group is None else inputs.group.rank()
    sent = needed[:, :ep].sum(0).double()
    sent[me] = 0
    table = torch.zeros(ep, ep, dtype=torch.float64, device=ranks.device)
    table[me] = sent
    if inputs.group is not None:
        dist.all_reduce(table, group=inputs.group)
    crossing = float((table.sum(0) + table.sum(1)).max()) * s.D * BF16_BYTES
    flops = 6.0 * rows * s.D * s.F
    weights = 3.0 * e * s.D * s.F * BF16_BYTES
    tokens = 2.0 * ranks.most([float(inputs.ids_TK.shape[0])])[0] * s.D * BF16_BYTES
    forward = {"flops": flops, "link_bytes": crossing, "memory_bytes": weights + tokens}
    both = {"flops": 3 * flops, "link_bytes": 2 * crossing, "memory_bytes": 3 * weights + 2.5 * tokens}
    return {"forward": forward, "forward_backward": both, "rows": {"per_gpu": rows}}


def prepare(layer: Layer, shape: Shape, ranks: Ranks) -> tuple[dict[str, float], str | None]:
    """Prepare the layer: the bytes that took outside and inside of the caching allocator, of the worst rank;
    and why it failed on some rank, or None.
    """
    ranks.meet()
    before, failed = _device_bytes(ranks), None
    try:
        layer.prepare(shape, ranks.group, ranks.device)
    except (ImportError, RuntimeError, ValueError) as error:
        failed = str(error).splitlines()[0]
    outside, inside = (now - then for now, then in zip(_device_bytes(ranks), before, strict=True))
    reason = next((r for r in ranks.gather(failed) if r is not None), None)
    outside, inside = ranks.most([outside, inside])
    return {"outside": outside, "inside": inside}, reason


def _device_bytes(ranks: Ranks) -> tuple[float, float]:
    """In use on the device and not held by the caching allocator; allocated from the caching allocator."""
    if not ranks.cuda:
        return 0.0, 0.0
    free, total = torch.cuda.mem_get_info()
    return float(total - free - torch.cuda.memory_reserved()), float(torch.cuda.memory_allocated())


def peak_bytes(make: Callable[[], Bound], ranks: Ranks) -> float | None:
    """Most bytes that inputs, one forward and one backward hold at a time, of the worst rank; None on a CPU.

    `make` builds the inputs and binds the layer to them, after everything that is no part of it was counted.
    """
    if not ranks.cuda:
        return None
    gc.collect()
    ranks.meet()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    bound = make()
    torch.cuda.reset_peak_memory_stats()
    bound.step()
    ranks.meet()
    return ranks.most([float(torch.cuda.max_memory_allocated() - before)])[0]


@contextmanager
def poisoned() -> Iterator[None]:
    """Every tensor that torch allocates without a value holds NaN: one never written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


def errors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], ranks: Ranks) -> dict[str, float]:
    """Relative Frobenius error of each tensor, over all ranks; the norm where the exact one is zero."""
    squares = []
    for name in TENSORS:
        exact = want[name].double()
        squares += [float((got[name].double() - exact).square().sum()), float(exact.square().sum())]
    squares = ranks.reduce(squares)
    pairs = zip(TENSORS, squares[::2], squares[1::2], strict=True)
    return {name: math.sqrt(off / (norm or 1.0)) for name, off, norm in pairs}


def limits(
    upstream: dict[str, float] | None, want: dict[str, torch.Tensor], inputs: Inputs, ranks: Ranks
) -> dict[str, float]:
    """The error that each tensor may have: that of upstream's bf16 layer, or one rounding if larger.

    The error of n elements is itself a random number, known to about 1/sqrt(n): eight of that are allowed.
    A weight's gradient has no more independent roundings than there are gradients of g, u and h: rows x F.
    Where upstream's layer cannot run, twice the rounding stands in. An exact zero must be zero.
    """
    rounded = float((inputs.ids_TK >= 0).sum()) * inputs.shape.F
    numbers = []
    for name in TENSORS:
        size = float(want[name].numel())
        numbers += [min(size, rounded) if name.startswith("dw") else size, float(want[name].any())]
    counts = ranks.reduce(numbers)
    return {
        name: max(upstream[name] if upstream else 2 * BF16_ROUNDING, BF16_ROUNDING) * (1 + 8 / math.sqrt(n))
        if some
        else 0.0
        for name, n, some in zip(TENSORS, counts[::2], counts[1::2], strict=True)
    }


def differing(bound: Bound, repeats: int, ranks: Ranks) -> dict[str, int]:
    """In how many of `repeats` runs each tensor's bits differ from the first run's, on any rank.

    Each rank starts each run after a random pause of its own, so that the order of arrivals changes.
    """
    first = {name: t.clone() for name, t in bound.results().items()}
    counts = dict.fromkeys(TENSORS, 0)
    for _ in range(repeats):
        pause = random.random() * 1e-3
        if ranks.cuda:
            torch.cuda._sleep(int(pause * 1e9))  # cycles
        else:
            time.sleep(pause)
        again = bound.results()
        equal = [float(not torch.equal(_bits(again[n]), _bits(first[n]))) for n in TENSORS]
        for name, off in zip(TENSORS, ranks.most(equal), strict=True):
            counts[name] += int(off)
    return counts


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def product_ceiling(shape: Shape, ranks: Ranks, protocol: Protocol) -> dict[str, float]:
    """TFLOP/s of dense bf16 products with the layer's sizes: T*K rows by gate and up, then by down."""
    rows, D, F = shape.T * shape.K, shape.D, shape.F

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=ranks.device).bfloat16()

    x, h, w13, w2 = normal(rows, D), normal(rows, F), normal(2 * F, D), normal(D, F)
    up, down = torch.empty(rows, 2 * F, dtype=x.dtype, device=x.device), torch.empty_like(x)
    parts = {
        "gate_up": (lambda: torch.mm(x, w13.T, out=up), 4.0 * rows * D * F),
        "down": (lambda: torch.mm(h, w2.T, out=down), 2.0 * rows * D * F),
    }
    with torch.no_grad():
        timed = {name: times(call, ranks, protocol) for name, (call, _) in parts.items()}
    ms = {kind: sum(t[kind] for t in timed.values()) for kind in ("burst_ms", "sustained_ms")}
    flops = sum(f for _, f in parts.values())
    return {
        **{f"{name}_tflops": parts[name][1] / t["burst_ms"] / 1e9 for name, t in timed.items()},
        "tflops": flops / ms["burst_ms"] / 1e9,
        "sustained_tflops": flops / ms["sustained_ms"] / 1e9,
    }


def copy_ceilings(ranks: Ranks, protocol: Protocol) -> dict[str, Any]:
    """GB/s of a copy on the device (read and write counted) and of all ranks copying to their neighbours."""
    size = 2**28 if ranks.cuda else 2**24
    source = torch.zeros(size, dtype=torch.uint8, device=ranks.device)
    target = torch.empty_like(source)
    copy = times(lambda: target.copy_(source), ranks, protocol)
    found: dict[str, Any] = {"device_copy_gb_s": 2 * size / copy["burst_ms"] / 1e6}
    peer = _peer_copy(source, ranks)
    if isinstance(peer, str):
        return found | {"peer_copy_gb_s": None, "peer_copy": peer}
    call, how = peer
    moved = times(call, ranks, protocol)
    return found | {"peer_copy_gb_s": size / moved["burst_ms"] / 1e6, "peer_copy": how}


def _peer_copy(source: torch.Tensor, ranks: Ranks) -> tuple[Callable[[], object], str] | str:
    """A call that sends `source` to the right neighbour, and how; or why there is none."""
    if ranks.group is None:
        return "there is one rank"
    right = (ranks.group.rank() + 1) % ranks.size
    if not ranks.cuda:
        received = torch.empty_like(source)
        sizes = [len(source) if r == right else 0 for r in range(ranks.size)]
        left = (ranks.group.rank() - 1) % ranks.size
        arriving = [len(source) if r == left else 0 for r in range(ranks.size)]

        def exchange() -> None:
            dist.all_to_all_single(received, source, arriving, sizes, group=ranks.group)

        return exchange, "gloo all-to-all"
    import torch.distributed._symmetric_memory as symm_mem

    try:
        mine = symm_mem.empty(len(source), dtype=torch.uint8, device=ranks.device)
        handle = symm_mem.rendezvous(mine, ranks.group.group_name)
        theirs = handle.get_buffer(right, (len(source),), torch.uint8)
    except RuntimeError as error:
        return f"no symmetric memory: {str(error).splitlines()[0]}"

    def push(keep: Any = (mine, handle)) -> None:  # the mapping lasts as long as they do
        theirs.copy_(source)

    return push, "copy engine to symmetric memory, all ranks at once"
