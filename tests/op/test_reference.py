"""The reference backend against a float64 computation, over shapes, routings, dtypes and ranks."""

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.op import oracle
from titan_mega_moe import mega_moe

# tokens of each rank (cut to the ranks there are), D, F, E, K
SHAPES = [
    ([7, 5, 9, 1], 16, 8, 8, 2),
    ([13, 0, 3, 8], 8, 24, 8, 1),
    ([0, 6, 0, 0], 16, 16, 4, 4),
    ([1, 1, 1, 1], 4, 4, 4, 3),
    ([33, 64, 17, 40], 32, 20, 16, 8),
    ([5, 12, 3, 11], 12, 12, 32, 5),
    ([9, 2, 15, 4], 20, 28, 12, 6),
    ([21, 21, 21, 21], 16, 8, 8, 7),
]
# Largest error of any tensor over all cases: float64 1.8e-15, float32 8.5e-7, bfloat16 5.5e-3.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def check_all(compute_dtype: torch.dtype, stored: torch.dtype) -> None:
    """Every shape with every routing on this group: y, dx, dscores and the three weight gradients."""
    ep, rank = dist.get_world_size(), dist.get_rank()
    group = None if ep == 1 else dist.group.WORLD
    for n, (tokens, D, F, E, K) in enumerate(SHAPES):
        for routing in oracle.ROUTINGS:
            inputs = oracle.make(n, tokens[:ep], D, F, E, K, routing, stored)
            mine = slice(rank * E // ep, (rank + 1) * E // ep)
            x, scores = inputs.x[rank].requires_grad_(), inputs.scores[rank].requires_grad_()
            weights = [w[mine].clone().requires_grad_() for w in (inputs.w1_EFD, inputs.w2_EDF, inputs.w3_EFD)]
            y = mega_moe(x, inputs.ids[rank], scores, *weights, num_experts=E, group=group, compute_dtype=compute_dtype)
            y.backward(inputs.dy[rank])
            ys, grads = oracle.solve(oracle.rounded(inputs, compute_dtype))
            expected = [ys[rank], grads["dx"][rank], grads["dscores"][rank], *(w[mine] for w in grads["dw"])]
            for owner, actual, right in zip(
                [x, x, scores, *weights], [y, x.grad, scores.grad, *(w.grad for w in weights)], expected,
                strict=True,
            ):  # fmt: skip
                assert actual.dtype == owner.dtype and actual.shape == right.shape
                error = oracle.error(actual, right)
                assert error < TOLERANCE[compute_dtype], (
                    tokens,
                    D,
                    F,
                    E,
                    K,
                    routing,
                    tuple(right.shape),
                    error,
                )


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize(
    "compute_dtype, stored",
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_matches_float64(ep, compute_dtype, stored):
    ranks.run(ep, check_all, compute_dtype, stored)


def repeat() -> list[list[torch.Tensor]]:
    rank = dist.get_rank()
    inputs = oracle.make(3, [50, 31], 32, 48, 8, 4, "random", torch.bfloat16)
    weights = [w[rank * 4 : rank * 4 + 4] for w in (inputs.w1_EFD, inputs.w2_EDF, inputs.w3_EFD)]
    runs = []
    for _ in range(5):
        leaves = [t.clone().requires_grad_() for t in (inputs.x[rank], inputs.scores[rank], *weights)]
        y = mega_moe(leaves[0], inputs.ids[rank], *leaves[1:], num_experts=8, group=dist.group.WORLD)
        y.backward(inputs.dy[rank])
        runs.append([y.detach(), *(t.grad for t in leaves)])
    return runs


def test_repeats_bit_for_bit():
    for first, *others in ranks.run(2, repeat):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def bad_id(value: int) -> str:
    ids = torch.zeros(4, 2, dtype=torch.int64)
    ids[2, 1] = value
    w = torch.zeros(2, 8, 8)
    with pytest.raises(ValueError) as caught:
        mega_moe(torch.zeros(4, 8), ids, torch.zeros(4, 2), w, w, w, num_experts=4, group=dist.group.WORLD)
    return str(caught.value)


@pytest.mark.parametrize("value", [4, 1000, -2])
def test_id_out_of_range(value):
    for message in ranks.run(2, bad_id, value):
        assert f"expert id {value} is outside [-1, 4)" in message
