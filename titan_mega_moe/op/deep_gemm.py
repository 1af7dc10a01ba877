"""The deep_gemm backend: hand the layer to an installed DeepGEMM build whose Mega MoE can train.

The build brings the kernels and their symmetric buffer. This file decides whether the build and the GPU will
do, keeps one buffer per shape for all layers, copies a call's inputs into it and lays out weights and
gradients.

Routed experts alone: the build's calls as known take no weights of shared experts, so `num_shared_experts=0` is
what it is always told, and shared experts stay TorchTitan's, beside the layer.

    l1_eGD  gate and up rows of each expert in one tensor, G = 2F: gate then up when the build takes the
            natural layout, else groups of 8 rows in turn (gate 0-7, up 0-7, gate 8-15, ...)
    l2_eDF  w2 as it is

What the layout costs: w1 and w3 are separate parameters, so l1 is a copy of e*2F*D*2 bytes.
- float32 weights: no more than the cast to bf16 that is due anyway: `pack` casts while it places the rows.
- bf16 weights: one read and write of l1 in the forward, and again in the backward unless keep="activations"
  holds it.
- gradients: one copy takes dw1 and dw3 apart. Autograd would otherwise make it, since a strided slice of the
  packed gradient cannot become a parameter's gradient.
"""

import importlib
import inspect
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from titan_mega_moe.op.backends import BufferPlan, Call, Operands, group_of
from titan_mega_moe.op.ranges import phase

# What a build must have to train: each function and the keywords it is called with. Tensors go by position.
FUNCTIONS: dict[str, set[str]] = {
    "get_symm_buffer_for_mega_moe": {"num_shared_experts", "mma_type"},
    "bf16_mega_moe": {"activation_clamp"},
    "bf16_mega_moe_backward": {"activation_clamp", "dw_natural_layout"},
    "set_num_sms": set(),
}
# Compute capability (major) -> name and the CUDA version below which DeepGEMM cannot compile for it.
ARCHITECTURES = {9: ("Hopper", (12, 3)), 10: ("Blackwell", (12, 9))}
DIM_MULTIPLE, HIDDEN_MULTIPLE, INTERLEAVE = 256, 128, 8
REMEDY = 'install a DeepGEMM build with a trainable Mega MoE, or set backend = "triton"'


@dataclass(frozen=True)
class Build:
    """An installed deep_gemm that can train, and what it accepts beyond the minimum."""

    module: ModuleType
    package: str
    natural_l1: bool
    deterministic: bool

    def options(self) -> dict[str, Any]:
        """Keywords of a forward or backward launch that only some builds have."""
        options: dict[str, Any] = {"l1_natural_layout": True} if self.natural_l1 else {}
        if self.deterministic:
            options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        return options


def find_build() -> Build | str:
    """The installed build, or one sentence on why there is none that can train."""
    module = import_module()
    return module if isinstance(module, str) else inspect_build(module)


def import_module() -> ModuleType | str:
    """The installed deep_gemm, or one sentence on why it cannot be imported."""
    try:
        return importlib.import_module("deep_gemm")
    except Exception as error:  # loading its compiled part can fail in any way: the reason is what matters
        if isinstance(error, ModuleNotFoundError) and error.name == "deep_gemm":
            return f"deep_gemm is not installed; {REMEDY}"
        return f"deep_gemm is installed but does not import beside torch {torch.__version__} ({error})"


@lru_cache(maxsize=1)
def inspect_build(module: ModuleType) -> Build | str:
    """What the imported deep_gemm can do, or one sentence on what it lacks."""
    package = package_of(module)
    missing = [name for name in FUNCTIONS if not callable(getattr(module, name, None))]
    if missing:
        return f"{package} has no {' and no '.join(missing)}, so it cannot train; {REMEDY}"
    accepted = {name: _parameters(getattr(module, name)) for name in FUNCTIONS}
    for name, needed in FUNCTIONS.items():
        if lacking := sorted(needed - accepted[name]):
            return f"{name} of {package} does not take {' and '.join(lacking)}; {REMEDY}"
    both = accepted["bf16_mega_moe"] & accepted["bf16_mega_moe_backward"]
    return Build(module, package, "l1_natural_layout" in both, "deterministic" in both)


