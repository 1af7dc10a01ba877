"""mega_moe: send tokens to experts across a process group, run the SwiGLU experts, bring the sums back.

Shape suffixes, here and below (as in torchtitan):
    T tokens of this rank   D model dim   F expert hidden dim   K experts per token
    E experts of the group  e experts of this rank (E / EP)     EP ranks in the group
    N rows this rank sends, one per (token, slot) with an expert
    R rows this rank's experts receive, from all ranks

What is computed, for token t with experts i = ids[t, k] and scores s = scores[t, k]:
    g = W1_i x_t    u = W3_i x_t    h = silu(g) * u    y_t = sum_k s * W2_i h
"""

from numbers import Integral
from operator import index

import torch
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from titan_mega_moe.op import backends, library
from titan_mega_moe.op.backends import KEEP

__all__ = ["mega_moe"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def mega_moe(
    x_TD: torch.Tensor,
    topk_expert_ids_TK: torch.Tensor,
    topk_scores_TK: torch.Tensor,
    w1_eFD: torch.Tensor,
    w2_eDF: torch.Tensor,
    w3_eFD: torch.Tensor,
    *,
    num_experts: int,
    group: ProcessGroup | str | None,
    backend: str = "auto",
    compute_dtype: torch.dtype = torch.bfloat16,
    keep: str = "activations",
) -> torch.Tensor:
    """Dropless expert-parallel SwiGLU experts, differentiable in x, scores and the three weights.

    A collective: every rank of `group` calls it, forward and backward, in the same order. T may differ
    between ranks and may be 0.

    Args:
        x_TD: (T, D) floating point, this rank's tokens.
        topk_expert_ids_TK: (T, K) int64 in [-1, num_experts); -1 leaves the slot without an expert (it adds
            nothing and its score has gradient 0). Expert i lives on rank i // (num_experts / EP) of the
            group. The reference checks the range; the fused backends do so on the device and never wait for
            the answer.
        topk_scores_TK: (T, K) float32 (or float64), the weights of the sum.
        w1_eFD, w2_eDF, w3_eFD: gate, down, up weights of this rank's e = num_experts / EP experts, one dtype.
        num_experts: E, over the whole group.
        group: the expert-parallel process group or its name; None: all experts are here (EP=1).
        backend: "auto", "triton", "deep_gemm" or "reference". "auto" on a GPU is the fused backend that
            `bench` found faster there for these E, K, D, F and EP, as the group's first rank knows it.
        compute_dtype: x, dy and the weights are cast to it on entry; sums are float32 or better.
        keep: what the forward leaves for the backward: "activations" (what makes it fastest) or "inputs" (the
            backward recomputes the rest).

    Returns:
        y_TD: (T, D) in x's dtype. Gradients come back in the dtype of what they belong to.

    Raises:
        ValueError: a shape, dtype, device or option that does not fit, before any communication.
        NotImplementedError: a tensor inside a transform of torch.func, or with a forward-mode tangent.
        RuntimeError: the backend asked for cannot run here; the message says why.
    """
    if group is not None and not isinstance(group, str) and not hasattr(group, "group_name"):
        raise ValueError(f"mega_moe: group is {group!r}; it must be a process group, its name or None")
    group_name = group if isinstance(group, str) else "" if group is None else group.group_name
    _check_tensors(x_TD, topk_expert_ids_TK, topk_scores_TK, w1_eFD, w2_eDF, w3_eFD)
    _check_experts(num_experts, backends.group_size(group_name), w1_eFD.shape[0], topk_expert_ids_TK.shape[1])
    if keep not in KEEP:
        raise ValueError(f"mega_moe: keep is {keep!r}; it must be one of {', '.join(KEEP)}")
    if compute_dtype not in _FLOATS:
        raise ValueError(f"mega_moe: compute_dtype is {compute_dtype!r}; it must be one of {_names(_FLOATS)}")
    if not torch.is_grad_enabled():
        keep = "inputs"  # there will be no backward: leave nothing for it
    # index: a compiler may have made symbols of sizes, and these decide what runs.
    K, D, F = (index(n) for n in (topk_expert_ids_TK.shape[1], x_TD.shape[1], w1_eFD.shape[1]))
    name = backends.choose(backend, x_TD.device.type, group_name, num_experts, K, D, F)
    y_TD, _ = library.mega_moe(
        x_TD, topk_expert_ids_TK, topk_scores_TK, w1_eFD, w2_eDF, w3_eFD,
        num_experts, group_name, name, compute_dtype, keep,
    )  # fmt: skip
    return y_TD


def _check_tensors(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    scores_TK: torch.Tensor,
    w1_eFD: torch.Tensor,
    w2_eDF: torch.Tensor,
    w3_eFD: torch.Tensor,
) -> None:
    for name, t in zip(
        ("x", "topk_expert_ids", "topk_scores", "w1", "w2", "w3"),
        (x_TD, ids_TK, scores_TK, w1_eFD, w2_eDF, w3_eFD),
        strict=True,
    ):
        if not isinstance(t, torch.Tensor) or isinstance(t, DTensor):
            raise ValueError(
                f"mega_moe: {name} must be a dense tensor, got {type(t).__name__!r}; of a DTensor pass its to_local()"
            )
        if t.layout != torch.strided or t.is_nested:
            got = "a nested one" if t.is_nested else f"one of {t.layout}"
            raise ValueError(f"mega_moe: {name} must be a dense tensor, got {got}; pass its to_dense() or padded rows")
        # Without this a derivative of zero would come back.
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(
                f"mega_moe: {name} has a forward-mode tangent, and only reverse mode is implemented; "
                "differentiate with backward() or torch.autograd.grad"
            )
    if x_TD.dim() != 2 or x_TD.dtype not in _FLOATS:
        raise ValueError(f"mega_moe: x must be (T, D) floating point, got {tuple(x_TD.shape)} {x_TD.dtype}")
    T, D = x_TD.shape
    if ids_TK.dim() != 2 or ids_TK.shape[0] != T or ids_TK.dtype != torch.int64:
        raise ValueError(
            f"mega_moe: topk_expert_ids must be (T={T}, K) int64, got {tuple(ids_TK.shape)} {ids_TK.dtype}"
        )
    if scores_TK.shape != ids_TK.shape or scores_TK.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"mega_moe: topk_scores must be {tuple(ids_TK.shape)} float32 like the expert ids, "
            f"got {tuple(scores_TK.shape)} {scores_TK.dtype}"
        )
    if w1_eFD.dim() != 3 or w1_eFD.shape[2] != D:
        raise ValueError(f"mega_moe: w1 must be (e, F, D={D}), got {tuple(w1_eFD.shape)}")
    e, F, _ = w1_eFD.shape
    if w2_eDF.shape != (e, D, F):
        raise ValueError(f"mega_moe: w2 must be (e={e}, D={D}, F={F}) to fit w1, got {tuple(w2_eDF.shape)}")
    if w3_eFD.shape != (e, F, D):
        raise ValueError(f"mega_moe: w3 must be (e={e}, F={F}, D={D}) to fit w1, got {tuple(w3_eFD.shape)}")
    dtypes = (w1_eFD.dtype, w2_eDF.dtype, w3_eFD.dtype)
    if len(set(dtypes)) != 1 or w1_eFD.dtype not in _FLOATS:
        raise ValueError(f"mega_moe: w1, w2, w3 must share one floating point dtype, got {dtypes}")
    others = (ids_TK, scores_TK, w1_eFD, w2_eDF, w3_eFD)
    if any(t.device != x_TD.device for t in others):
        devices = [str(t.device) for t in others]
        raise ValueError(f"mega_moe: x is on {x_TD.device}, but ids, scores, w1, w2, w3 are on {devices}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))


def _check_experts(num_experts: int, ep: int, e: int, K: int) -> None:
    if isinstance(num_experts, bool) or not isinstance(num_experts, Integral) or num_experts <= 0:
        raise ValueError(f"mega_moe: num_experts is {num_experts!r}; it must be a positive integer")
    if num_experts % ep != 0:
        raise ValueError(
            f"mega_moe: num_experts={num_experts} does not divide over the group's {ep} ranks; "
            "choose an expert parallel degree that divides the experts"
        )
    if e != num_experts // ep:
        raise ValueError(
            f"mega_moe: w1 holds {e} experts, but {num_experts} experts over {ep} ranks are "
            f"{num_experts // ep} each; pass this rank's shard of the weights"
        )
    if not 1 <= K <= num_experts:
        raise ValueError(f"mega_moe: K={K} experts per token must be between 1 and num_experts={num_experts}")
