"""Which implementation of the op runs: name -> backend object, and why a backend cannot run here.

A backend module is imported at its first use, so a missing dependency is a reason, not an import error.
"""

import importlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

KEEP = ("activations", "inputs")

# Each module holds one backend object, BACKEND. "auto" tries them in this order, the reference on the CPU.
_MODULES = {
    "triton": "titan_mega_moe.op.triton",
    "deep_gemm": "titan_mega_moe.op.deep_gemm",
    "reference": "titan_mega_moe.op.reference",
}
NAMES = ("auto", *_MODULES)
# Settings that leave TorchTitan's own layer in place, and the dispatcher that its moe_comm_backend gives it.
UPSTREAM = {
    "upstream": "standard",
    "minimal_async_ep": "minimal_async_ep",
    "deepep": "deepep",
    "hybridep": "hybridep",
}


def group_of(name: str) -> ProcessGroup | None:
    """The process group of that name; None for the empty name, which stands for EP=1."""
    return _resolve_process_group(GroupName(name)) if name else None


@dataclass(frozen=True)
class Call:
    """One call's static arguments, as they travel through the registered op."""

    num_experts: int
    group_name: str
    compute_dtype: torch.dtype
    keep: str

    @property
    def group(self) -> ProcessGroup | None:
        """The expert-parallel group; None when all experts are here."""
        return group_of(self.group_name)

    @property
    def ep_size(self) -> int:
        return group_size(self.group_name)

    @property
    def ep_rank(self) -> int:
        return self.group.rank() if self.group is not None else 0


@dataclass(frozen=True)
class BufferPlan:
    """What a backend needs to know to allocate once, before training. Equal on every rank of the group.

    max_tokens is the largest T of any rank and step; dim, hidden_dim are D, F; num_experts is E.
    reserved_sms are the GPU's multiprocessors that deep_gemm leaves to other streams (FSDP's collectives).
    """

    group_name: str
    device: torch.device
    max_tokens: int
    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    keep: str
    reserved_sms: int = 16


class Backend(Protocol):
    """One implementation of the op. Shapes and meaning are those of `titan_mega_moe.op.mega_moe`.

    forward and backward are collectives over the call's group; no result may alias an input.
    """

    name: str

    def unavailable_reason(self, device: torch.device) -> str | None:
        """One sentence on why this backend cannot run on the device, or None."""

    def forward(
        self,
        call: Call,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        w1_eFD: torch.Tensor,
        w2_eDF: torch.Tensor,
        w3_eFD: torch.Tensor,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """y_TD in x's dtype and what the backward wants kept, in shapes that depend on no tensor's values."""

    def saved_like(
        self,
        call: Call,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        w1_eFD: torch.Tensor,
        w2_eDF: torch.Tensor,
        w3_eFD: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Fresh empty tensors in the shapes, dtypes and devices of forward's second result."""

    def backward(
        self,
        call: Call,
        dy_TD: torch.Tensor,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        w1_eFD: torch.Tensor,
        w2_eDF: torch.Tensor,
        w3_eFD: torch.Tensor,
        saved: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """dx_TD, dscores_TK, dw1_eFD, dw2_eDF, dw3_eFD, each in the dtype of what it belongs to."""

    def prepare(self, plan: BufferPlan) -> None:
        """Allocate what the plan needs, before training. A collective over the plan's group.

        Meeting an equal plan again costs nothing. A forward whose group and shapes were never planned plans
        for its own largest T over the group, once: layers switched on by an override may not know their T
        beforehand.
        """

    def buffer_bytes(self, plan: BufferPlan) -> int | None:
        """Bytes that `prepare` takes on each rank's device; None when only a library it calls knows."""


def load(name: str) -> Backend:
    """The backend object of that name. Raises ValueError if unknown, ImportError if it cannot be imported."""
    if name not in _MODULES:
        raise ValueError(f"mega_moe: backend is {name!r}; it must be one of {', '.join(NAMES)}")
    return importlib.import_module(_MODULES[name]).BACKEND


def unavailable_reason(name: str, device: torch.device | str) -> str | None:
    """One sentence on why the named backend cannot run on the device, or None when it can."""
    try:
        return load(name).unavailable_reason(torch.device(device))
    except ImportError as error:
        return f"it cannot be imported ({error})"


# Both functions below read state that a traced graph may take as constant: groups live as long as the model.
@torch.compiler.assume_constant_result
def choose(name: str, device_type: str) -> str:
    """Turn "auto" into a name and make sure that the named backend can run on "cuda" or "cpu"."""
    if name == "auto":
        return automatic(device_type)[0]
    reason = unavailable_reason(name, device_type)
    if reason is not None:
        raise RuntimeError(f"mega_moe: backend {name!r} cannot run on {device_type}: {reason}")
    return name


@torch.compiler.assume_constant_result
def group_size(group_name: str) -> int:
    """EP, the ranks of the named group; 1 for the empty name."""
    return _resolve_process_group(GroupName(group_name)).size() if group_name else 1


def automatic(device_type: str) -> tuple[str, str]:
    """The name that "auto" stands for on this device, and the reason for it.

    Raises RuntimeError on a GPU where no fused backend runs: the reference is slow there, so it has to be
    asked for by name.
    """
    if device_type != "cuda":
        return "reference", f"the fused backends need a GPU, the device is {device_type}"
    reasons: list[str] = []
    for name in ("triton", "deep_gemm"):
        reason = unavailable_reason(name, device_type)
        if reason is None:
            return name, "; ".join(reasons) or "it is the fastest that runs on this GPU"
        reasons.append(f"{name}: {reason}")
    raise RuntimeError(
        f"mega_moe: no fused backend runs on this GPU ({'; '.join(reasons)}); "
        'set backend = "reference" to train with the slow one'
    )