def package_of(module: ModuleType) -> str:
    """Name and version of the distribution that the imported deep_gemm came from."""
    file = Path(module.__file__ or "")
    for name in metadata.packages_distributions().get("deep_gemm", []):
        if Path(str(metadata.distribution(name).locate_file("deep_gemm"))) in file.parents:
            return f"{name} {metadata.version(name)}"
    return f"deep_gemm {getattr(module, '__version__', 'of unknown version')} at {file}"


def _parameters(function: Any) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except ValueError:  # a compiled function without a signature
        return set()


def device_reason(device: torch.device) -> str | None:
    """One sentence on why no DeepGEMM build runs Mega MoE on the device, or None."""
    if device.type != "cuda":
        return f'it needs a Hopper or Blackwell GPU, the device is {device.type}; set backend = "reference"'
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return f"torch {torch.__version__} finds no CUDA GPU here"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in ARCHITECTURES:
        return (
            f"it needs a Hopper or Blackwell GPU (compute capability 9.0 or 10.x), "
            f'{torch.cuda.get_device_name(device)} has {major}.{minor}; set backend = "reference"'
        )
    architecture, oldest = ARCHITECTURES[major]
    if tuple(map(int, torch.version.cuda.split(".")[:2])) < oldest:
        return (
            f"DeepGEMM needs CUDA {oldest[0]}.{oldest[1]} or newer on {architecture}, "
            f"torch {torch.__version__} was built for {torch.version.cuda}; install a newer torch"
        )
    return None


def shape_reason(dim: int, hidden_dim: int) -> str | None:
    """One sentence on why the kernels do not take experts of these sizes, or None."""
    if dim % DIM_MULTIPLE == 0 and hidden_dim % HIDDEN_MULTIPLE == 0:
        return None
    return (
        f"D={dim} must be a multiple of {DIM_MULTIPLE} and F={hidden_dim} of {HIDDEN_MULTIPLE} "
        'for deep_gemm; set backend = "triton" on Hopper, "reference" elsewhere'
    )


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of the GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _plan_key(plan: BufferPlan) -> tuple:
    group = group_of(plan.group_name) or dist.group.WORLD
    return (group, plan.num_experts, plan.dim, plan.hidden_dim, plan.top_k)


def _launch_sms(plan: BufferPlan) -> int:
    total = sm_count(plan.device)
    if not 0 <= plan.reserved_sms < total or (total - plan.reserved_sms) % 2:
        raise ValueError(
            f"mega_moe: reserved_sms={plan.reserved_sms} of the GPU's {total} SMs does not leave deep_gemm "
            "an even number of at least 2; choose a smaller even number"
        )
    return total - plan.reserved_sms


