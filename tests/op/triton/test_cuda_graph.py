"""A forward and backward of the fused kernels in a CUDA graph, replayed on other tokens and another routing."""

import pytest
import torch

from titan_mega_moe.op import backends, mega_moe
from titan_mega_moe.op.triton.cuda import KERNELS

REASON = backends.unavailable_reason("triton", "cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

T, D, F, E, K = 700, 256, 192, 16, 4


def tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids, scores, dy."""
    g = torch.Generator("cuda").manual_seed(seed)
    x, dy = (torch.randn(T, D, generator=g, device="cuda").bfloat16() for _ in range(2))
    ids = torch.rand(T, E, generator=g, device="cuda").topk(K, 1).indices
    return x, ids, torch.rand(T, K, generator=g, device="cuda"), dy


@pytest.mark.parametrize("keep", backends.KEEP)
def test_a_replay_gives_the_bits_of_an_eager_call(keep):
    here = torch.device("cuda", torch.cuda.current_device())
    backends.load("triton").prepare(backends.BufferPlan("", here, T, D, F, E, K, keep))
    g = torch.Generator("cuda").manual_seed(0)
    w1, w3 = (torch.randn(E, F, D, generator=g, device="cuda").bfloat16().requires_grad_() for _ in range(2))
    w2 = torch.randn(E, D, F, generator=g, device="cuda").bfloat16().requires_grad_()
    x, ids, scores, dy = tokens(0)
    x.requires_grad_()
    scores.requires_grad_()

    def step() -> list[torch.Tensor]:
        y = mega_moe(x, ids, scores, w1, w2, w3, num_experts=E, group=None, backend="triton", keep=keep)
        return [y.detach(), *torch.autograd.grad(y, (x, scores, w1, w2, w3), dy)]

    def put(seed: int) -> None:
        with torch.no_grad():
            for mine, new in zip((x, ids, scores, dy), tokens(seed), strict=True):
                mine.copy_(new)

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    profiled = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])  # the phases name themselves
    with profiled as profile, torch.cuda.graph(graph):
        captured = step()
    named = {e.name.removeprefix("mega_moe::") for e in profile.events() if e.name.startswith("mega_moe::")}
    assert named == {"forward", "backward", "routing", *KERNELS} - {"combine_rest"}  # without peers no dispatch either
    for seed in (1, 2, 1):
        put(seed)
        graph.replay()
        replayed = [t.clone() for t in captured]
        assert all(torch.equal(a, b) for a, b in zip(replayed, step(), strict=True)), seed
