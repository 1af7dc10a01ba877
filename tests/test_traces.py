"""Times of a step by what they went to, from traces whose answer is known."""

import gzip
import json

import pytest
import torch

from titan_mega_moe import traces


def event(name, ts, dur, cat="kernel", tid=7):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "pid": 0, "tid": tid}


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


def test_no_trace_is_none(tmp_path):
    assert traces.time_split(tmp_path) is None


def test_a_trace_of_the_real_profiler(tmp_path):
    x = torch.randn(512, 512)
    x = x @ x / 512  # the first product sets up what the others use
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with torch.profiler.record_function("mega_moe::experts"):
            for _ in range(20):
                x = x @ x / 512
        x.neg()
    profile.export_chrome_trace(str(tmp_path / "rank0_trace.json"))
    found = traces.time_split(tmp_path)
    assert found["experts"] > found["other"] > 0
    assert sum(found.values()) == pytest.approx(100)
