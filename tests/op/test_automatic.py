"""What backend "auto" is: the GPU, what is installed, what bench found, and one answer for a whole group."""

import json
import logging
import re
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.op import deep_gemm_double as double
from titan_mega_moe.op import backends, deep_gemm, fastest, mega_moe
from titan_mega_moe.op.fastest import Sizes, Timing
from titan_mega_moe.op.triton import BACKEND as TRITON

E_K_D_F = (8, 2, 256, 128)
SIZES = Sizes(1, *E_K_D_F)
BUILD = f"deep_gemm {double.__version__} at {double.__file__}"
TIMING = Timing("NVIDIA H200", BUILD, SIZES, {"triton": 3.0, "deep_gemm": 2.5})
NO_GPU = "its kernels need an NVIDIA Hopper GPU"


@contextmanager
def machine(cache, gpu=("NVIDIA H200", (9, 0)), stand_in=True):
    """A GPU and deep_gemm's stand-in, as far as anybody asks, and `cache` as the cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TITAN_MEGA_MOE_CACHE", str(cache))
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_name", lambda device=None: gpu[0])
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: gpu[1])
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(backends, "_automatic", {})
        patch.setitem(sys.modules, "deep_gemm", double.variant() if stand_in else None)
        # Whether its compiler is installed is not the question here.
        hopper = None if gpu[1][0] == 9 else f"{NO_GPU}, this is another"
        patch.setattr(TRITON, "unavailable_reason", lambda device: hopper)
        yield patch


@pytest.fixture
def hopper(tmp_path):
    with machine(tmp_path) as patch:
        yield patch


def test_our_kernels_until_bench_has_timed_both(hopper):
    assert backends.automatic("cuda", SIZES) == (
        "triton",
        f"the default: bench has not timed it beside {BUILD} on NVIDIA H200 for EP=1 E=8 K=2 D=256 F=128",
    )
    assert backends.automatic("cuda")[0] == "triton"


@pytest.mark.parametrize(
    ("ms", "chosen", "said"),
    [
        ({"triton": 3.0, "deep_gemm": 2.5}, "deep_gemm", "triton 3.00 ms, deep_gemm 2.50 ms"),
        ({"triton": 2.5, "deep_gemm": 3.0}, "triton", "triton 2.50 ms, deep_gemm 3.00 ms"),
        ({"triton": 2.5, "deep_gemm": 2.5}, "triton", "triton 2.50 ms, deep_gemm 2.50 ms"),
        ({"triton": 3.0, "deep_gemm": None}, "triton", "triton 3.00 ms, deep_gemm gave wrong results"),
        ({"triton": None, "deep_gemm": 4.0}, "deep_gemm", "triton gave wrong results, deep_gemm 4.00 ms"),
        ({"triton": None, "deep_gemm": None}, "triton", "triton gave wrong results, deep_gemm gave wrong results"),
    ],
)
def test_what_bench_found_faster(hopper, ms, chosen, said):
    replace(TIMING, ms=ms).save()
    assert backends.automatic("cuda", SIZES) == (
        chosen,
        f"bench timed forward and backward on this GPU model: {said}",
    )


@pytest.mark.parametrize(
    "other",
    [
        {"gpu": "NVIDIA H100"},
        {"deep_gemm": "deep_gemm 2.0"},
        {"titan_mega_moe": "0.0.0"},
        *({"sizes": replace(SIZES, **{name: 2 * getattr(SIZES, name)})} for name in vars(SIZES)),
    ],
    ids=str,
)
def test_what_bench_found_for_anything_else_says_nothing(hopper, other):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastest, "__version__", other.get("titan_mega_moe", fastest.__version__))
        replace(TIMING, **other).save()
    assert backends.automatic("cuda", SIZES)[0] == "triton"
    assert list(fastest.recall_all("NVIDIA H200", BUILD)) == ([replace(TIMING, **other)] if "sizes" in other else [])


def test_the_last_bench_counts_and_leaves_one_file(hopper, tmp_path):
    path = TIMING.save()
    assert replace(TIMING, ms={"triton": 1.0, "deep_gemm": 2.0}).save() == path
    assert list(tmp_path.iterdir()) == [path]
    assert json.loads(path.read_text())["gpu"] == "NVIDIA H200"
    assert backends.automatic("cuda", SIZES)[0] == "triton"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"gpu": "NVIDIA H200"}', '{"sizes": {}, "ms": 3}'])
def test_a_file_that_bench_did_not_write_is_said_and_not_followed(hopper, text):
    path = TIMING.save()
    path.write_text(text)
    name, reason = backends.automatic("cuda", SIZES)
    assert name == "triton" and reason.startswith(f"the default: {path} cannot be read (")
    assert reason.endswith("delete it and run bench again")


def test_blackwell_takes_deep_gemm_where_it_can_train(tmp_path):
    with machine(tmp_path, gpu=("NVIDIA B200", (10, 0))):
        assert backends.automatic("cuda", SIZES) == ("deep_gemm", f"triton: {NO_GPU}, this is another")


def test_without_deep_gemm_our_kernels(tmp_path):
    with machine(tmp_path, stand_in=False):
        TIMING.save()
        name, reason = backends.automatic("cuda", SIZES)
    assert name == "triton" and reason == f"deep_gemm: deep_gemm is not installed; {deep_gemm.REMEDY}"


def test_a_gpu_that_runs_neither_is_an_error_with_both_reasons_and_the_remedy(tmp_path):
    with machine(tmp_path, gpu=("NVIDIA A100", (8, 0))), pytest.raises(RuntimeError) as caught:
        backends.require("auto", "cuda")
    for part in ("triton: its kernels need", "deep_gemm: it needs a Hopper or Blackwell", 'backend = "reference"'):
        assert part in str(caught.value)


# --- one answer for a group


def choose() -> str:
    return backends.choose("auto", "cuda", dist.group.WORLD.group_name, *E_K_D_F)


def decide(folders: list[str], timed: int) -> tuple[str, int]:
    """What this rank's host chooses, given that bench ran on one rank's; how many times it was asked."""
    rank = dist.get_rank()
    asked = []
    with machine(folders[rank]) as patch:
        if rank == timed:
            replace(TIMING, sizes=replace(SIZES, ep_size=2)).save()
        recall = fastest.recall
        patch.setattr(fastest, "recall", lambda *args: asked.append(args) or recall(*args))
        first = choose()
        # Decided once: neither files nor ranks are asked again.
        patch.setattr(dist, "all_gather_object", None)
        assert choose() == first
    return first, len(asked)


@pytest.mark.parametrize(("timed", "expected"), [(0, "deep_gemm"), (1, "triton")])
def test_where_hosts_know_different_things_the_first_rank_decides(tmp_path, timed, expected):
    folders = [str(tmp_path / name) for name in "ab"]
    assert ranks.run(2, decide, folders, timed, timeout=150) == [(expected, 1)] * 2


def installed_on_one(folder: str, where: int) -> str:
    blackwell = ("NVIDIA B200", (10, 0))
    with machine(folder, blackwell, stand_in=dist.get_rank() == where), pytest.raises(RuntimeError) as caught:
        choose()
    return str(caught.value)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (0, "is deep_gemm on the first rank .* and rank 1 of it cannot run that: deep_gemm is not installed"),
        (1, "no fused backend runs on this GPU .*deep_gemm is not installed"),
    ],
)
def test_a_rank_that_cannot_follow_is_an_error_on_every_rank(tmp_path, where, expected):
    said = ranks.run(2, installed_on_one, str(tmp_path), where, timeout=150)
    assert said[0] == said[1] and re.search(expected, said[0])


def test_the_reason_is_logged_once(hopper, caplog):
    TIMING.save()
    with caplog.at_level(logging.INFO, "titan_mega_moe"):
        assert [backends.choose("auto", "cuda", "", *E_K_D_F) for _ in range(3)] == ["deep_gemm"] * 3
    assert [record.message for record in caplog.records] == [
        'backend "auto" is deep_gemm for EP=1 E=8 K=2 D=256 F=128: bench timed forward and backward on this GPU model: '
        "triton 3.00 ms, deep_gemm 2.50 ms"
    ]


def test_a_name_is_not_second_guessed(hopper):
    TIMING.save()
    assert backends.choose("triton", "cuda", "", *E_K_D_F) == "triton"


def body(x, *rest):
    return mega_moe(x, *rest, num_experts=4, group=None)


def test_the_choice_is_a_constant_of_a_graph_with_dynamic_shapes():
    """auto looks at sizes, which a compiler may have made symbols of."""
    ids, scores = torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    tensors = [torch.randn(6, 16), ids, scores, *(torch.randn(4, *s) for s in ((8, 16), (16, 8), (8, 16)))]
    compiled = torch.compile(body, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(*tensors), body(*tensors))
