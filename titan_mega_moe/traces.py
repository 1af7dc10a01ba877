"""Where a step's time went, from the trace that TorchTitan's profiler wrote of it."""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# What a kernel or operator belongs to: the range of a phase of ours that encloses it, else the first category with a
# pattern in its name, else that of what encloses it.
CATEGORIES = {
    "dispatch": (
        r"mega_moe::(dispatch|routing)|^(publish|count|scan|tiles|place|begin)$|(?i:all_?to_?all)|async.*dispatch"
    ),
    "combine": r"mega_moe::combine|^combine$|async.*combine",
    "experts": r"mega_moe|^(gate_up|down|weight_grad)|grouped|GroupProblemShape|moe_",
    "attention": r"(?i)attention|flash|flex|sdpa|fmha",
    "optimizer": r"(?i)optimizer|adam|multi_tensor|_foreach",
    "FSDP": r"FSDP|(?i:all_?gather|reduce_?scatter)",
}
OTHER, IDLE = "other", "idle"
_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_PHASE = re.compile(r"^mega_moe::(?!forward|backward)")  # op/ranges.py: what runs inside is that, whatever its name


def time_split(where: Path) -> dict[str, float] | None:
    """Percent of the profiled steps' time by category, `other` and `idle`; None where there is no trace.

    where: a trace, or a run's folder with rank 0's in it. Of a GPU its kernels count, else the CPU's operators, without
    what they call. Where several run at once the time they cover is shared out by their lengths.
    """
    found = [where] if where.is_file() else sorted(where.glob("**/rank0_trace.json*"), key=lambda f: f.stat().st_mtime)
    if not found:
        return None
    with (gzip.open if found[-1].suffix == ".gz" else open)(found[-1], "rt") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    on_gpu = any(e.get("cat") in _GPU for e in events)
    work, around = (_GPU, {"gpu_user_annotation"}) if on_gpu else ({"cpu_op"}, {"user_annotation"})
    events = [e for e in events if e.get("cat") in work | around and not e["name"].startswith("ProfilerStep")]
    spent = _by_category(events, work)
    if not spent:
        return None
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["cat"] in work]
    length = max(end for _, end in spans) - min(start for start, _ in spans)
    busy, total = 100 * covered(spans) / length, sum(spent.values())
    return {name: busy * spent[name] / total for name in (*CATEGORIES, OTHER) if spent[name]} | {IDLE: 100 - busy}


def disturbed_steps(folder: Path, profiler: Any) -> list[int]:
    """The steps of a run whose times its profiler is in: those that it ran in, its warm-up too, and after each trace
    the step whose time has the writing of it.

    folder: the run's; profiler: its section of the configuration.
    """
    found: set[int] = set()
    for trace in folder.glob("**/rank0_trace.json*"):
        if (last := step_of(trace)) is not None:
            found |= {*range(last + 1 - profiler.profiler_warmup - profiler.profiler_active, last + 2)}
    return sorted(found)


def step_of(trace: Path) -> int | None:
    """The last step that TorchTitan's profiler wrote to `trace`, .../iteration_N/rank0_trace.json.gz."""
    found = re.findall(r"iteration_(\d+)", str(trace))
    return int(found[-1]) if found else None


def _by_category(events: list[dict[str, Any]], work: set[str]) -> dict[str, float]:
    """Microseconds of each category, without what is nested in an event."""
    spent: dict[str, float] = defaultdict(float)
    by_thread = defaultdict(list)
    for event in events:
        by_thread[event["pid"], event["tid"]].append(event)
    for thread in by_thread.values():
        open_events: list[tuple[float, str, bool, bool]] = []  # end, category, is work or in it, is a phase or in it
        for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            while open_events and event["ts"] >= open_events[-1][0]:
                open_events.pop()
            last, around, in_work, in_phase = open_events[-1] if open_events else (0.0, OTHER, False, False)
            end = event["ts"] + event["dur"]
            if in_work:
                end = min(end, last)  # gloo's sends go on after the operator that began them
            phase = _PHASE.match(event["name"]) is not None
            category = around if in_phase and not phase else _category(event["name"], around)
            counts = in_work or event["cat"] in work
            if counts:
                spent[category] += end - event["ts"]
            if in_work:
                spent[around] -= end - event["ts"]
            open_events.append((end, category, counts, in_phase or phase))
    return spent


def _category(name: str, default: str) -> str:
    return next((category for category, pattern in CATEGORIES.items() if re.search(pattern, name)), default)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of what spans of (start, end) cover together."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
