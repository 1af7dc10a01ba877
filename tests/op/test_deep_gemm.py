"""The deep_gemm backend's calls: recorded by a stand-in that computes, results checked by the reference."""

import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests import ranks
from tests.op import deep_gemm_double as double
from titan_mega_moe.op import backends, deep_gemm, mega_moe

E, D, F, K = 8, 256, 128, 3
# Against a float32 reference on inputs that bfloat16 holds exactly, relative to the norm: y, dx and
# gradients of bfloat16 weights are rounded once (measured 1.7e-3), all else is float32 (measured 2e-7).
ROUNDED, EXACT = 2.5e-3, 1e-6


@contextmanager
def installed(**build):
    """`build` is the installed deep_gemm and this CPU a GPU that it runs on; yields the backend object."""
    backend = deep_gemm.DeepGemm()
    double.CALLS.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deep_gemm", double.variant(**build))
        patch.setattr(deep_gemm, "device_reason", lambda device: None)
        patch.setattr(deep_gemm, "sm_count", lambda device: 132)
        patch.setattr(deep_gemm, "BACKEND", backend)
        yield backend


def group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.get_world_size() > 1 else None


def plan(max_tokens: int, **changes) -> backends.BufferPlan:
    values = {
        "group_name": group().group_name if group() else "",
        "device": torch.device("cpu"),
        "max_tokens": max_tokens,
        "dim": D,
        "hidden_dim": F,
        "num_experts": E,
        "top_k": K,
        "keep": "activations",
    }
    return backends.BufferPlan(**(values | changes))


def layer_inputs(T: int, dtype: torch.dtype = torch.float32, hidden: int = F) -> dict[str, torch.Tensor]:
    """Leaves that bfloat16 holds exactly; slots without an expert: one of token 1, all of token 2."""
    e = E // dist.get_world_size()

    def leaf(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape) * scale).bfloat16().to(dtype).requires_grad_()

    ids = torch.rand(T, E).topk(K).indices
    ids[1:2, 0] = -1
    ids[2:3] = -1
    return {
        "x_TD": leaf(T, D),
        "topk_expert_ids_TK": ids,
        "topk_scores_TK": torch.rand(T, K).requires_grad_(),
        "w1_eFD": leaf(e, hidden, D, scale=D**-0.5),
        "w2_eDF": leaf(e, D, hidden, scale=hidden**-0.5),
        "w3_eFD": leaf(e, hidden, D, scale=D**-0.5),
    }


def run(inputs: dict[str, torch.Tensor], backend: str, **options) -> torch.Tensor:
    return mega_moe(**inputs, num_experts=E, group=group(), backend=backend, **options)


def reference(inputs: dict[str, torch.Tensor], dy: torch.Tensor) -> dict[str, torch.Tensor]:
    y = run(inputs, "reference", compute_dtype=torch.float32)
    return {"y": y.detach()} | gradients(y, inputs, dy)


def gradients(y: torch.Tensor, inputs: dict[str, torch.Tensor], dy: torch.Tensor) -> dict[str, torch.Tensor]:
    leaves = {name: t for name, t in inputs.items() if t.requires_grad}
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, w in want.items():
        g = got[name]
        assert g.dtype == w.dtype and g.is_contiguous(), name
        rounded = name in ("y", "x_TD") or w.dtype == torch.bfloat16
        error = (g.float() - w.float()).norm() / max(w.float().norm(), torch.tensor(1e-30))
        assert error < (ROUNDED if rounded else EXACT), f"{name}: {error}"


