"""Times of a step by what they went to, from traces whose answer is known."""

import gzip
import json
from collections import defaultdict

import pytest
import torch
from torchtitan.tools.profiler import Profiler

from titan_mega_moe import traces
from titan_mega_moe.op import mega_moe
from titan_mega_moe.op.ranges import phase


def event(name, ts, dur, cat="kernel", tid=7):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "pid": 0, "tid": tid}


def ranges_of(file):
    """Durations of the layer's ranges in a CPU's trace, and from the first operator's start to the last one's end."""
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt") as lines:
        events = [e for e in json.load(lines)["traceEvents"] if e.get("ph") == "X"]
    found = defaultdict(list)
    for e in events:
        if e["cat"] == "user_annotation" and e["name"].startswith("mega_moe::"):
            found[e["name"].removeprefix("mega_moe::")].append(e["dur"])
    ops = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["cat"] == "cpu_op"]
    return dict(found), max(end for _, end in ops) - min(start for start, _ in ops)


def split(tmp_path, *events):
    file = tmp_path / "profiling" / "traces" / "iteration_4" / "rank0_trace.json.gz"
    file.parent.mkdir(parents=True)
    with gzip.open(file, "wt") as out:
        json.dump({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}, out)
    return traces.time_split(tmp_path)


def test_kernels_go_by_name_else_by_the_range_around_them_and_gaps_are_idle(tmp_path):
    found = split(
        tmp_path,
        event("ProfilerStep#4", 0, 1000, "user_annotation"),
        event("aten::mm", 0, 900, "cpu_op", tid=1),  # the host is busy meanwhile
        event("publish", 0, 10),
        event("gate_up", 10, 30),
        event("combine", 40, 10),
        event("ncclDevKernel_AllGather_RING_LL", 40, 10, tid=8),  # beside the combine
        event("FSDP::post_backward_reduce", 50, 20, "gpu_user_annotation"),
        event("vectorized_elementwise_kernel", 55, 10),
        event("vectorized_elementwise_kernel", 80, 20),
    )
    # Busy 0 to 50, 55 to 65 and 80 to 100, in which 90 us of kernels run.
    assert found == pytest.approx(
        {
            "dispatch": 80 * 10 / 90,
            "combine": 80 * 10 / 90,
            "experts": 80 * 30 / 90,
            "FSDP": 80 * 20 / 90,
            "other": 80 * 20 / 90,
            "idle": 20,
        }
    )


def test_an_operator_counts_without_those_that_it_calls(tmp_path):
    found = split(
        tmp_path,
        event("Optimizer.step#AdamW.step", 0, 50, "user_annotation"),
        event("aten::_foreach_add_", 0, 40, "cpu_op"),
        event("aten::empty", 10, 10, "cpu_op"),
        event("titan_mega_moe::mega_moe", 50, 50, "cpu_op"),
        event("c10d::alltoall_base_", 60, 20, "cpu_op"),
        event("aten::copy_", 65, 5, "cpu_op"),
    )
    assert found == pytest.approx({"optimizer": 40 * 90 / 90, "experts": 30, "dispatch": 20, "idle": 10})


def test_what_goes_on_after_the_operator_that_began_it_takes_nothing_from_the_next(tmp_path):
    found = split(
        tmp_path,
        event("c10d::send", 0, 10, "cpu_op"),
        event("gloo:send", 5, 95, "user_annotation"),
        event("aten::_grouped_mm", 20, 80, "cpu_op"),
    )
    assert found == pytest.approx({"other": 10, "experts": 80, "idle": 10})


def test_no_trace_is_none(tmp_path):
    assert traces.time_split(tmp_path) is None


def test_the_profiler_is_in_the_steps_of_its_traces_and_in_the_next(tmp_path):
    profiler = Profiler.Config(profiler_warmup=2, profiler_active=1)
    assert traces.disturbed_steps(tmp_path, profiler) == []
    for step in (10, 20):
        folder = tmp_path / "iteration_9" / "profiling" / f"iteration_{step}"
        folder.mkdir(parents=True)
        (folder / "rank0_trace.json.gz").touch()
    assert traces.disturbed_steps(tmp_path, profiler) == [8, 9, 10, 11, 18, 19, 20, 21]


def test_a_phase_keeps_what_it_calls_and_the_time_between(tmp_path):
    """The combine's all-to-all is no dispatch; what a phase spends in no operator is the phase's all the same."""
    found = split(
        tmp_path,
        event("titan_mega_moe::mega_moe", 0, 90, "cpu_op"),
        event("mega_moe::forward", 0, 90, "user_annotation"),
        event("mega_moe::dispatch", 0, 20, "user_annotation"),
        event("c10d::alltoall_base_", 5, 10, "cpu_op"),
        event("mega_moe::experts", 20, 40, "user_annotation"),
        event("aten::_foreach_add_", 30, 10, "cpu_op"),
        event("mega_moe::combine", 60, 25, "user_annotation"),
        event("c10d::alltoall_base_", 65, 15, "cpu_op"),
        event("aten::copy_", 70, 5, "cpu_op"),
        event("c10d::alltoall_base_", 90, 10, "cpu_op"),  # another layer's
    )
    assert found == pytest.approx({"dispatch": 20 + 10, "experts": 40 + 5, "combine": 25, "idle": 0})


def test_the_op_names_its_phases_and_their_time_is_that_of_the_ranges(tmp_path):
    g = torch.Generator().manual_seed(0)
    T, D, F, E, K = 64, 32, 48, 4, 2
    x, w1, w3 = (torch.randn(*size, generator=g) for size in ((T, D), (E, F, D), (E, F, D)))
    leaves = [x, torch.rand(T, K, generator=g), w1, torch.randn(E, D, F, generator=g), w3]
    for leaf in leaves:
        leaf.requires_grad_()
    x, scores, *weights = leaves
    ids = torch.randint(E, (T, K), generator=g)

    def step():
        y = mega_moe(x, ids, scores, *weights, num_experts=E, group=None, backend="reference")
        torch.autograd.grad(y.sum(), leaves)

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            step()
    profile.export_chrome_trace(str(tmp_path / "rank0_trace.json"))
    durations, length = ranges_of(tmp_path / "rank0_trace.json")
    assert {name: len(found) for name, found in durations.items()} == {
        "forward": 3, "backward": 3, "dispatch": 6, "experts": 6, "combine": 6
    }  # fmt: skip
    found = traces.time_split(tmp_path)
    assert sum(found.values()) == pytest.approx(100)
    for name in ("dispatch", "combine"):
        assert found[name] == pytest.approx(100 * sum(durations[name]) / length, rel=1e-3)
    both = sum(durations["forward"]) + sum(durations["backward"])
    assert found["experts"] >= 100 * sum(durations["experts"]) / length
    # The ops themselves are a little longer than what they run.
    assert found["dispatch"] + found["experts"] + found["combine"] >= 100 * both / length


def test_without_a_profiler_a_range_is_nothing():
    assert phase("dispatch") is phase("combine")
