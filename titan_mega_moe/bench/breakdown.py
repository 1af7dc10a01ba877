"""Where the time of one forward and backward goes: each kernel of ours on a GPU, each phase of the reference on a CPU.

Numbers come from torch's profiler over a burst; what a part computes and must move follows from the rows that the
routing makes. Bytes are those of each distinct operand and result once: weights, rows, tokens that a rank needs.
"""

import statistics
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from titan_mega_moe.bench.layers import Bound, Inputs, OpLayer, ranks_of
from titan_mega_moe.bench.measure import BF16_BYTES, Protocol, Ranks, times
from titan_mega_moe.traces import covered

ROUTING = ("publish", "count", "scan", "tiles", "place", "begin", "meet")
COPIES, OTHER = "copies", "other kernels"


def measure(one: OpLayer, bound: Bound, inputs: Inputs, ranks: Ranks, protocol: Protocol) -> dict[str, Any]:
    """Where a forward and backward of the bound layer spends its time. A collective.

    `parts` in the order of their first start, each with its `ms` (median of a burst's, of the slowest rank) and
    `launches`, and `flops`, `bytes` of memory and `link_bytes` where known; `profiled_ms` of a step in the burst, from
    the first start to the last end, and `busy_ms`, in how much of it any part ran; `sending`, what sending the tokens
    takes alone.
    """
    ranks.meet()
    for _ in range(protocol.warmups):
        bound.step()
    ranks.meet()
    kind = torch.profiler.ProfilerActivity.CUDA if ranks.cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        for _ in range(protocol.timed):
            bound.step()
        if ranks.cuda:
            torch.cuda.synchronize()
    spans = _kernels(profile.events()) if ranks.cuda else _phases(profile.events())
    found = {name: _of_a_step(of_name, protocol.timed) for name, of_name in spans.items()}
    flat = [span for of_name in spans.values() for span in of_name]
    busy = covered(flat) / protocol.timed
    length = (max(end for _, end in flat) - min(start for start, _ in flat)) / protocol.timed if flat else 0.0
    everyone = ranks.gather(found)
    slowest = {name: max((f[name] for f in everyone if name in f), key=lambda p: p["ms"]) for name in everyone[0]}
    work = _work(inputs, ranks, one.keep)
    for name, part in slowest.items():
        part |= {what: total for what, total in work.get(name, {}).items() if total}
    busy, length = max(ranks.gather((busy, length)), key=lambda pair: pair[1])
    sending = _sending(one, inputs, ranks, protocol)
    return {"parts": slowest, "busy_ms": busy, "profiled_ms": length, "sending": sending}


def _kernels(events: Any) -> dict[str, list[tuple[float, float]]]:
    """Start and end in ms of everything that ran on the GPU, by name: kernels of ours, copies, the rest."""
    from titan_mega_moe.op.triton.cuda import KERNELS

    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for e in sorted(events, key=lambda e: e.time_range.start):
        if e.device_type != torch.autograd.DeviceType.CUDA or getattr(e, "is_user_annotation", False):
            continue
        ours = e.name in KERNELS or e.name in ROUTING
        name = e.name if ours else COPIES if e.name.startswith("Memcpy") else OTHER
        spans[name].append((e.time_range.start / 1e3, e.time_range.end / 1e3))
    return spans


