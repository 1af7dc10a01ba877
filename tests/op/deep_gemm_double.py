"""A stand-in for a DeepGEMM build with a trainable Mega MoE: its interface, written with torch.

It computes the real thing in float32 over the buffer's group, on the CPU, and writes down every call. What
the real kernels leave undefined is made to hurt: after each launch the buffer holds NaN and ids that do not
exist, and score gradients of slots without an expert are NaN.

Copied to a folder on the path as deep_gemm.py it is importable as the real one is; `variant` makes builds
that lack something.
"""

import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

__version__ = "1.0+double"


@dataclass
class Launch:
    """One recorded call: copies of the tensors that the kernel was given, and its keywords."""

    name: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    buffer: Any = None


CALLS: list[Launch] = []


class SymmBuffer:
    def __init__(self, group, num_experts, max_tokens, topk, hidden, intermediate_hidden):
        max_tokens = (max_tokens + 7) // 8 * 8  # real builds round up too
        self.group = group
        self.num_experts = num_experts
        self.hidden, self.intermediate_hidden = hidden, intermediate_hidden
        self.x = torch.empty(max_tokens, hidden, dtype=torch.bfloat16)
        self.topk_idx = torch.empty(max_tokens, topk, dtype=torch.int64)
        self.topk_weights = torch.empty(max_tokens, topk, dtype=torch.float32)
        self.spoil()

    def spoil(self):
        self.x.fill_(float("nan"))
        self.topk_idx.fill_(self.num_experts + 1)
        self.topk_weights.fill_(float("nan"))

    def destroy(self):
        CALLS.append(Launch("destroy", buffer=self))
        self.x = self.topk_idx = self.topk_weights = self.group = None


def set_num_sms(num_sms):
    CALLS.append(Launch("set_num_sms", options={"num_sms": num_sms}))


def get_symm_buffer_for_mega_moe(
    group,
    num_experts,
    num_max_tokens_per_rank,
    num_topk,
    hidden,
    intermediate_hidden,
    num_shared_experts=1,  # the adapter must say that it has none
    mma_type="bf16xbf16",
):
    assert hidden % 256 == 0 and intermediate_hidden % 128 == 0 and mma_type == "bf16xbf16"
    assert num_shared_experts == 0 and num_experts % group.size() == 0
    dist.barrier(group)
    buffer = SymmBuffer(group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)
    CALLS.append(
        Launch(
            "get_symm_buffer_for_mega_moe",
            options={"max_tokens": num_max_tokens_per_rank, "shared_experts": num_shared_experts},
            buffer=buffer,
        )
    )
    return buffer


