"""What bench measures and says: numbers computed again from its JSON, and errors that it has to find."""

import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from titan_mega_moe import bench, cli, launch
from titan_mega_moe.bench import breakdown, layers, measure, report, routing, suite
from titan_mega_moe.bench.layers import TENSORS, Shape, make_inputs
from titan_mega_moe.bench.routing import Place, Routing
from titan_mega_moe.config import ConfigError
from titan_mega_moe.op import fastest, reference
from titan_mega_moe.op.triton.cuda import KERNELS

SMALL = Shape(T=24, D=64, F=72, E=8, K=3)
QUICK = measure.Protocol(warmups=1, timed=2, bursts=3, sustained=2, pause_s=0.0)
EVERY = [*(Routing(kind) for kind in routing.KINDS), Routing("skewed", "3")]
DEBUG = Path(__file__).parents[1] / "train_configs" / "debug_cpu.toml"


def here() -> measure.Ranks:
    return measure.Ranks(torch.device("cpu"), dist.group.WORLD if dist.get_world_size() > 1 else None)


def plan(**changes) -> suite.Plan:
    values = {"shapes": [SMALL], "routings": [Routing("random")], "layers": ["reference", "alltoall"]}
    return suite.Plan(**(values | {"protocol": QUICK} | changes))


def run_plan(asked: suite.Plan) -> dict:
    return suite.run(asked, here())


def run(world: int, asked: suite.Plan) -> dict:
    """The result, equal on every rank."""
    first, *others = ranks.run(world, run_plan, asked, timeout=120)
    assert all(other == first for other in others)
    return json.loads(json.dumps(first))


# --- routing


def ids_of(kind: Routing, ep: int, T: int = 60, E: int = 16, K: int = 4) -> list[torch.Tensor]:
    generators = [torch.Generator().manual_seed(rank) for rank in range(ep)]
    return [kind.ids(Place(kind.tokens(T, ep, rank), E, K, ep, rank), g) for rank, g in enumerate(generators)]


@pytest.mark.parametrize("kind", [*EVERY, Routing("skewed", "0.2")], ids=str)
def test_ids_are_experts_and_no_token_names_one_twice(kind):
    for ids_TK in ids_of(kind, 2):
        assert ids_TK.dtype == torch.int64 and ids_TK.shape[1] == 4
        assert ids_TK.numel() == 0 or (ids_TK.min() >= -1 and ids_TK.max() < 16)
        for row in ids_TK.tolist():
            named = [i for i in row if i >= 0]
            assert len(named) == len(set(named)) or kind.kind == "same-expert"


@pytest.mark.parametrize(("ratio", "ep"), [("7", 2), ("3", 2), ("0.2", 2), ("2", 4), ("1", 2)])
def test_skew_is_the_ratio_asked_for(ratio, ep):
    rows = torch.stack([torch.bincount(ids.flatten() // (16 // ep), minlength=ep) for ids in ids_of(
        Routing("skewed", ratio), ep, T=210)]).sum(0)  # fmt: skip
    share = float(ratio) / (float(ratio) + ep - 1)
    assert abs(int(rows[0]) - share * rows.sum()) <= ep


def test_skew_that_distinct_experts_cannot_make_is_refused():
    assert "7.0 of 8 distinct experts a token cannot be on rank 0" in Routing("skewed", "7").refusal(9, 8, 8, 2)
    assert "at least 2 ranks" in Routing("skewed", "7").refusal(9, 8, 2, 1)
    assert Routing("skewed", "7").refusal(16384, 128, 8, 2) is None


def test_kinds_are_what_their_names_say():
    balanced = torch.cat(ids_of(Routing("balanced"), 2)).flatten()
    assert set(torch.bincount(balanced, minlength=16).tolist()) == {30}
    assert all((ids[:, 0] == 0).all() and (ids[:, 1:] > 0).all() for ids in ids_of(Routing("one-expert"), 2))
    assert all((ids[:, 0] == 0).all() and (ids[:, 1:] < 0).all() for ids in ids_of(Routing("only-expert"), 2))
    assert all((ids == 8).all() for ids in ids_of(Routing("same-expert"), 2))
    assert all((ids == -1).all() for ids in ids_of(Routing("nowhere"), 2))
    assert [len(ids) for ids in ids_of(Routing("empty"), 3)] == [60, 60, 0]
    assert len({len(ids) for ids in ids_of(Routing("ragged"), 3)}) == 3
    assert 0 < (torch.cat(ids_of(Routing("holes"), 2)) < 0).sum() < 480