def dy_for(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    x = inputs["x_TD"]
    return torch.randn(x.shape).bfloat16().to(x.dtype)


def names() -> list[str]:
    return [call.name for call in double.CALLS]


def check_one_layer(natural: bool, dtype: torch.dtype, keep: str, tokens: list[int]) -> None:
    inputs = layer_inputs(tokens[dist.get_rank()], dtype)
    dy = dy_for(inputs)
    with installed(natural=natural) as backend:
        backend.prepare(plan(max(tokens)))
        y = run(inputs, "deep_gemm", keep=keep)
        got = {"y": y.detach()} | gradients(y, inputs, dy)
    assert_close(got, reference(inputs, dy))
    assert not got["topk_scores_TK"][inputs["topk_expert_ids_TK"] < 0].any()

    assert names() == [
        "set_num_sms",
        "get_symm_buffer_for_mega_moe",
        "bf16_mega_moe",
        "bf16_mega_moe_backward",
    ]
    sms, allocation, forward, backward = double.CALLS
    assert sms.options == {"num_sms": 132 - 16}
    assert allocation.options == {"max_tokens": max(tokens), "shared_experts": 0}
    gate_up = torch.cat((inputs["w1_eFD"], inputs["w3_eFD"]), dim=1).detach().bfloat16()
    for launch in (forward, backward):
        assert launch.buffer is allocation.buffer
        assert launch.options["l1_natural_layout"] is natural
        seen = launch.tensors
        assert torch.equal(seen["x"], inputs["x_TD"].bfloat16())
        assert torch.equal(seen["topk_idx"], inputs["topk_expert_ids_TK"])
        assert torch.equal(seen["topk_weights"], inputs["topk_scores_TK"])
        assert torch.equal(seen["l1"], gate_up if natural else double.transform_weights_for_mega_moe(gate_up, None)[0])
        assert torch.equal(seen["l2"], inputs["w2_eDF"].bfloat16())
    assert backward.options["dw_natural_layout"] is True
    assert torch.equal(backward.tensors["dy"], dy.bfloat16())
    assert backward.tensors["dw1"].dtype == backward.tensors["dw2"].dtype == dtype


ONE_LAYER = [
    (True, torch.float32, "activations", [13, 7]),
    (True, torch.float32, "inputs", [7, 13]),
    (False, torch.float32, "activations", [13, 7]),
    (True, torch.bfloat16, "activations", [13, 7]),
    (False, torch.bfloat16, "inputs", [13, 16]),
    (True, torch.float32, "activations", [13, 0]),
]


def check_one_layer_cases() -> None:
    for case in ONE_LAYER:
        try:
            check_one_layer(*case)
        except AssertionError as error:
            raise AssertionError(f"natural, weights, keep, tokens = {case}: {error}") from error


@pytest.mark.parametrize("ep", [1, 2])
def test_a_layer_computes_what_the_reference_computes(ep):
    ranks.run(ep, check_one_layer_cases)


@installed()
def check_shared_buffers() -> None:
    backend = backends.load("deep_gemm")
    for hidden in (F, F, 2 * F):  # as three layers would, two of one shape
        backend.prepare(plan(16, hidden_dim=hidden))
    layers = [layer_inputs(T, hidden=hidden) for T, hidden in ((13, F), (7, F), (9, 2 * F))]
    dys = [dy_for(layer) for layer in layers]
    ys = [run(layer, "deep_gemm", keep="inputs") for layer in layers]
    got = [
        {"y": y.detach()} | gradients(y, layer, dy)
        for y, layer, dy in reversed(list(zip(ys, layers, dys, strict=True)))
    ]
    assert names().count("get_symm_buffer_for_mega_moe") == 2
    launches = [call for call in double.CALLS if call.name.startswith("bf16")]
    order = [0, 1, 2, 2, 1, 0]
    for launch, index in zip(launches, order, strict=True):
        assert torch.equal(launch.tensors["x"], layers[index]["x_TD"].bfloat16())
    first, second, third = (launch.buffer for launch in launches[:3])
    assert first is second and third is not first
    for gradient, layer, dy in zip(reversed(got), layers, dys, strict=True):
        assert_close(gradient, reference(layer, dy))


def test_layers_of_one_shape_share_a_buffer_and_copy_their_inputs_before_each_launch():
    ranks.run(2, check_shared_buffers)


@installed()
def check_capacity() -> None:
    backend = backends.load("deep_gemm")
    inputs = layer_inputs([9, 14][dist.get_rank()])
    run(inputs, "deep_gemm")  # nobody planned: the largest T of the group
    assert [c.options["max_tokens"] for c in double.CALLS if c.name.startswith("get")] == [14]
    backend.prepare(plan(14))
    backend.prepare(plan(3))
    assert names().count("get_symm_buffer_for_mega_moe") == 1
    old = double.CALLS[1].buffer
    backend.prepare(plan(40))
    assert names()[-3:] == ["destroy", "set_num_sms", "get_symm_buffer_for_mega_moe"]
    assert double.CALLS[-3].buffer is old
    run(layer_inputs(40), "deep_gemm")
    with pytest.raises(ValueError, match="T=41 tokens do not fit the deep_gemm buffer, built for 40"):
        run(layer_inputs(41), "deep_gemm")
    backend.release(plan(40))
    backend.release(plan(40))
    backend.prepare(plan(3))
    assert names()[-3:] == ["destroy", "set_num_sms", "get_symm_buffer_for_mega_moe"]
    assert double.CALLS[-1].options["max_tokens"] == 3


def test_the_buffer_holds_what_was_planned_or_the_largest_T_of_the_group():
    ranks.run(2, check_capacity)


@installed()
def check_alone() -> None:
    inputs = layer_inputs(5 + 4 * dist.get_rank())
    for name in ("w1_eFD", "w2_eDF", "w3_eFD"):  # all experts on each rank
        inputs[name] = inputs[name].detach().repeat(2, 1, 1).requires_grad_()
    dy = dy_for(inputs)
    results = []
    for backend, dtype in (("deep_gemm", torch.bfloat16), ("reference", torch.float32)):
        y = mega_moe(**inputs, num_experts=E, group=None, backend=backend, compute_dtype=dtype)
        results.append({"y": y.detach()} | gradients(y, inputs, dy))
    assert_close(*results)
    (group_of_one,) = {call.buffer.group.size() for call in double.CALLS if call.buffer}
    assert group_of_one == 1


def test_without_expert_parallelism_each_rank_has_a_buffer_alone():
    ranks.run(2, check_alone)


@installed()
def check_refusals() -> None:
    backend = backends.load("deep_gemm")
    backend.prepare(plan(16))
    double.CALLS.clear()
    inputs = layer_inputs(5)
    with pytest.raises(ValueError, match=r"deep_gemm computes in bfloat16, not torch.float32"):
        run(inputs, "deep_gemm", compute_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"trains bfloat16 or float32 weights, these are torch.float64"):
        run({k: v.double() if k[0] == "w" else v for k, v in inputs.items()}, "deep_gemm")
    for wrong in (E, -2):
        ids = inputs["topk_expert_ids_TK"].clone()
        ids[0, 0] = wrong
        with pytest.raises(RuntimeError, match=rf"expert id is outside \[-1, {E}\)"):
            run(inputs | {"topk_expert_ids_TK": ids}, "deep_gemm")
    for sizes in ({"dim": 128}, {"hidden_dim": 64}):
        with pytest.raises(ValueError, match=r"must be a multiple of 256 and F=\d+ of 128"):
            backend.prepare(plan(16, **sizes))
    for reserved in (-2, 131, 132, 15):
        with pytest.raises(ValueError, match=f"reserved_sms={reserved} of the GPU's 132 SMs"):
            backend.prepare(plan(16, hidden_dim=2 * F, reserved_sms=reserved))
    assert not double.CALLS, "nothing may start before it is refused"
    sys.modules["deep_gemm"] = None
    with pytest.raises(RuntimeError, match="cannot run on cpu: deep_gemm is not installed"):
        run(inputs, "deep_gemm")


def test_what_cannot_run_is_refused_before_any_launch():
    ranks.run(1, check_refusals)


@installed()
def check_registered_op() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for keep in backends.KEEP:
            inputs = layer_inputs(8, dtype)
            static = (E, "", "deep_gemm", torch.bfloat16, keep)
            forward = torch.ops.titan_mega_moe.mega_moe.default
            backward = torch.ops.titan_mega_moe.mega_moe_backward.default
            tests = ("test_schema", "test_faketensor")
            args = [t.detach() for t in inputs.values()]
            torch.library.opcheck(forward, (*args, *static), test_utils=tests)
            y, saved = forward(*args, *static)
            torch.library.opcheck(backward, (torch.ones_like(y), *args, saved, *static), test_utils=tests)

            dy = dy_for(inputs)
            eager = run(inputs, "deep_gemm", keep=keep)
            compiled = torch.compile(run, backend="aot_eager", fullgraph=True)(inputs, "deep_gemm", keep=keep)
            assert torch.equal(eager, compiled)
            for e, c in zip(
                gradients(eager, inputs, dy).values(), gradients(compiled, inputs, dy).values(), strict=True
            ):
                assert torch.equal(e, c)


def test_the_registered_op_traces_and_compiles_without_a_graph_break():
    ranks.run(1, check_registered_op)


@installed()
def check_recomputation() -> None:
    for keep in backends.KEEP:
        inputs = layer_inputs(5)
        dy = dy_for(inputs)
        want = gradients(run(inputs, "deep_gemm", keep=keep), inputs, dy)
        double.CALLS.clear()
        y = checkpoint(run, inputs, "deep_gemm", keep=keep, use_reentrant=False)
        got = gradients(y, inputs, dy)
        assert names() == ["bf16_mega_moe", "bf16_mega_moe", "bf16_mega_moe_backward"]
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_full_activation_checkpointing_runs_the_forward_twice_and_the_backward_once():
    ranks.run(1, check_recomputation)


@installed()
def check_as_torch_sees_it() -> None:
    inputs = layer_inputs(7 + dist.get_rank())
    name = group().group_name if group() else ""
    for keep in backends.KEEP:
        static = (E, name, "deep_gemm", torch.bfloat16, keep)
        torch.library.opcheck(torch.ops.titan_mega_moe.mega_moe.default, (*inputs.values(), *static))
    runs = []
    for _ in range(3):
        y = run(inputs, "deep_gemm")
        runs.append([y.detach(), *gradients(y, inputs, torch.ones_like(y)).values()])
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
    frozen = {k: v.detach() if k.startswith("w") else v for k, v in inputs.items()}
    run(frozen, "deep_gemm").sum().backward()
    assert all((v.grad is not None) == v.requires_grad for v in frozen.values())


@pytest.mark.parametrize("ep", [1, 2])
def test_autograd_fake_tensors_repetition_and_frozen_weights(ep):
    ranks.run(ep, check_as_torch_sees_it, timeout=150)


class Silent:
    """A build that computes nothing, for tensors that have no values."""

    @staticmethod
    def bf16_mega_moe(y, l1, l2, buffer, activation_clamp, l1_natural_layout): ...

    @staticmethod
    def bf16_mega_moe_backward(
        dx, dw1, dw2, dscores, dy, l1, l2, buffer, activation_clamp, dw_natural_layout, l1_natural_layout
    ): ...


@pytest.mark.parametrize("keep", backends.KEEP)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_host_reads_no_tensor_between_launches(monkeypatch, keep, dtype):
    """What a CUDA graph needs of the adapter: fake tensors raise where a value or a data-dependent size is read."""
    monkeypatch.setattr(deep_gemm, "find_build", lambda: deep_gemm.Build(Silent, "silent 1.0", True, False))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD="world"))
    backend, call = deep_gemm.DeepGemm(), backends.Call(E, "", torch.bfloat16, keep)
    with FakeTensorMode():
        new = torch.empty
        buffer = SimpleNamespace(
            x=new(16, D, dtype=torch.bfloat16), topk_idx=new(16, K, dtype=torch.int64), topk_weights=new(16, K)
        )
        backend._buffers["world", E, D, F, K] = buffer
        x, ids, scores = new(9, D, dtype=dtype), new(9, K, dtype=torch.int64), new(9, K)
        w1, w2, w3 = (new(E, *size, dtype=dtype) for size in ((F, D), (D, F), (F, D)))
        operands = backends.Operands(x, ids, scores, w1, w2, w3)
        y, saved = backend.forward(call, operands)
        gradients = backend.backward(call, y, operands, saved)
        assert [g.shape for g in gradients] == [t.shape for t in (x, scores, w1, w2, w3)]
        with pytest.raises(DataDependentOutputException):  # that this test can fail
            int(ids.max())