def pack(w1_eFD: torch.Tensor, w3_eFD: torch.Tensor, natural: bool) -> torch.Tensor:
    """l1_eGD in bf16 from weights of any dtype: each weight is read once, each row written once."""
    e, F, D = w1_eFD.shape
    groups, rows = (1, F) if natural else (F // INTERLEAVE, INTERLEAVE)
    l1_eGD = torch.empty(e, 2 * F, D, dtype=torch.bfloat16, device=w1_eFD.device)
    parts = l1_eGD.view(e, groups, 2, rows, D)
    parts[:, :, 0].copy_(w1_eFD.view(e, groups, rows, D))
    parts[:, :, 1].copy_(w3_eFD.view(e, groups, rows, D))
    return l1_eGD


class DeepGemm:
    """The backend object; its buffers are the process's, as the groups are."""

    name = "deep_gemm"

    def __init__(self) -> None:
        # (group, E, D, F, K) -> the build's buffer, for every layer of that shape.
        self._buffers: dict[tuple[dist.ProcessGroup | None, int, int, int, int], Any] = {}

    def unavailable_reason(self, device: torch.device) -> str | None:
        build = find_build()
        reasons = [build if isinstance(build, str) else None, device_reason(device)]
        # Which build to install is no advice where none would run.
        first, second = reasons if device.type == "cuda" else reversed(reasons)
        return first or second

    def prepare(self, plan: BufferPlan) -> None:
        """Allocate the plan's buffer unless one of its shape holds as many tokens.

        Raises ValueError for sizes that the kernels do not take, RuntimeError without a build or a group.
        """
        build = self._build()
        if reason := shape_reason(plan.dim, plan.hidden_dim):
            raise ValueError(f"mega_moe: {reason}")
        group, key = group_of(plan.group_name), _plan_key(plan)
        held = self._buffers.pop(key, None)
        if held is not None and held.x.shape[0] >= plan.max_tokens:
            self._buffers[key] = held
            return
        if held is not None:
            held.destroy()
        # Before the buffer is made, as its size may follow from the number of SMs. The kernels wait for their
        # whole grid: a collective of FSDP's that holds an SM they count on, and waits for its peers, would be
        # a deadlock.
        build.module.set_num_sms(_launch_sms(plan))
        self._buffers[key] = build.module.get_symm_buffer_for_mega_moe(
            _process_group(group),
            plan.num_experts,
            plan.max_tokens,
            plan.top_k,
            plan.dim,
            plan.hidden_dim,
            num_shared_experts=0,
            mma_type="bf16xbf16",
        )

    def release(self, plan: BufferPlan) -> None:
        if (held := self._buffers.pop(_plan_key(plan), None)) is not None:
            held.destroy()

    def buffer_bytes(self, plan: BufferPlan) -> None:
        """The build alone knows."""

    def check(self, wait: bool) -> None:
        """The build tells nothing."""

    def forward(self, call: Call, operands: Operands) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x_TD, ids_TK, scores_TK, w1_eFD, w2_eDF, w3_eFD = operands
        build = self._build()
        in_range = ((ids_TK >= -1) & (ids_TK < call.num_experts)).all()
        torch._assert_async(in_range, f"mega_moe: an expert id is outside [-1, {call.num_experts})")
        with phase("load"):
            buffer = self._load(call, x_TD, ids_TK, scores_TK, w1_eFD)
        with phase("pack"):
            l1_eGD = pack(w1_eFD, w3_eFD, build.natural_l1)
            l2_eDF = w2_eDF.to(torch.bfloat16).contiguous()
        y_TD = torch.empty_like(x_TD, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
        with phase("kernel"):
            build.module.bf16_mega_moe(y_TD, l1_eGD, l2_eDF, buffer, activation_clamp=None, **build.options())
        saved = [l1_eGD] if call.keep == "activations" else []
        if call.keep == "activations" and w2_eDF.dtype != torch.bfloat16:
            saved.append(l2_eDF)
        return y_TD.to(x_TD.dtype), saved

    def saved_like(self, call: Call, operands: Operands) -> list[torch.Tensor]:
        w1_eFD, w2_eDF = operands.w1_eFD, operands.w2_eDF
        if call.keep != "activations":
            return []
        e, F, D = w1_eFD.shape
        saved = [w1_eFD.new_empty(e, 2 * F, D, dtype=torch.bfloat16)]
        if w2_eDF.dtype != torch.bfloat16:
            saved.append(w2_eDF.new_empty(e, D, F, dtype=torch.bfloat16))
        return saved

    def backward(
        self, call: Call, dy_TD: torch.Tensor, operands: Operands, saved: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        x_TD, ids_TK, scores_TK, w1_eFD, w2_eDF, w3_eFD = operands
        build = self._build()
        F = w1_eFD.shape[1]
        with phase("load"):  # other layers have used the buffer since the forward
            buffer = self._load(call, x_TD, ids_TK, scores_TK, w1_eFD)
        with phase("pack"):
            l1_eGD = saved[0] if saved else pack(w1_eFD, w3_eFD, build.natural_l1)
            l2_eDF = saved[1] if len(saved) > 1 else w2_eDF.to(torch.bfloat16).contiguous()
        dx_TD = torch.empty_like(x_TD, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
        dl1_eGD = torch.empty_like(l1_eGD, dtype=w1_eFD.dtype)
        dw2_eDF = torch.empty_like(l2_eDF, dtype=w2_eDF.dtype)
        dscores_TK = torch.empty(scores_TK.shape, dtype=torch.float32, device=scores_TK.device)
        dy = dy_TD.to(torch.bfloat16).contiguous()
        with phase("kernel"):
            build.module.bf16_mega_moe_backward(
                dx_TD,
                dl1_eGD,
                dw2_eDF,
                dscores_TK,
                dy,
                l1_eGD,
                l2_eDF,
                buffer,
                activation_clamp=None,
                dw_natural_layout=True,
                **build.options(),
            )
        dscores_TK.masked_fill_(ids_TK < 0, 0)  # no build promises to write the slots that have no expert
        dw1_eFD, dw3_eFD = (w.clone(memory_format=torch.contiguous_format) for w in dl1_eGD.split(F, dim=1))
        return dx_TD.to(x_TD.dtype), dscores_TK.to(scores_TK.dtype), dw1_eFD, dw2_eDF, dw3_eFD

    def _build(self) -> Build:
        build = find_build()
        if isinstance(build, str):
            raise RuntimeError(f"mega_moe: backend 'deep_gemm' cannot run: {build}")
        return build

    def _load(
        self,
        call: Call,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        w1_eFD: torch.Tensor,
    ) -> Any:
        """Copy a call's inputs into the buffer of its shape and return the buffer."""
        (T, D), K, F = x_TD.shape, ids_TK.shape[1], w1_eFD.shape[1]
        if call.compute_dtype != torch.bfloat16:
            raise ValueError(
                f'mega_moe: deep_gemm computes in bfloat16, not {call.compute_dtype}; set backend = "reference"'
            )
        if w1_eFD.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"mega_moe: deep_gemm trains bfloat16 or float32 weights, these are {w1_eFD.dtype}; "
                'set backend = "reference"'
            )
        key = (call.group or dist.group.WORLD, call.num_experts, D, F, K)
        if key not in self._buffers:  # on no rank of the group, as prepare is a collective
            most = _largest(call, T, x_TD.device)
            self.prepare(BufferPlan(call.group_name, x_TD.device, most, D, F, call.num_experts, K, call.keep))
        buffer = self._buffers[key]
        capacity = buffer.x.shape[0]
        if capacity < T:
            raise ValueError(
                f"mega_moe: T={T} tokens do not fit the deep_gemm buffer, built for {capacity}; raise max_tokens"
            )
        buffer.x[:T].copy_(x_TD)
        buffer.topk_idx[:T].copy_(ids_TK)
        buffer.topk_weights[:T].copy_(scores_TK)
        return buffer


def _largest(call: Call, T: int, device: torch.device) -> int:
    """The largest T of the group's ranks, at least 1."""
    most = torch.tensor(max(T, 1), device=device)
    if call.group is not None:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=call.group)
    return int(most)


def _process_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The call's group; for EP=1 a new one of this rank alone, as builds always want one."""
    if group is not None:
        return group
    if not dist.is_initialized():
        raise RuntimeError(
            "mega_moe: deep_gemm needs torch.distributed even for one rank; "
            "start with torchrun or call torch.distributed.init_process_group first"
        )
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert isinstance(alone, dist.ProcessGroup)
    return alone


BACKEND = DeepGemm()
