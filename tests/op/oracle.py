"""The op's meaning once more, in float64 and for all experts at once, differentiated by autograd."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F


@dataclass
class Inputs:
    """What all ranks of a group put in; the weights hold all experts."""

    x: list[torch.Tensor]
    ids: list[torch.Tensor]
    scores: list[torch.Tensor]
    dy: list[torch.Tensor]
    w1_EFD: torch.Tensor
    w2_EDF: torch.Tensor
    w3_EFD: torch.Tensor


def make(seed: int, tokens: list[int], D: int, F: int, E: int, K: int, routing: str, dtype: torch.dtype) -> Inputs:
    """Equal on every rank that calls it. `routing` is a key of ROUTINGS."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * std).to(dtype)

    return Inputs(
        x=[normal(T, D) for T in tokens],
        ids=[ROUTINGS[routing](T, E, K, g) for T in tokens],
        scores=[torch.rand(T, K, generator=g).to(torch.promote_types(dtype, torch.float32)) for T in tokens],
        dy=[normal(T, D) for T in tokens],
        w1_EFD=normal(E, F, D, std=D**-0.5),
        w2_EDF=normal(E, D, F, std=F**-0.5),
        w3_EFD=normal(E, F, D, std=D**-0.5),
    )


def _random(T: int, E: int, K: int, g: torch.Generator) -> torch.Tensor:
    return torch.rand(T, E, generator=g).argsort(1)[:, :K]


def _holes(T: int, E: int, K: int, g: torch.Generator) -> torch.Tensor:
    ids = _random(T, E, K, g)
    return ids.masked_fill(torch.rand(T, K, generator=g) < 0.4, -1)


ROUTINGS = {
    "random": _random,
    # Most experts get nothing, on all but the last rank.
    "last": lambda T, E, K, g: torch.arange(E - K, E).expand(T, K).contiguous(),
    # One expert gets every slot, K times over.
    "one": lambda T, E, K, g: torch.full((T, K), E // 2),
    # Every expert of the first rank (for EP up to E / K) stays empty.
    "upper": lambda T, E, K, g: E - 1 - _random(T, max(E // 2, K), K, g),
    # -1 in some slots, or in all.
    "holes": _holes,
    "nowhere": lambda T, E, K, g: torch.full((T, K), -1),
}


def rounded(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The inputs as the op sees them after its casts on entry."""
    return replace(
        inputs,
        x=[t.to(dtype) for t in inputs.x],
        dy=[t.to(dtype) for t in inputs.dy],
        w1_EFD=inputs.w1_EFD.to(dtype),
        w2_EDF=inputs.w2_EDF.to(dtype),
        w3_EFD=inputs.w3_EFD.to(dtype),
    )


def solve(inputs: Inputs) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
    """y of every rank, and the gradients: dx and dscores of every rank, dw1, dw2, dw3 of all experts."""
    leaf = lambda t: t.detach().double().clone().requires_grad_()  # noqa: E731
    xs, scores = [leaf(t) for t in inputs.x], [leaf(t) for t in inputs.scores]
    w1, w2, w3 = (leaf(t) for t in (inputs.w1_EFD, inputs.w2_EDF, inputs.w3_EFD))
    ys = [_forward(x, i, s, w1, w2, w3) for x, i, s in zip(xs, inputs.ids, scores, strict=True)]
    torch.autograd.backward(ys, [dy.double() for dy in inputs.dy])
    zero = lambda t: torch.zeros_like(t) if t.grad is None else t.grad  # noqa: E731
    return [y.detach() for y in ys], {
        "dx": [zero(t) for t in xs],
        "dscores": [zero(t) for t in scores],
        "dw": [zero(w1), zero(w2), zero(w3)],
    }


def _forward(x_TD, ids_TK, scores_TK, w1_EFD, w2_EDF, w3_EFD):
    # Every expert computes every token; the routing only weighs the results.
    h_ETF = F.silu(x_TD @ w1_EFD.mT) * (x_TD @ w3_EFD.mT)
    o_ETD = h_ETF @ w2_EDF.mT
    E = w1_EFD.shape[0]
    weight_TE = (F.one_hot(ids_TK + 1, E + 1)[..., 1:] * scores_TK.unsqueeze(-1)).sum(1)
    return torch.einsum("te,etd->td", weight_TE, o_ETD)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error; absolute where the expected tensor is zero or empty."""
    difference = torch.linalg.vector_norm(actual.double() - expected.double()).item()
    return difference / (torch.linalg.vector_norm(expected.double()).item() or 1.0)