def test_replayed_ids_are_those_of_the_file(tmp_path):
    recorded = torch.rand(2, 5, 16).topk(3).indices
    torch.save(recorded, tmp_path / "ids.pt")
    (kind,) = routing.parse(f"file:{tmp_path}/ids.pt")
    assert all(torch.equal(a, b) for a, b in zip(ids_of(kind, 2, T=5, K=3), recorded, strict=True))
    assert kind.refusal(5, 16, 3, 2) is None
    assert "holds 10 tokens, 2 ranks of 6 need 12" in kind.refusal(6, 16, 3, 2)
    assert "its 3 ids a token are not the 4" in kind.refusal(5, 16, 4, 2)
    assert "outside [-1, 2)" in kind.refusal(5, 2, 3, 2)


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (torch.zeros(4, 2), r"got torch.float32 \(4, 2\)"),
        (torch.zeros(4, dtype=torch.int64), r"got torch.int64 \(4,\)"),
        (torch.zeros(0, 2, dtype=torch.int64), r"got torch.int64 \(0, 2\)"),
        (torch.ones(4, 2, dtype=torch.int64).to_sparse(), "got a tensor of layout torch.sparse_coo"),
        (torch.ones(4, 2, dtype=torch.int64, device="meta"), "got a tensor on meta, without values"),
        ({"ids": torch.zeros(4, 2)}, "got dict"),
        (b"no tensor at all", "torch.load cannot read it"),
        (None, "cannot be read: Is a directory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_holds_no_ids_is_refused(tmp_path, saved, said):
    path = tmp_path / "ids.pt"
    if saved is None:
        path.mkdir()
    elif isinstance(saved, bytes):
        path.write_bytes(saved)
    else:
        torch.save(saved, path)
    with pytest.raises(ConfigError, match=f"^--routing file:{path}: .*{said}"):
        routing.parse(f"file:{path}")


def test_nested_ids_are_refused(tmp_path):
    rows = [torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)]
    torch.save(torch.nested.nested_tensor(rows, layout=torch.jagged), tmp_path / "ids.pt")
    with pytest.raises(ConfigError, match=r"got a nested tensor|torch\.load cannot read it"):
        routing.parse(f"file:{tmp_path}/ids.pt")


# --- the layers that are compared


def upstream_against_float64(kinds: list[Routing]) -> list[tuple[dict, dict]]:
    found = []
    for number, kind in enumerate(kinds):
        inputs = layers.make_inputs(SMALL, kind, here().group, here().device, number)
        want = layers.exact(inputs)
        errors = []
        for name in ("alltoall", "reference"):
            one = layers.layer(name, "cpu")
            assert one.refusal(SMALL, kind, here().group) is None
            one.prepare(SMALL, here().group, here().device)
            errors.append(measure.errors(one.bind(inputs).results(), want, here()))
        found.append(tuple(errors))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_upstream_computes_the_same_layer_for_every_routing(world):
    """Padded where it wants equal token counts or full slots. Measured: 3e-3 to 6e-3, the op 2e-3 to 3e-3."""
    kinds = [k for k in EVERY if k.refusal(SMALL.T, SMALL.E, SMALL.K, world) is None]
    for kind, (theirs, ours) in zip(kinds, ranks.run(world, upstream_against_float64, kinds)[0], strict=True):
        for tensor in TENSORS:
            assert ours[tensor] <= theirs[tensor] < 1e-2, (kind, tensor)
            nothing = kind.kind == "nowhere" or (kind.kind == "empty" and world == 1)
            assert (theirs[tensor] == 0) == nothing, (kind, tensor)


def test_why_a_layer_is_left_out_is_in_the_result():
    result = run(2, plan(layers=["reference", "minimal_async_ep", "deepep", "triton", "deep_gemm"]))
    (case,) = result["cases"]
    assert list(case["layers"]) == ["reference"]
    for name in ("minimal_async_ep", "deepep"):
        assert case["refused"][name] == "it needs GPUs, the device is cpu"
    assert all("Hopper" in case["refused"][name] for name in ("triton", "deep_gemm"))
    # Without upstream among them its error is there all the same: the limit is made of it.
    assert case["layers"]["reference"]["upstream_errors"]["out"] > 1e-3


def test_a_shape_that_a_backend_refuses_leaves_the_others():
    result = ranks.run(2, refused_by_prepare)[0]
    assert result["cases"][0]["refused"] == {"reference:inputs": "no such size"}
    assert list(result["cases"][0]["layers"]) == ["reference"]


def refused_by_prepare() -> dict:
    def prepare(self, asked) -> None:
        if asked.keep == "inputs" and dist.get_rank() == 1:  # one rank's refusal is every rank's
            raise ValueError("no such size")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.Reference, "prepare", prepare)
        return run_plan(plan(layers=["reference", "reference:inputs"]))


# --- numbers, from the raw ones


def ids_here(asked: suite.Plan) -> list[list[int]]:
    (kind,) = asked.routings
    return layers.make_inputs(SMALL, kind, here().group, here().device, asked.seed).ids_TK.tolist()