def check_determinism_is_passed_on_and_phases_are_named() -> None:
    for wanted in (True, False):
        inputs = layer_inputs(5)
        with installed(deterministic=True):
            torch.use_deterministic_algorithms(wanted)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                gradients(run(inputs, "deep_gemm"), inputs, dy_for(inputs))
        starts = sorted((e.time_range.start, e.name) for e in profile.events() if e.name.startswith("mega_moe::"))
        phases = ["load", "pack", "kernel"]
        assert [name for _, name in starts] == [f"mega_moe::{n}" for n in ("forward", *phases, "backward", *phases)]
        launches = [call for call in double.CALLS if call.name.startswith("bf16")]
        assert [launch.options["deterministic"] for launch in launches] == [wanted, wanted]


def test_the_deterministic_setting_reaches_a_build_that_takes_it_and_profiles_name_the_phases():
    ranks.run(1, check_determinism_is_passed_on_and_phases_are_named)


def test_without_a_process_group_the_error_says_how_to_get_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", double.variant())
    monkeypatch.setattr(deep_gemm, "sm_count", lambda device: 132)
    with pytest.raises(RuntimeError, match=r"needs torch\.distributed even for one rank"):
        deep_gemm.DeepGemm().prepare(backends.BufferPlan("", torch.device("cpu"), 8, D, F, E, K, "activations"))


def test_the_stand_in_is_not_shipped():
    package = Path(deep_gemm.__file__).parents[1]
    assert not list(package.rglob("*double*"))