def transform_weights_for_mega_moe(l1, l2):
    e, n, D = l1.shape
    return l1.view(e, 2, n // 16, 8, D).transpose(1, 2).reshape(e, n, D), l2


def bf16_mega_moe(y, l1, l2, buffer, activation_clamp=None, fast_math=True, l1_natural_layout=False):
    _record(
        "bf16_mega_moe",
        buffer,
        y,
        l1,
        l2,
        l1_natural_layout=l1_natural_layout,
        activation_clamp=activation_clamp,
    )
    inputs = _Global(buffer, y.shape[0], l1, l2, l1_natural_layout)
    y.copy_(inputs.own(inputs.forward()))
    buffer.spoil()


def bf16_mega_moe_backward(
    dx,
    dw1,
    dw2,
    dtopk_weights,
    dy,
    l1,
    l2,
    buffer,
    activation_clamp=None,
    fast_math=True,
    dw_natural_layout=True,
    l1_natural_layout=False,
):
    _record(
        "bf16_mega_moe_backward",
        buffer,
        dx,
        l1,
        l2,
        l1_natural_layout=l1_natural_layout,
        activation_clamp=activation_clamp,
        dw_natural_layout=dw_natural_layout,
    )
    T = dx.shape[0]
    assert dy.shape == dx.shape and dy.dtype == torch.bfloat16 and dy.is_contiguous()
    assert dw1.shape == l1.shape and dw2.shape == l2.shape and dw1.dtype == dw2.dtype
    assert dw1.dtype in (torch.bfloat16, torch.float32) and dw1.is_contiguous() and dw2.is_contiguous()
    assert dtopk_weights.shape == (T, buffer.topk_idx.shape[1]) and dtopk_weights.dtype == torch.float32
    CALLS[-1].tensors.update(dw1=dw1, dw2=dw2, dy=dy.clone())
    inputs = _Global(buffer, T, l1, l2, l1_natural_layout)
    dy_all = _gather(buffer.group, dy, inputs.counts)
    grads = inputs.backward(dy_all)
    dx.copy_(inputs.own(grads["x"]))
    dtopk_weights.copy_(inputs.own(grads["weights"]))
    dtopk_weights[buffer.topk_idx[:T] < 0] = float("nan")
    own = slice(inputs.rank * l1.shape[0], (inputs.rank + 1) * l1.shape[0])
    dl1 = grads["l1"][own]
    dw1.copy_(dl1 if dw_natural_layout else transform_weights_for_mega_moe(dl1, None)[0])
    dw2.copy_(grads["l2"][own])
    buffer.spoil()


def _record(name, buffer, out, l1, l2, **options):
    T, D, H = out.shape[0], buffer.hidden, buffer.intermediate_hidden
    e = buffer.num_experts // buffer.group.size()
    assert out.shape == (T, D) and out.dtype == torch.bfloat16 and out.is_contiguous()
    assert l1.shape == (e, 2 * H, D) and l1.dtype == torch.bfloat16 and l1.is_contiguous()
    assert l2.shape == (e, D, H) and l2.dtype == torch.bfloat16 and l2.is_contiguous()
    assert buffer.x.shape[0] >= T and options["activation_clamp"] is None
    ids = buffer.topk_idx[:T]
    assert ((ids >= -1) & (ids < buffer.num_experts)).all(), "the call's ids were not copied into the buffer"
    tensors = {
        "x": buffer.x[:T],
        "topk_idx": ids,
        "topk_weights": buffer.topk_weights[:T],
        "l1": l1,
        "l2": l2,
    }
    copies = {k: v.clone() for k, v in tensors.items()}
    CALLS.append(Launch(name, copies, options, buffer))


def _gather(group, t, counts):
    """Rows of every rank, counts[r] from rank r, in rank order and float32."""
    parts = [torch.empty(n, *t.shape[1:], dtype=torch.float32) for n in counts]
    for rank, part in enumerate(parts):
        if rank == group.rank():
            part.copy_(t)
        if part.numel():
            dist.broadcast(part, group_src=rank, group=group)
    return torch.cat(parts)


class _Global:
    """What all ranks put in, on every rank, in float32. Autograd is off inside an op: gradients by hand."""

    def __init__(self, buffer, T, l1, l2, natural):
        group = buffer.group
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
        dist.all_gather(counts, torch.tensor([T]), group=group)
        self.counts, self.rank = [int(n) for n in counts], group.rank()
        if not natural:
            e, n, D = l1.shape
            l1 = l1.view(e, n // 16, 2, 8, D).transpose(1, 2).reshape(e, n, D)
        experts = [l1.shape[0]] * group.size()
        self.x = _gather(group, buffer.x[:T], self.counts)
        self.ids = _gather(group, buffer.topk_idx[:T], self.counts).long()
        self.weights = _gather(group, buffer.topk_weights[:T], self.counts)
        self.l1 = _gather(group, l1, experts)
        self.l2 = _gather(group, l2, experts)

    def _experts(self):
        """Token and slot of each row, the row's weight, and gate and up of it, expert by expert."""
        for expert in range(self.l1.shape[0]):
            token, slot = (self.ids == expert).nonzero(as_tuple=True)
            gate, up = (self.x[token] @ self.l1[expert].T).chunk(2, dim=1)
            yield expert, token, slot, self.weights[token, slot, None], gate, up

    def forward(self):
        y = torch.zeros_like(self.x)
        for expert, token, _, weight, gate, up in self._experts():
            y.index_add_(0, token, weight * (F.silu(gate) * up @ self.l2[expert].T))
        return y

    def backward(self, dy):
        grads = {name: torch.zeros_like(getattr(self, name)) for name in ("x", "weights", "l1", "l2")}
        for expert, token, slot, weight, gate, up in self._experts():
            act = F.silu(gate)
            dh_unweighted = dy[token] @ self.l2[expert]
            grads["weights"][token, slot] = (dh_unweighted * act * up).sum(1)
            grads["l2"][expert] = dy[token].T @ (weight * act * up)
            dh = weight * dh_unweighted
            sigmoid = gate.sigmoid()
            dgate_up = torch.cat((dh * up * (sigmoid + act * (1 - sigmoid)), dh * act), dim=1)
            grads["l1"][expert] = dgate_up.T @ self.x[token]
            grads["x"].index_add_(0, token, dgate_up @ self.l1[expert])
        return grads

    def own(self, rows):
        start = sum(self.counts[: self.rank])
        return rows[start : start + self.counts[self.rank]]


def variant(*, without=(), natural=True, deterministic=False, dw_natural=True):
    """This module as another build would look: functions missing, or other keywords accepted."""
    here = sys.modules[__name__]
    module = types.ModuleType("deep_gemm")
    module.__dict__.update({name: value for name, value in vars(here).items() if name not in without})

    # The keywords of a build are read from its signatures, so each variant spells its own.
    def forward(y, l1, l2, buffer, activation_clamp=None, fast_math=True):
        here.bf16_mega_moe(y, l1, l2, buffer, activation_clamp)

    def backward(
        dx, dw1, dw2, dtopk, dy, l1, l2, buffer, activation_clamp=None, fast_math=True, dw_natural_layout=True
    ):
        here.bf16_mega_moe_backward(dx, dw1, dw2, dtopk, dy, l1, l2, buffer, activation_clamp, True, dw_natural_layout)

    def deterministic_forward(*args, activation_clamp=None, l1_natural_layout=False, deterministic=False):
        here.bf16_mega_moe(*args, activation_clamp=activation_clamp, l1_natural_layout=l1_natural_layout)
        CALLS[-1].options["deterministic"] = deterministic

    def deterministic_backward(
        *args, activation_clamp=None, dw_natural_layout=True, l1_natural_layout=False, deterministic=False
    ):
        here.bf16_mega_moe_backward(*args, dw_natural_layout=dw_natural_layout, l1_natural_layout=l1_natural_layout)
        CALLS[-1].options["deterministic"] = deterministic

    def interleaved_dw_only(dx, dw1, dw2, dtopk, dy, l1, l2, buffer, activation_clamp=None):
        raise AssertionError("a build that cannot write dw1 in the natural layout must not be launched")

    if not natural:
        module.bf16_mega_moe, module.bf16_mega_moe_backward = forward, backward
    if deterministic:
        module.bf16_mega_moe, module.bf16_mega_moe_backward = deterministic_forward, deterministic_backward
    if not dw_natural:
        module.bf16_mega_moe_backward = interleaved_dw_only
    return module