@pytest.mark.parametrize("kind", ["random", "holes", "empty"])
def test_every_derived_number_follows_from_the_raw_ones(kind):
    asked = plan(routings=[Routing(kind)])
    ids = ranks.run(2, ids_here, asked)
    result = report.derive(run(2, asked))
    (case,), ceilings = result["cases"], result["ceilings"]

    rows = sum(i >= 0 for tokens in ids for slots in tokens for i in slots) / 2
    crossing = [sum(any(i >= 0 and i // 4 != rank for i in s) for s in ids[rank]) for rank in range(2)]
    flops, link = 6 * rows * 64 * 72, (crossing[0] + crossing[1]) * 64 * 2
    assert case["work"]["forward"]["flops"] == flops
    assert case["work"]["forward_backward"]["flops"] == 3 * flops
    assert case["work"]["forward"]["link_bytes"] == link
    assert case["work"]["forward_backward"]["link_bytes"] == 2 * link

    product = ceilings["products"][str(SMALL)]
    for layer, name in itertools.product(case["layers"].values(), report.PASSES):
        t, factor = layer[name], {"forward": 1, "forward_backward": 3}[name]
        assert len(t["bursts_ms"]) == 3 and t["burst_ms"] == statistics.median(t["bursts_ms"]) > 0
        assert t["tflops"] == pytest.approx(factor * flops / (t["burst_ms"] / 1e3) / 1e12)
        assert t["sustained_tflops"] == pytest.approx(factor * flops / (t["sustained_ms"] / 1e3) / 1e12)
        assert t["share_of_product"] == pytest.approx(t["tflops"] / product["tflops"])
        assert t["share_of_link"] == pytest.approx(t["link_gb_s"] / ceilings["peer_copy_gb_s"])
        theirs = case["layers"]["alltoall"][name]["burst_ms"]
        assert t["faster_than"] == {"alltoall": pytest.approx(theirs / t["burst_ms"])}
    parts = (4 / product["gate_up_tflops"] + 2 / product["down_tflops"]) / 6
    assert product["tflops"] == pytest.approx(1 / parts)
    assert report.good(result)


def test_the_slowest_rank_counts():
    for result in ranks.run(2, one_slow_rank):
        assert min(result["bursts_ms"]) >= 20 and result["sustained_ms"] >= 20


def one_slow_rank() -> dict:
    import time

    return measure.times(lambda: time.sleep(0.02 if dist.get_rank() == 1 else 0.001), here(), QUICK)


# --- errors that have to be found


def wrong(tensor: str, how: str) -> dict:
    """Results of a backend that is wrong in one tensor on the last rank; the reference in float64 is not."""
    backward, forward = reference.Reference.backward, reference.Reference.forward

    def spoil(t: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() + 1 < dist.get_world_size():
            return t
        if how == "unwritten":
            spoiled = torch.empty_like(t)
            spoiled[1:] = t[1:]
            return spoiled
        return t + t.norm() / math.sqrt(t.numel()) * {"off": 0.02, "noise": 1e-3}[how] * torch.randn_like(t)

    def spoiled_forward(self, call, *args):
        y, saved = forward(self, call, *args)
        return (spoil(y) if tensor == "out" and call.compute_dtype == torch.bfloat16 else y), saved

    def spoiled_backward(self, call, *args):
        named = dict(zip(TENSORS[1:], backward(self, call, *args), strict=True))
        if tensor in named and call.compute_dtype == torch.bfloat16:
            named[tensor] = spoil(named[tensor])
        return tuple(named.values())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.Reference, "forward", spoiled_forward)
        patch.setattr(reference.Reference, "backward", spoiled_backward)
        if how == "noise":
            return run_plan(plan(shapes=[], layers=["reference"], repeat_bits=3))
        return run_plan(plan(shapes=[], layers=["reference"], checks=4))


@pytest.mark.parametrize("how", ["off", "unwritten"])
@pytest.mark.parametrize("tensor", TENSORS)
def test_a_wrong_tensor_fails_the_check_and_no_other_does(tensor, how):
    result = ranks.run(2, wrong, tensor, how)[0]
    found = {name for check in result["checks"] for name in check["layers"]["reference"]["exceeded"]}
    assert found == {tensor}
    assert not report.good(result)
    assert any(title == "failed checks" for title, _, _ in report.sections(result))


@pytest.mark.parametrize("tensor", TENSORS)
def test_bits_that_change_from_run_to_run_are_counted(tensor):
    result = ranks.run(2, wrong, tensor, "noise")[0]
    assert [r["differing"] for r in result["repeats"]] == [dict.fromkeys(TENSORS, 0) | {tensor: 3}]
    assert not report.good(result)


def test_checks_take_every_kind_and_pass_on_the_reference():
    result = run(2, plan(shapes=[], layers=["reference", "reference:inputs"], checks=22))
    kinds = [check["routing"] for check in result["checks"]]
    assert len(kinds) == 22 and set(kinds) == {*routing.KINDS, "skewed:7", "skewed:0.2"}
    assert all(set(check["layers"]) == {"reference", "reference:inputs"} for check in result["checks"])
    assert report.good(result)
    assert result["cases"] == [] and result["ceilings"] is None


def test_default_checks_fit_any_number_of_ranks():
    for world, cuda in itertools.product((1, 2, 4, 8), (False, True)):
        cases = suite.check_shapes(bench.CHECKS, 0, world, cuda)
        assert len(cases) == bench.CHECKS >= 40
        for shape, kind in cases:
            assert kind.refusal(shape.T, shape.E, shape.K, world) is None
            assert 1 <= shape.K <= 8 and shape.E % world == 0 and shape.D % 64 == shape.F % 64 == 0


def test_the_limit_is_upstreams_error_or_one_rounding():
    want = {name: torch.ones(100, 100) for name in TENSORS} | {"dw3": torch.zeros(10)}
    upstream = dict.fromkeys(TENSORS, 5e-3) | {"dx": 1e-9}
    one = measure.Ranks(torch.device("cpu"), None)
    inputs = make_inputs(Shape(50, 8, 200, 4, 2), Routing("random"), None, one.device, 0)
    limits = measure.limits(upstream, want, inputs, one)
    assert limits["out"] == pytest.approx(5e-3 * 1.08)
    assert limits["dw1"] == pytest.approx(5e-3 * 1.08)
    assert limits["dx"] == pytest.approx(2**-9 * 1.08)
    assert limits["dw3"] == 0
    # Few rows: their 2 x 2 x 100 roundings are what the 10,000 elements of a weight's gradient have.
    few = make_inputs(Shape(2, 8, 100, 4, 2), Routing("random"), None, one.device, 0)
    assert measure.limits(upstream, want, few, one)["dw1"] == pytest.approx(5e-3 * 1.4)
    assert measure.limits(upstream, want, few, one)["out"] == pytest.approx(5e-3 * 1.08)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--checks 1 --device cpu", "--share-gpus: ranks on a CPU share it anyway"),
        ("--shapes 64x64x64 --checks 1", "--share-gpus: times of ranks that take turns on a GPU mean nothing"),
        ("--checks 1 --layers triton,alltoall", "--share-gpus: alltoall needs a GPU for each rank"),
    ],
)
def test_what_ranks_that_share_gpus_cannot_do(words, said, monkeypatch):
    monkeypatch.setattr(bench, "_device_kind", lambda options: options.device or "cuda")
    with pytest.raises(ConfigError, match=said):
        bench.main(["--share-gpus", "--ranks", "2", *words.split()])


# --- what is said


def result(ms: float, kind: str = "random") -> dict:
    times = {"burst_ms": ms}
    layer = {
        "forward": times,
        "forward_backward": {"burst_ms": 3 * ms},
        "errors": {"out": 1e-3, "dx": 2e-3},
    }
    layer["memory"] = {"peak_bytes": 4e9}
    case = {"shape": vars(SMALL), "routing": kind, "layers": {"triton": layer}}
    return {"cases": [case]}


def test_moved_pairs_equal_cases():
    assert report.moved(result(1.0), result(1.0, "holes")) == []
    rows = report.moved(result(1.0), result(2.0))
    assert [row[2:] for row in rows] == [
        ["forward ms", "2", "1", "0.500"],
        ["forward + backward ms", "6", "3", "0.500"],
        ["peak bytes", "4e+09", "4e+09", "1.000"],
        ["largest error", "0.002", "0.002", "1.000"],
    ]


def timed(name: str, ms: float, exceeded: tuple = ()) -> dict:
    return {name: {"forward_backward": {"sustained_ms": ms}, "exceeded": list(exceeded)}}


def finished(*cases: tuple[Shape, dict]) -> dict:
    machine = {"device": "NVIDIA H200", "ranks": 2, "deep_gemm": "deep_gemm 1.0"}
    return {"machine": machine, "cases": [{"shape": vars(shape), "layers": runs} for shape, runs in cases]}


def test_what_auto_goes_by_is_recorded_where_both_were_timed(monkeypatch, tmp_path):
    monkeypatch.setenv("TITAN_MEGA_MOE_CACHE", str(tmp_path))
    longer, wider = replace(SMALL, T=48), replace(SMALL, F=144)
    result = finished(
        (SMALL, timed("triton", 4.0) | timed("deep_gemm", 2.0) | timed("deep_gemm:inputs", 1.0)),
        (longer, timed("triton", 5.0) | timed("deep_gemm", 6.0)),  # the same kind of layer
        (wider, timed("triton", 3.0) | timed("deep_gemm", 2.0, ("dx",))),
        (replace(SMALL, E=16), timed("triton", 3.0) | timed("alltoall", 9.0)),
    )
    rows = bench._record(result)
    assert [row[:2] for row in rows] == [["EP=2 E=8 K=3 D=64 F=72", "deep_gemm"], ["EP=2 E=8 K=3 D=64 F=144", "triton"]]
    assert rows[0][2].endswith("triton 4.50 ms, deep_gemm 4.00 ms")
    assert rows[1][2].endswith("triton 3.00 ms, deep_gemm gave wrong results")
    found = fastest.recall("NVIDIA H200", "deep_gemm 1.0", fastest.Sizes(2, 8, 3, 64, 72))
    assert found is not None and found.ms == {"triton": 4.5, "deep_gemm": 4.0}
    assert len(list(tmp_path.iterdir())) == 2
    tables = report.sections(result | {"chosen": rows, "ceilings": None, "checks": [], "repeats": [], "cases": []})
    assert tables == [('backend "auto" on this machine from now on', ("layer's sizes", "backend", "why"), rows)]


def test_a_cache_that_cannot_be_written_is_said(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TITAN_MEGA_MOE_CACHE", str(tmp_path / "file"))
    assert bench._record(finished((SMALL, timed("triton", 4.0) | timed("deep_gemm", 2.0)))) == []
    assert f'backend "auto" will not know: {tmp_path / "file"}' in capsys.readouterr().err


def command(*args: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    words = [sys.executable, "-m", "titan_mega_moe", "bench", *args]
    return subprocess.run(words, capture_output=True, text=True, timeout=240, env=clean)


def test_a_gpus_kernels_are_told_apart_and_do_what_the_layer_does():
    def event(name: str, start: float, end: float, kind=torch.autograd.DeviceType.CUDA, note=False):
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, time_range=span, device_type=kind, is_user_annotation=note)

    step = [("publish", 0, 5), ("Memcpy PtoP (Device -> Device)", 5, 40), ("gate_up", 10, 60), ("down", 60, 90)]
    events = [event(name, start + at, end + at) for at in (0, 1000) for name, start, end in step]
    events += [event("aten::mm", 0, 999, torch.autograd.DeviceType.CPU), event("mega_moe::forward", 0, 99, note=True)]
    spans = breakdown._kernels([*events, event("vectorized_elementwise_kernel", 95, 97)])
    assert list(spans) == ["publish", "copies", "gate_up", "down", "other kernels"]
    assert breakdown._of_a_step(spans["gate_up"], 2) == {"ms": pytest.approx(0.05), "launches": 1}
    assert breakdown._of_a_step(spans["other kernels"], 2) == {"ms": pytest.approx(0.001), "launches": 0.5}
    assert breakdown.covered([s for of_name in spans.values() for s in of_name]) == pytest.approx(2 * 0.09 + 0.002)

    one = measure.Ranks(torch.device("cpu"), None)
    inputs = make_inputs(SMALL, Routing("holes"), None, one.device, 0)
    useful = measure.work(inputs, one)["forward_backward"]["flops"]
    known = KERNELS.keys() - {"combine_rest"}  # its work depends on what the kernel before it leaves over
    for keep, again in (("activations", 0), ("inputs", 4 / 18)):
        work = breakdown._work(inputs, one, keep)
        assert sum(work[name]["flops"] for name in known) == pytest.approx(useful * (1 + again))
        assert all(part["bytes"] > 0 for name, part in work.items() if name in known)
        assert not any(part["link_bytes"] for part in work.values())


def accounts_for_the_time(case: dict, page: str) -> None:
    """The breakdown of the reference's layer: its phases are nearly all of it, and their rates follow from the rows."""
    assert "breakdown" not in case["layers"]["alltoall"]
    found, total = case["layers"]["reference"]["breakdown"], case["layers"]["reference"]["forward_backward"]["burst_ms"]
    parts = found["parts"]
    phases = ("dispatch", "experts", "combine")
    assert list(parts) == [f"{side} {name}" for side in ("forward", "backward") for name in phases]
    assert all(part["launches"] == 1 and part["ms"] > 0 for part in parts.values())
    assert found["total_ms"] == total and 0 <= found["gap_ms"] < found["profiled_ms"] / 2
    assert found["profiled_ms"] == pytest.approx(found["busy_ms"] + found["gap_ms"])
    # One step here: the slowest of both ranks in each phase.
    assert 0 < found["busy_ms"] <= found["sum_ms"] * 1.01
    rows, experts = 24 * 2, parts["forward experts"]
    if case["routing"].startswith("skewed"):  # rank 0's experts get three times the other's
        assert experts["flops"] == 6 * (2 * rows * 3 / 4) * 64 * 64
    assert parts["backward experts"]["flops"] == 2 * experts["flops"] >= 12 * rows * 64 * 64
    assert experts["tflops"] == pytest.approx(experts["flops"] / experts["ms"] / 1e9)
    assert re.search(rf"^\| forward experts \| 1 \| {experts['ms']:.3f} ", page, re.MULTILINE)
    assert re.search(rf"^\| step, in the profiler \| - \| {found['profiled_ms']:.3f} \| 100.0 ", page, re.MULTILINE)
    assert re.search(rf"^\| step, without it \| - \| {total:.3f} ", page, re.MULTILINE)


def test_the_command_prints_tables_and_one_json_line_and_saves(tmp_path):
    quick = ["--bursts", "1", "--sustained", "2", "--warmups", "1", "--timed", "1"]
    first, second = tmp_path / "new" / "a.json", tmp_path / "b.json"
    args = ["--shapes", "24x64x64", "--experts", "8", "--top-k", "2", "--device", "cpu", *quick]
    args += ["--breakdown", "--checks", "2", "--repeat-bits", "2", "--routing", "random,skewed:3"]
    done = command(*args, "--save", str(first))
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    assert last == f"saved: {first} {first.with_suffix('.md')}" and '{"' not in done.stdout
    (written,) = first.read_text().splitlines()
    result = json.loads(written)
    assert "% torch.mm" in done.stdout and "torch.mm at 24x64x64" in done.stdout and "cuBLAS" not in done.stdout
    assert result["machine"]["ranks"] == 2 and result["machine"]["torch"] == torch.__version__
    assert [case["routing"] for case in result["cases"]] == ["random", "skewed:3"]
    page = first.with_suffix(".md").read_text()
    assert page.startswith("# bench, ") and "## Caveats" in page and "24x64x64 E=8 K=2, skewed:3" in page
    for case in result["cases"]:
        for name, layer in case["layers"].items():
            cell = f"{layer['forward']['burst_ms']:.2f}"
            assert re.search(rf"^\| {name} \| {cell} ", page, re.MULTILINE), (name, cell)
            assert re.search(rf"{name} .*{cell}", done.stdout)
        accounts_for_the_time(case, page)

    again = command(*args[:-1], "random", "--baseline", str(first), "--save", str(second))
    assert again.returncode == 0, again.stderr
    was, now = (json.loads(f.read_text())["cases"][0]["layers"]["alltoall"] for f in (first, second))
    moved = {tuple(row[1:3]): row for row in json.loads(second.read_text())["moved"]}
    before, after = (side["forward"]["burst_ms"] for side in (was, now))
    assert moved["alltoall", "forward ms"][3:] == [f"{before:.4g}", f"{after:.4g}", f"{after / before:.3f}"]
    assert f"against the baseline of {result['date']}: 2 ranks, CPU" in again.stdout


def test_a_file_that_cannot_be_read_ends_the_command(tmp_path):
    (tmp_path / "ids.pt").write_bytes(b"")
    done = command("--device", "cpu", "--routing", f"file:{tmp_path}/ids.pt")
    assert done.returncode == 2
    assert done.stderr.strip() == f"--routing file:{tmp_path}/ids.pt: torch.load cannot read it (EOFError)"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("--shapes 3x", "--shapes 3x: write tokens x D x F"),
        ("--shapes 8x12x8", "D and F must be multiples of 8"),
        ("--routing bogus", "--routing bogus: not a kind of routing; known: balanced"),
        ("--routing random:3", "--routing random:3: not a kind"),
        ("--routing skewed:x", "skewed takes a ratio above 0"),
        ("--routing skewed:7 --experts 8", "7.0 of 8 distinct experts"),
        ("--routing file:/nowhere.pt", "/nowhere.pt: cannot be read: No such file or directory"),
        (f"--routing file:/{'long' * 99}.pt", ".pt: cannot be read: File name too long"),
        ("--routing skewed:7 --repeat-bits 2 --ranks 1", "--routing skewed:7: rank skew needs at least 2 ranks"),
        ("--routing ", "--routing : not a kind"),
        ("--experts 7", "--experts 7 does not divide over 2 ranks"),
        ("--top-k 200", "--top-k 200 is more than the 128 of --experts"),
        ("--checks 2 --breakdown", "--breakdown: nothing is timed without --shapes or FILE: leave it out"),
        ("--checks 2 --bursts 3", "--bursts: nothing is timed"),
        ("--repeat-bits 2 --baseline x.json", "--baseline: nothing is timed"),
        ("--repeat-bits 2 --experts 8", "--experts: what is checked has sizes of its own"),
        ("--checks 2 --routing random", "--routing: --checks takes every kind"),
        ("--checks 2 --layers alltoall", "--checks: it is of the op's own layers, and --layers names none of triton"),
        ("--breakdown --layers alltoall,deepep", "--breakdown: it is of the op's own layers"),
        ("--layers zap", "--layers zap: not a layer; known: triton"),
        ("--layers reference:all", "--layers reference:all: not a layer"),
        ("--layers reference:", "--layers reference:: not a layer"),
        ("--layers ", "--layers : not a layer"),
        ("--shapes ", "--shapes : write tokens x D x F"),
        ("--shapes 0x0x0", "--shapes 0x0x0: write tokens x D x F"),
        (f"--shapes {'9' * 5000}x8x8", "write tokens x D x F"),
        *((f"--{name} 0", f"{name}: 0 is not from 1 to") for name in ("checks", "ranks", "bursts", "repeat-bits")),
        ("--checks -1", "-1 is not from 1 to"),
        (f"--seed {2**70}", "is not from 0 to 2147483647"),
        ("--seed x", "invalid whole number value: 'x'"),
        ("--bogus", "'--bogus' is not an option"),
        ("--save x.md", "--save x.md: give a name that ends in .json"),
        ("--save /dev/null/x.json", "--save /dev/null/x.json: cannot be written: Not a directory"),
        (f"--save {'long' * 99}.json", ".json: cannot be written: File name too long"),
        ("--baseline /nowhere", "--baseline /nowhere: cannot be read"),
        (f"--baseline {DEBUG}", "is not JSON that --save wrote"),
        ("/nowhere.toml", "/nowhere.toml: no such file"),
        *(
            (f"{DEBUG} --{name} 8", f"--{name}: {DEBUG} gives the layer's sizes")
            for name in ("shapes", "experts", "top-k")
        ),
        (f"{DEBUG} --ranks 3", f"--ranks 3 does not divide {DEBUG}'s 64 experts"),
        (f"{DEBUG} --device.kind cpu", "--device.kind: it changes nothing here"),
        (f"{DEBUG} --mega_moe.keep inputs", "--mega_moe.keep: it changes nothing here"),
        (f"{DEBUG} --bogus 8", "'--bogus' is not an option"),
        (f"{DEBUG} --training.stepz 8", "unknown key"),
    ],
)
def test_bad_input_is_one_sentence_and_starts_nothing(monkeypatch, capsys, args, expected):
    def refuse(*args, **kwargs):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(bench, "launch", refuse)
    monkeypatch.setattr(launch, "launch", refuse)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["bench", "--device", "cpu", *args.split(" ")]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda saved: saved.update(format=0), "is not what this version's --save writes"),
        (lambda saved: saved.pop("cases"), "is not what this version's --save writes"),
        (lambda saved: saved.pop("machine"), "is not what this version's --save writes"),
        (lambda saved: saved["cases"][0]["layers"]["triton"].pop("memory"), "is not what this version's --save writes"),
        (lambda saved: saved["cases"][0]["layers"]["triton"]["errors"].clear(), "is not what this version's"),
        (lambda saved: saved.update(cases=["x"]), "is not what this version's --save writes"),
        (lambda saved: saved.update(cases=[]), "nothing of this run is in it: it has nothing that was timed"),
        (lambda saved: saved["cases"][0].update(routing="holes"), "it has triton at 24x64x72 E=8 K=3 holes"),
    ],
)
def test_a_baseline_is_checked_before_anything_runs(tmp_path, change, said):
    path = tmp_path / "saved.json"
    saved = result(1.0) | {"format": report.FORMAT, "date": "today", "machine": {"ranks": 2, "device": "CPU"}}
    path.write_text(json.dumps(saved))
    assert bench._read_baseline(path, plan(layers=["triton"])) == json.loads(json.dumps(saved))
    change(saved)
    path.write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=f"^--baseline {path}: .*{said}"):
        bench._read_baseline(path, plan(layers=["triton"]))
    for text in ("[]", "3", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"saved.json: is not"):
            bench._read_baseline(path, plan())


