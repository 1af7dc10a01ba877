"""The op as torch's subsystems see it, and what its entry refuses."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter

from tests import ranks
from tests.op import oracle
from titan_mega_moe import mega_moe
from titan_mega_moe.op import backends, library

T, D, F, E, K = 10, 16, 24, 4, 2


def arguments(rank: int = 0, ep: int = 1, requires_grad: bool = True) -> list[torch.Tensor]:
    """x, ids, scores, w1, w2, w3 of one rank, in float32."""
    inputs = oracle.make(0, [T + r for r in range(ep)], D, F, E, K, "random", torch.float32)
    mine = slice(rank * E // ep, (rank + 1) * E // ep)
    weights = [w[mine] for w in (inputs.w1_EFD, inputs.w2_EDF, inputs.w3_EFD)]
    tensors = [inputs.x[rank], inputs.scores[rank], *weights]
    x, scores, *weights = [t.clone().requires_grad_(requires_grad) for t in tensors]
    return [x, inputs.ids[rank], scores, *weights]


def opcheck(dtype: torch.dtype) -> None:
    ep, rank = dist.get_world_size(), dist.get_rank()
    group = "" if ep == 1 else dist.group.WORLD.group_name
    static = (E, group, "reference", dtype, "activations")
    tensors = arguments(rank, ep)
    torch.library.opcheck(library.mega_moe, (*tensors, *static))
    detached = [t.detach() for t in tensors]
    torch.library.opcheck(library.mega_moe_backward, (torch.ones(T + rank, D), *detached, [], *static))


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(ep, dtype):
    """Schema, fake tensors against real ones, autograd registration, AOT dispatch with dynamic shapes."""
    ranks.run(ep, opcheck, dtype)


def compiled() -> None:
    group = dist.group.WORLD
    results = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        tensors = arguments(dist.get_rank(), 2)

        @wrap
        def body(x, ids, scores, w1, w2, w3):
            y = mega_moe(x * 2, ids, scores, w1, w2, w3, num_experts=E, group=group)
            return (y * y).sum()

        for _ in range(2):
            loss = body(*tensors)
            loss.backward()
        results.append([loss, *(t.grad for t in tensors if t.requires_grad)])
    for eager, other in zip(*results, strict=True):
        assert torch.equal(eager, other)


def test_compiles_without_a_graph_break():
    ranks.run(2, compiled)


def test_gradcheck():
    x, ids, scores, *weights = [t.double() if t.is_floating_point() else t for t in arguments()]
    ids[0, 0] = -1
    leaves = [t.detach().requires_grad_() for t in (x, scores, *weights)]

    def body(x, scores, *weights):
        return mega_moe(x, ids, scores, *weights, num_experts=E, group=None, compute_dtype=torch.float64)

    assert torch.autograd.gradcheck(body, leaves)


def test_frozen_weights_get_no_gradient():
    x, ids, scores, *weights = arguments()
    frozen = [w.detach() for w in weights]
    mega_moe(x, ids, scores, *frozen, num_experts=E, group=None).sum().backward()
    assert x.grad is not None and scores.grad is not None and all(w.grad is None for w in frozen)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(T, 2, D)}, f"x must be (T, D) floating point, got (10, 2, {D})"),
        ({"x": torch.zeros(T, D, dtype=torch.int32)}, "got (10, 16) torch.int32"),
        ({"ids": torch.zeros(T - 1, K, dtype=torch.int64)}, "must be (T=10, K) int64, got (9, 2)"),
        ({"ids": torch.zeros(T, K, dtype=torch.int32)}, "must be (T=10, K) int64, got (10, 2) torch.int32"),
        ({"scores": torch.zeros(T, K + 1)}, "must be (10, 2) float32 like the expert ids, got (10, 3)"),
        ({"scores": torch.zeros(T, K, dtype=torch.bfloat16)}, "got (10, 2) torch.bfloat16"),
        ({"w1": torch.zeros(E, F, D + 1)}, "w1 must be (e, F, D=16), got (4, 24, 17)"),
        ({"w2": torch.zeros(E, F, D)}, "w2 must be (e=4, D=16, F=24) to fit w1, got (4, 24, 16)"),
        ({"w3": torch.zeros(E, F - 1, D)}, "w3 must be (e=4, F=24, D=16) to fit w1, got (4, 23, 16)"),
        ({"w3": torch.zeros(E, F, D, dtype=torch.bfloat16)}, "must share one floating point dtype"),
        ({"w1": torch.zeros(E, F, D, device="meta")}, "x is on cpu, but ids, scores, w1, w2, w3 are on"),
        ({"num_experts": 8}, "w1 holds 4 experts, but 8 experts over 1 ranks are 8 each"),
        *(
            ({"num_experts": value}, f"num_experts is {value!r}; it must be a positive integer")
            for value in (0, -4, True, 4.0, "4", None, torch.tensor(4))
        ),
        ({"x": None}, "x must be a dense tensor, got 'NoneType'"),
        ({"scores": [[1.0]]}, "topk_scores must be a dense tensor, got 'list'"),
        ({"x": torch.zeros(T, D).to_sparse()}, "x must be a dense tensor, got one of torch.sparse_coo"),
        ({"x": torch.zeros(T, D, dtype=torch.float8_e4m3fn)}, "got (10, 16) torch.float8_e4m3fn"),
        ({"x": torch.nested.nested_tensor([torch.zeros(T, D)])}, "x must be a dense tensor, got a nested one"),
        ({"group": 3}, "group is 3; it must be a process group, its name or None"),
        ({"group": "gone"}, "no process group is named 'gone'; pass one that torch.distributed has made and not"),
        (
            {"ids": torch.zeros(T, 5, dtype=torch.int64), "scores": torch.zeros(T, 5)},
            "K=5 experts per token must be between 1 and num_experts=4",
        ),
        (
            {"ids": torch.zeros(T, 0, dtype=torch.int64), "scores": torch.zeros(T, 0)},
            "K=0 experts per token must be between 1 and num_experts=4",
        ),
        ({"keep": "all"}, "keep is 'all'; it must be one of activations, inputs"),
        ({"backend": ["cuda"]}, "backend is ['cuda']; it must be one of auto, triton, deep_gemm, reference"),
        ({"backend": "cuda"}, "backend is 'cuda'; it must be one of auto, triton, deep_gemm, reference"),
        *(
            ({"compute_dtype": value}, f"compute_dtype is {value!r}; it must be one of torch.bfloat16, ")
            for value in (torch.int8, torch.complex64, torch.float8_e4m3fn, "bfloat16")
        ),
    ],
)
def test_refuses(change, message):
    x, ids, scores, w1, w2, w3 = arguments(requires_grad=False)
    call = dict(x=x, ids=ids, scores=scores, w1=w1, w2=w2, w3=w3, num_experts=E, group=None) | change
    tensors = [call.pop(name) for name in ("x", "ids", "scores", "w1", "w2", "w3")]
    with pytest.raises(ValueError) as caught:
        mega_moe(*tensors, **call)
    assert message in str(caught.value)


def run(inputs: list[torch.Tensor]) -> torch.Tensor:
    return mega_moe(*inputs, num_experts=E, group=None, compute_dtype=torch.float32)


def test_second_derivatives_are_refused():
    inputs = arguments()
    (dx,) = torch.autograd.grad(run(inputs).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"mega_moe has no second derivative, .*: call backward without"):
        dx.sum().backward()


def test_forward_mode_is_refused_and_no_zero_derivative_comes_back():
    x, *rest = arguments(requires_grad=False)
    with pytest.raises(NotImplementedError, match=r"x has a forward-mode tangent, .* with backward\(\)"):
        torch.func.jvp(lambda x: run([x, *rest]), (x,), (x,))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
        lambda f, x: torch.func.jacrev(f)(x),
        lambda f, x: torch.vmap(f)(torch.stack([x, x])),
        lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
    ],
    ids=["grad", "jacrev", "vmap", "batch of gradients"],
)
def test_transforms_are_refused_with_what_to_do(transform):
    x, *rest = arguments(requires_grad=False)
    with pytest.raises(NotImplementedError, match=r"mega_moe has no rule for .*: call it once with all tokens"):
        transform(lambda x: run([x, *rest]), x)


def dtensor() -> str:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    x, *rest = arguments(requires_grad=False)
    with pytest.raises(ValueError) as caught:
        run([distribute_tensor(x, init_device_mesh("cpu", (1,))), *rest])
    return str(caught.value)


def test_a_dtensor_is_refused():
    (said,) = ranks.run(1, dtensor)
    assert said == "mega_moe: x must be a dense tensor, got 'DTensor'; of a DTensor pass its to_local()"


def test_what_is_odd_and_right_gives_what_plain_input_does():
    """Strides, subclasses, integers of other kinds, inputs under inference mode; meta tensors have no values."""
    x, ids, scores, *weights = arguments(requires_grad=False)
    plain = run([x, ids, scores, *weights])
    turned = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (x, ids, scores, *weights)]
    torch.testing.assert_close(run(turned), plain)
    assert torch.equal(run([x.as_subclass(type("Own", (torch.Tensor,), {})), ids, scores, *weights]), plain)
    integer = mega_moe(x, ids, scores, *weights, num_experts=np.int64(E), group=None, compute_dtype=torch.float32)
    assert torch.equal(integer, plain)
    with torch.inference_mode():
        assert torch.equal(run([x, ids, scores, *weights]), plain)
    assert run([t.to("meta") for t in (x, ids, scores, *weights)]).shape == plain.shape
    assert run([x[:0], ids[:0], scores[:0], *weights]).shape == (0, D)
    lost = run([x, ids, scores.index_fill(0, torch.tensor([3]), float("nan")), *weights])
    assert lost[3].isnan().all() and torch.equal(lost[:3], plain[:3])


def test_autocast_changes_neither_pass():
    def both(autocast: bool) -> list[torch.Tensor]:
        inputs = arguments()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = run(inputs)
            y.square().sum().backward()
        return [y, *(t.grad for t in inputs if t.requires_grad)]

    for plain, under_autocast in zip(both(False), both(True), strict=True):
        assert torch.equal(plain, under_autocast)


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_slot_without_an_expert_adds_nothing_whatever_its_score(score):
    def both(value: float) -> list[torch.Tensor]:
        x, ids, scores, *weights = arguments()
        ids[::2, 1] = -1
        with torch.no_grad():
            scores.masked_fill_(ids < 0, value)
        y = run([x, ids, scores, *weights])
        y.sum().backward()
        assert not scores.grad[ids < 0].any()
        return [y, x.grad, scores.grad, *(w.grad for w in weights)]

    for plain, odd in zip(both(0.0), both(score), strict=True):
        assert torch.equal(plain, odd)


def test_changing_T_compiles_a_fixed_number_of_times():
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda *inputs: run(list(inputs)), backend=counter, fullgraph=True)
    for tokens in (5, 6, 7, 9, 33, 2, 10, 8):
        x, ids, scores, *weights = arguments()
        repeat = torch.arange(tokens) % T
        compiled(x.detach()[repeat].requires_grad_(), ids[repeat], scores.detach()[repeat].requires_grad_(), *weights)
    assert counter.frame_count == 2  # the first T, then any


def uneven() -> str:
    x, ids, scores, *weights = arguments(requires_grad=False)
    with pytest.raises(ValueError) as caught:
        mega_moe(x, ids, scores, *weights, num_experts=5, group=dist.group.WORLD)
    return str(caught.value)


def test_refuses_experts_that_do_not_divide():
    for message in ranks.run(2, uneven):
        assert "num_experts=5 does not divide over the group's 2 ranks" in message


def test_automatic_backend():
    assert backends.automatic("cpu") == ("reference", "the fused backends need a GPU, the device is cpu")
    assert backends.unavailable_reason("reference", "cpu") is None


@pytest.mark.parametrize("name", ["triton", "deep_gemm"])
def test_unavailable_backend_says_why(name):
    reason = backends.unavailable_reason(name, "cpu")
    assert reason
    x, ids, scores, *weights = arguments(requires_grad=False)
    with pytest.raises(RuntimeError) as caught:
        mega_moe(x, ids, scores, *weights, num_experts=E, group=None, backend=name)
    assert str(caught.value) == f"mega_moe: backend {name!r} cannot run on cpu: {reason}"