def _phases(events: Any) -> dict[str, list[tuple[float, float]]]:
    """The same of the ranges that a backend names, with the pass that they are in: "forward dispatch"."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    passes = []
    for e in sorted(events, key=lambda e: (e.time_range.start, -e.time_range.end)):
        _, ours, name = e.name.partition("mega_moe::")
        if not ours or not e.name.startswith(ours):
            continue
        if name in ("forward", "backward"):
            passes.append((e.time_range.end, name))
        else:
            (around,) = [p for end, p in passes[-1:] if e.time_range.start <= end]
            spans[f"{around} {name}"].append((e.time_range.start / 1e3, e.time_range.end / 1e3))
    return spans


def _of_a_step(spans: list[tuple[float, float]], steps: int) -> dict[str, float]:
    launches = len(spans) // steps
    if launches * steps != len(spans):  # what some steps alone run
        return {"ms": sum(end - start for start, end in spans) / steps, "launches": len(spans) / steps}
    each = [sum(end - start for start, end in spans[i * launches : (i + 1) * launches]) for i in range(steps)]
    return {"ms": statistics.median(each), "launches": launches}


def _work(inputs: Inputs, ranks: Ranks, keep: str) -> dict[str, dict[str, float]]:
    """Of each kernel or phase what it computes, and moves in memory and to peers; of this group's busiest rank."""
    s, (rank, ep) = inputs.shape, ranks_of(inputs.group)
    e = s.E // ep
    home_TK = torch.where(inputs.ids_TK < 0, ep, inputs.ids_TK // e)
    rows = torch.bincount(home_TK.flatten(), minlength=ep + 1)[:ep].double()
    needed = home_TK.new_zeros(len(home_TK), ep + 1).scatter_(1, home_TK, 1)[:, :ep].sum(0).double()
    sums_sent = needed.clone()  # of each rank, for this one's tokens: what comes back
    sums_sent[rank] = 0
    if inputs.group is not None:
        for t in (rows, needed, sums_sent):
            dist.all_reduce(t, group=inputs.group)
    R, x, sums = float(rows.max()), float(needed.max()), float(sums_sent.max())
    T = ranks.most([float(inputs.ids_TK.shape[0])])[0]
    D, F = s.D, s.F
    row_d, row_f, one, w = R * D, R * F, R * D * F, float(e * D * F)
    kept = 2 * row_f  # g and u
    runs = 1 if keep == "activations" else 2
    back = sums * D
    flops_elements = {
        "gate_up": (4 * one * runs, runs * (x * D + 2 * w + row_f) + kept, 0),
        "down": (2 * one, row_f + w + row_d, back),
        "combine": (0, 2 * (row_d + T * D), 0),  # a forward's and a backward's
        "down_backward": (2 * one, x * D + w + 4 * row_f, 0),
        "gate_up_backward": (4 * one, 2 * row_f + 2 * w + row_d, back),
        "weight_grad_down": (2 * one, x * D + row_f + w, 0),
        "weight_grad_gate_up": (4 * one, x * D + 2 * row_f + 2 * w, 0),
        COPIES: (0, 0, (ep - 1) * T * D * 3),  # x, then x and dy
        "forward experts": (6 * one, x * D + 3 * w + row_d, 0),
        "backward experts": (12 * one, 2 * x * D + 6 * w + row_d, 0),
        "forward dispatch": (0, 0, back),
        "forward combine": (0, 0, back),
        "backward dispatch": (0, 0, 2 * back),
        "backward combine": (0, 0, back),
    }
    return {
        name: {"flops": float(flops), "bytes": float(BF16_BYTES * elements), "link_bytes": float(BF16_BYTES * link)}
        for name, (flops, elements, link) in flops_elements.items()
    }


def _sending(one: OpLayer, inputs: Inputs, ranks: Ranks, protocol: Protocol) -> dict[str, float] | None:
    """`alone_ms` of all ranks sending their tokens to every peer at once, nothing else running, and `link_bytes`; None
    where that is no step of its own."""
    if one.backend != "triton" or inputs.group is None or one.plan is None:
        return None
    from titan_mega_moe.op.triton.backend import BACKEND

    symm = BACKEND.symm_buffer(one.plan)
    rows = inputs.x_TD.detach()
    # Between calls: the flags already hold the epoch that this sends again.
    ms = times(lambda: symm.send(rows, 0), ranks, protocol)["burst_ms"]
    ranks.meet()
    most = ranks.most([float(rows.shape[0])])[0]
    return {"alone_ms": ms, "link_bytes": (ranks.size - 1) * most * rows.shape[1] * BF16_BYTES}
