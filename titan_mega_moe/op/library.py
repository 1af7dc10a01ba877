"""The op as torch knows it: schema, fake implementation, autograd. What runs is the backend's.

The forward returns what the backward wants kept as outputs, so that activation checkpointing and the
compiler's partitioner see it, may save or drop it, and never have to run the communication again to get it.
"""

import math
from typing import Any, NoReturn

import torch
from torch.utils.flop_counter import register_flop_formula

from titan_mega_moe.op.backends import Backend, Call, Operands, load
from titan_mega_moe.op.ranges import phase

_TENSORS = "Tensor x, Tensor ids, Tensor scores, Tensor w1, Tensor w2, Tensor w3"
_STATIC = "int num_experts, str group, str backend, ScalarType compute_dtype, str keep"


_LIBRARY = torch.library.Library("titan_mega_moe", "DEF")
_LIBRARY.define(f"mega_moe({_TENSORS}, {_STATIC}) -> (Tensor, Tensor[])", tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.define(
    f"mega_moe_backward(Tensor dy, {_TENSORS}, Tensor[] saved, {_STATIC}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
mega_moe = torch.ops.titan_mega_moe.mega_moe.default
mega_moe_backward = torch.ops.titan_mega_moe.mega_moe_backward.default


def _static(num_experts: int, group: str, backend: str, compute_dtype: torch.dtype, keep: str) -> tuple[Backend, Call]:
    return load(backend), Call(num_experts, group, compute_dtype, keep)


@torch.library.impl(_LIBRARY, "mega_moe", "CompositeExplicitAutograd")
def _(*args: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    operands, (backend, call) = Operands(*args[:6]), _static(*args[6:])
    # compute_dtype alone says how operands are rounded
    with torch.autocast(operands.x_TD.device.type, enabled=False), phase("forward"):
        return backend.forward(call, operands)


@torch.library.register_fake("titan_mega_moe::mega_moe", lib=_LIBRARY)
def _(*args: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    operands, (backend, call) = Operands(*args[:6]), _static(*args[6:])
    return operands.x_TD.new_empty(operands.x_TD.shape), backend.saved_like(call, operands)


@torch.library.impl(_LIBRARY, "mega_moe_backward", "CompositeExplicitAutograd")
def _(dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    operands, saved, (backend, call) = Operands(*args[:6]), args[6], _static(*args[7:])
    with torch.autocast(dy.device.type, enabled=False), phase("backward"):
        return backend.backward(call, dy, operands, saved)


@torch.library.register_fake("titan_mega_moe::mega_moe_backward", lib=_LIBRARY)
def _(dy: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    # new_empty, not empty_like: gradients are contiguous whatever the strides of the inputs.
    return tuple(t.new_empty(t.shape) for t in (x, *rest[:4]))


class _MegaMoE(torch.autograd.Function):
    """torch.library.register_autograd would do; for an op with lists it takes 0.1 ms of the host a call."""

    @staticmethod
    def forward(ctx: Any, keys: torch._C.DispatchKeySet, *inputs: Any) -> tuple[torch.Tensor, ...]:
        y, saved = _below_autograd(keys, *inputs)
        tensors, ctx.static = inputs[:6], inputs[6:]
        ctx.mark_non_differentiable(*saved)
        # Or autograd would fill zeros of saved's size for gradients that nobody reads.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        return y, *saved

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None, *_: None) -> tuple:
        kept = ctx.saved_tensors  # read once: activation checkpointing refuses a second reading
        tensors, saved = kept[:6], kept[6:]
        if dy is None:  # zero; not skipped, because the group's other ranks wait for this one
            dy = torch.zeros_like(tensors[0])
        dx, dscores, dw1, dw2, dw3 = mega_moe_backward(dy, *tensors, list(saved), *ctx.static)
        return None, dx, None, dscores, dw1, dw2, dw3, *(None for _ in ctx.static)


def _below_autograd(keys: torch._C.DispatchKeySet, *inputs: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    with torch._C._AutoDispatchBelowAutograd():
        return mega_moe.redispatch(keys & torch._C._after_autograd_keyset, *inputs)


def _autograd(keys: torch._C.DispatchKeySet, *inputs: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    if not torch.is_grad_enabled() or not torch._C._any_requires_grad(*inputs):
        return _below_autograd(keys, *inputs)
    if torch._C._are_functorch_transforms_active():
        _no_transform()
    y, *saved = _MegaMoE.apply(keys, *inputs)
    return y, saved


_LIBRARY.impl("mega_moe", _autograd, "Autograd", with_keyset=True)


def _no_transform(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "mega_moe has no rule for vmap, for batches of gradients (is_grads_batched, vectorize) and for torch.func's "
        "transforms: call it once with all tokens, and differentiate with backward() or torch.autograd.grad"
    )


# "Batched" is the vmap that torch.autograd itself uses.
for _key in ("FuncTorchBatched", "Batched"):
    _LIBRARY.impl("mega_moe", _no_transform, _key)
    _LIBRARY.impl("mega_moe_backward", _no_transform, _key)


def _no_second_derivative(ctx: Any, *grads: torch.Tensor | None) -> tuple:
    raise NotImplementedError(
        "mega_moe has no second derivative, and torch.autograd.functional's jvp, hvp and hessian need one: call "
        "backward without create_graph=True, or detach its gradients before using them in a loss"
    )


torch.library.register_autograd("titan_mega_moe::mega_moe_backward", _no_second_derivative, lib=_LIBRARY)


# What a partitioner with a memory budget takes running the op again to cost; unknown ops cost it nothing.
@register_flop_formula(torch.ops.titan_mega_moe.mega_moe)
def _(x: torch.Size, ids: torch.Size, scores: torch.Size, w1: torch.Size, *_: Any, **__: Any) -> int:
    return 6 * math.prod(ids) * w1[1] * w1[2]


@register_flop_formula(torch.ops.titan_mega_moe.mega_moe_backward)
def _(dy: torch.Size, x: torch.Size, ids: torch.Size, scores: torch.Size, w1: torch.Size, *_: Any, **__: Any) -> int:
    return 12 * math.prod(ids) * w1[1] * w1[2]
