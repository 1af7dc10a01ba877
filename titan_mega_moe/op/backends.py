"""Which implementation of the op runs: name -> backend object, and why a backend cannot run here.

A backend module is imported at its first use, so a missing dependency is a reason, not an import error.
"""

import importlib
import logging
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.optim.optimizer import register_optimizer_step_pre_hook

from titan_mega_moe.op import fastest
from titan_mega_moe.op.fastest import Sizes

KEEP = ("activations", "inputs")

# Each module holds one backend object, BACKEND.
_MODULES = {
    "triton": "titan_mega_moe.op.triton",
    "deep_gemm": "titan_mega_moe.op.deep_gemm",
    "reference": "titan_mega_moe.op.reference",
}
NAMES = ("auto", *_MODULES)
FUSED = ("triton", "deep_gemm")  # what "auto" is on a GPU
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


class Operands(NamedTuple):
    """The op's tensors on this rank, as `titan_mega_moe.op.mega_moe` describes them."""

    x_TD: torch.Tensor
    ids_TK: torch.Tensor
    scores_TK: torch.Tensor
    w1_eFD: torch.Tensor
    w2_eDF: torch.Tensor
    w3_eFD: torch.Tensor


class Backend(Protocol):
    """One implementation of the op. Shapes and meaning are those of `titan_mega_moe.op.mega_moe`.

    forward and backward are collectives over the call's group; no result may alias an input.
    """

    name: str

    def unavailable_reason(self, device: torch.device) -> str | None:
        """One sentence on why this backend cannot run on the device, or None."""

    def forward(self, call: Call, operands: Operands) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """y_TD in x's dtype and what the backward wants kept, in shapes that depend on no tensor's values."""

    def saved_like(self, call: Call, operands: Operands) -> list[torch.Tensor]:
        """Fresh empty tensors in the shapes, dtypes and devices of forward's second result."""

    def backward(
        self, call: Call, dy_TD: torch.Tensor, operands: Operands, saved: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """dx_TD, dscores_TK, dw1_eFD, dw2_eDF, dw3_eFD, each in the dtype of what it belongs to."""

    def prepare(self, plan: BufferPlan) -> None:
        """Allocate what the plan needs, before training. A collective over the plan's group.

        Meeting an equal plan again costs nothing. A forward whose group and shapes were never planned plans
        for its own largest T over the group, once: layers switched on by an override may not know their T
        beforehand.
        """

    def release(self, plan: BufferPlan) -> None:
        """Give back what `prepare` took for the plan's group and shapes. A collective over the group."""

    def buffer_bytes(self, plan: BufferPlan) -> int | None:
        """Bytes that `prepare` takes on each rank's device; None when only a library it calls knows."""

    def check(self, wait: bool) -> None:
        """Raise RuntimeError if a kernel has given up waiting for a peer; wait: let those that still run end first.

        Without wait an optimizer is about to step: what a first step compiles is compiled.
        """


def load(name: str) -> Backend:
    """The backend object of that name. Raises ValueError if unknown, ImportError if it cannot be imported."""
    if name not in list(_MODULES):
        raise ValueError(f"mega_moe: backend is {name!r}; it must be one of {', '.join(NAMES)}")
    return importlib.import_module(_MODULES[name]).BACKEND


def check(wait: bool = False) -> None:
    """`check` of every backend that has been loaded: numbers made since its kernels gave up are wrong.

    Every call of the op checks too, but not the replay of a CUDA graph, and nothing after the last call.
    """
    for module in _MODULES.values():
        if module in sys.modules:
            sys.modules[module].BACKEND.check(wait)


@cache
def check_before_optimizers() -> None:
    """From now on every optimizer of this process checks before it changes a weight, whoever runs the training.

    It does not wait for kernels that still run: what they find is found in the next step, or before a save.
    """
    register_optimizer_step_pre_hook(lambda *_: check())


def unavailable_reason(name: str, device: torch.device | str) -> str | None:
    """One sentence on why the named backend cannot run on the device, or None when it can."""
    try:
        return load(name).unavailable_reason(torch.device(device))
    except ImportError as error:
        return f"it cannot be imported ({error})"


def require(name: str, device_type: str) -> str:
    """A name for the setting, whatever a layer's sizes. Raises RuntimeError if it cannot run on "cuda" or "cpu"."""
    if name == "auto":
        return automatic(device_type)[0]
    reason = unavailable_reason(name, device_type)
    if reason is not None:
        raise RuntimeError(f"mega_moe: backend {name!r} cannot run on {device_type}: {reason}")
    return name


# What "auto" has become, by group and sizes.
_automatic: dict[tuple[ProcessGroup | None, Sizes], str] = {}


# Both functions below read state that a traced graph may take as constant: groups live as long as the model.
@torch.compiler.assume_constant_result
def choose(name: str, device_type: str, group_name: str, *sizes: int) -> str:
    """Turn "auto" into a name and make sure that the named backend can run on "cuda" or "cpu".

    `sizes` are E, K, D, F. For "auto" on a GPU a group's first call is a collective: its first rank decides.
    """
    if name != "auto" or device_type != "cuda":
        return require(name, device_type)
    group, layer = group_of(group_name), Sizes(group_size(group_name), *sizes)
    if (group, layer) not in _automatic:
        chosen, reason = automatic(device_type, layer) if group is None else _of_first_rank(device_type, layer, group)
        if group is None or group.rank() == 0:
            logging.getLogger(__name__).info('backend "auto" is %s for %s: %s', chosen, layer, reason)
        _automatic[group, layer] = chosen
    return _automatic[group, layer]


@torch.compiler.assume_constant_result
def group_size(group_name: str) -> int:
    """EP, the ranks of the named group; 1 for the empty name. Raises ValueError if there is none of that name."""
    try:
        return _resolve_process_group(GroupName(group_name)).size() if group_name else 1
    except (RuntimeError, TypeError):
        raise ValueError(
            f"mega_moe: no process group is named {group_name!r}; pass one that torch.distributed has made and not "
            "destroyed, or None for experts that are all here"
        ) from None


def automatic(device_type: str, sizes: Sizes | None = None) -> tuple[str, str]:
    """The name that "auto" stands for on this device for layers of these sizes, and the reason for it.

    Raises RuntimeError on a GPU where no fused backend runs: the reference is slow there, so it has to be
    asked for by name.
    """
    if device_type != "cuda":
        return "reference", f"the fused backends need a GPU, the device is {device_type}"
    reasons = {name: unavailable_reason(name, device_type) for name in FUSED}
    able = [name for name, reason in reasons.items() if reason is None]
    if len(able) == len(FUSED):
        return _faster(sizes)
    text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason is not None)
    if able:
        return able[0], text
    raise RuntimeError(
        f'mega_moe: no fused backend runs on this GPU ({text}); set backend = "reference" to train with the slow one'
    )