def test_where_results_could_not_be_saved_nothing_is_left(tmp_path):
    bench._check_save(tmp_path / "new" / "a.json")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "b.md").mkdir()  # where the tables would go
    with pytest.raises(ConfigError, match=r"b.json: cannot be written: Is a directory"):
        bench._check_save(tmp_path / "b.json")
    assert not (tmp_path / "b.json").exists()
    (tmp_path / "c.json").write_text("kept")
    bench._check_save(tmp_path / "c.json")
    assert (tmp_path / "c.json").read_text() == "kept"


def test_an_interrupted_command_says_so_without_a_stack(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "main", interrupted)
    assert cli.main(["bench"]) == 130
    assert capsys.readouterr().err == "stopped by SIGINT\n"


def test_ranks_that_torchrun_started_are_not_asked_for_again(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"--ranks 4: torchrun has started 2"):
        bench.main(["--ranks", "4"])


def test_nothing_ran_is_not_all_is_well():
    found = ranks.run(1, run_plan, plan(shapes=[], layers=["triton"], checks=1, repeat_bits=1))[0]
    assert not report.good(found)
    titles = [title for title, _, rows in report.sections(found) if rows]
    assert titles == ["not checked", "not repeated"]


def test_a_toml_gives_its_models_shape():
    from titan_mega_moe import config

    resolved = config.load(DEBUG, [])
    tokens = resolved.training.local_batch_size * resolved.training.seq_len
    shape = bench._shape_of(str(DEBUG), [])
    upstream = bench._shape_of(str(DEBUG), ["--mega_moe.backend", "upstream"])
    assert shape == upstream and tokens == shape.T
    (_, node, _, _), *_ = resolved.model_spec.model.traverse(type(resolved.model_spec.model.layers[-1].moe))
    experts = node.routed_experts.inner_experts
    assert (experts.dim, experts.hidden_dim, node.num_experts) == (shape.D, shape.F, shape.E)
    assert node.router.top_k == shape.K