def _faster(sizes: Sizes | None) -> tuple[str, str]:
    """Of the two that can run: what bench found, else our own kernels."""
    gpu, build = fastest.here()
    try:
        timing = fastest.recall(gpu, build, sizes) if sizes is not None else None
    except ValueError as error:
        return "triton", f"the default: {error}"
    if timing is not None:
        return timing.backend, timing.reason
    return "triton", f"the default: bench has not timed it beside {build} on {gpu} for {sizes or 'these sizes'}"


def _of_first_rank(device_type: str, sizes: Sizes, group: ProcessGroup) -> tuple[str, str]:
    """`automatic` of the group's first rank, for hosts may differ in bench's files and in what is installed.

    A collective. Raises the same RuntimeError on every rank if one of them cannot run that backend.
    """
    try:
        mine: Any = automatic(device_type, sizes)
    except RuntimeError as error:
        mine = (None, str(error))
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (mine, [unavailable_reason(name, device_type) for name in FUSED]), group=group)
    (chosen, reason), _ = everyone[0]
    if chosen is None:
        raise RuntimeError(reason)
    for rank, (_, reasons) in enumerate(everyone):
        if (lacking := reasons[FUSED.index(chosen)]) is not None:
            raise RuntimeError(
                f'mega_moe: backend "auto" is {chosen} on the first rank of the expert-parallel group, and rank {rank} '
                f"of it cannot run that: {lacking}; install the same on every host, or name another backend"
            )
    return chosen, reason