@pytest.mark.timeout(300)
def test_routing_recorded_in_training_is_replayed(tmp_path):
    root = Path(__file__).parents[1]
    small = ["--model.layers", "1", "--training.local_batch_size", "1", "--training.seq_len", "32"]
    recording = ["--training.steps", "1", "--metrics.routing_step", "1", "--dump_folder", str(tmp_path)]
    command = [sys.executable, "-m", "titan_mega_moe"]
    train = [*command, "train", str(root / "train_configs" / "debug_cpu.toml"), *small, *recording]
    done = subprocess.run(train, capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    ids = torch.load(tmp_path / "routing_step_1.pt")
    assert ids.shape == (2, 32, 8) and ids.dtype == torch.int64 and not torch.equal(ids[0], ids[1])
    lines = (tmp_path / "records" / "rank_0.jsonl").read_text().splitlines()
    counts = torch.bincount(ids.flatten(), minlength=64)
    logged = json.loads(lines[0])
    load = logged["moe/layer_0/expert_load(max/mean)"]
    assert load == pytest.approx(float(counts.max() / counts.float().mean()))
    # Each rank's experts get the tokens of both.
    assert logged["moe/rank_tokens(max)"] == int(counts.view(2, 32).sum(1).max())
    assert logged["moe/rank_tokens(mean)"] == 2 * 32 * 8 / 2
    again = ["--experts", "64", "--shapes", "32x64x64", "--routing", f"file:{tmp_path / 'routing_step_1.pt'}"]
    quick = ["--layers", "reference", "--bursts", "1", "--timed", "1", "--warmups", "1", "--sustained", "1"]
    done = subprocess.run([*command, "bench", *again, *quick], capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]


MESHES = {  # degrees of two ranks -> whether both count the same tokens
    "ep": ({"dp_shard": 2, "ep": 2}, False),
    "tp and ep": ({"tp": 2, "ep": 2}, False),
    "dp": ({"dp_shard": 2}, False),
    "tp": ({"tp": 2}, True),
}


def loads(recomputed: bool) -> dict[str, dict[str, float]]:
    """What RecordedMetrics says on each mesh of two ranks of one layer, whose counts are made up."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
    from torchtitan.distributed import ParallelDims

    from titan_mega_moe.metrics import RecordedMetrics

    found = {}
    for name, (degrees, same) in MESHES.items():
        ones = dict.fromkeys(("dp_replicate", "cp", "tp", "pp", "ep"), 1)
        dims = ParallelDims(**(ones | {"dp_shard": 1} | degrees), world_size=2)
        dims.build_mesh()
        counts = torch.tensor([8.0, 0.0, 2.0, 2.0]) * (1 if same else 1 + dist.get_rank())
        block = torch.nn.Module()
        block.moe_enabled, block.moe = True, SimpleNamespace(tokens_per_expert_E=counts, load_balance_coeff=1e-3)
        if recomputed:
            block.checkpoint_impl, block.moe.tokens_per_expert_E = CheckpointImpl.NO_REENTRANT, 2 * counts
        metrics = object.__new__(RecordedMetrics)
        part = torch.nn.Module()
        part.layers = torch.nn.ModuleDict({"0": block})
        vars(metrics).update(model_parts=[part], parallel_dims=dims, _seen_LE=None, _counts_LE=None)
        metrics._count()
        found[name] = metrics._load()
    return found


@pytest.mark.parametrize("recomputed", [False, True], ids=["once", "recomputed"])
def test_a_ranks_tokens_are_those_that_its_experts_get_on_any_mesh(recomputed):
    first, second = ranks.run(2, loads, recomputed)
    assert first == second
    # (8 + 0) of 12 go to the first half of the experts; both ranks together count three times 12.
    expected = {"ep": (24, 18), "tp and ep": (24, 18), "dp": (18, 18), "tp": (12, 12)}
    assert {name: (m["moe/rank_tokens(max)"], m["moe/rank_tokens(mean)"]) for name, m in first.items()} == expected
    assert [m["moe/expert_load(max/mean)"] for m in first.values()] == pytest.approx([8 / 3] * len(MESHES))
