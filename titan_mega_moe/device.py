"""What "cuda" and "cpu" mean: training on a GPU, or on the CPU to develop and test without one.

    from titan_mega_moe import device
    device.prepare("cpu")             # first: before anything of torchtitan is imported
    from torchtitan.trainer import Trainer
    ...
    config = Trainer.Config(training=TrainingConfig(disable_cuda_graphs=True, ...), ...)
    if reason := device.refusal_reason(config):   # a setting that only a GPU can honour
        raise ValueError(reason)
    trainer = config.build()          # any number of ranks, on gloo

TorchTitan 0.3 takes the device "cuda" when a machine has no accelerator, and stops at its first use of
it. `prepare("cpu")` changes these seams of it, and nothing else in TorchTitan needs to know:

- `tools.utils.device_type`, `device_module` and `get_local_device`, which the rest imports by value;
- FlexAttention, whose CPU kernel has no backward, computes the same function as scaled dot product
  attention under a dense mask: O(L^2) memory, no parameters, so checkpoints do not differ;
- block masks are built without torch.compile, so that no C++ compiler is needed;
- weights that are sharded over ranks are drawn differently on each, as DTensor does on GPUs alone: else every rank
  would begin with the same experts;
- FSDP reduces with a plain sum, because gloo has no pre-multiplied sum;
- bfloat16 grouped matmuls are computed in float32 and rounded once where the CPU has no bfloat16
  instructions: PyTorch's own loop is about 50 times slower there;
- the barrier that tightens timeouts after the first step names no device, which gloo refuses.

`prepare("cuda")` changes nothing and checks that a GPU is there.
"""

import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

_prepared: str | None = None
# Kernels registered through it last as long as it does.
_ATEN = torch.library.Library("aten", "IMPL")


def prepare(kind: str) -> None:
    """Make TorchTitan run on `kind`, "cuda" or "cpu", in this process.

    Call it before importing torchtitan; calling it again with the same kind does nothing.

    Raises:
        ValueError: `kind` is neither of the two.
        RuntimeError: "cuda" without a visible GPU, a second call with the other kind, or torchtitan
            was imported before the call and has bound another device.
    """
    global _prepared
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"device {kind!r} is not known: use 'cuda' or 'cpu'")
    if _prepared == kind:
        return
    if _prepared is not None:
        raise RuntimeError(f"this process already trains on {_prepared!r}: start another for {kind!r}")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("device 'cuda' needs a GPU and none is visible: use device 'cpu' to train without")
    else:
        _prepare_cpu()
    _prepared = kind


def prepared() -> str | None:
    """The kind this process was prepared for, None before `prepare`."""
    return _prepared


def refusal_reason(config: "Trainer.Config") -> str | None:
    """One sentence with the first setting of `config` that the prepared device cannot honour, or None.

    On "cuda" nothing is refused here. `config.model_spec` may still be None.
    """
    if _prepared != "cpu":
        return None
    # Imported here: prepare() has to come first.
    from torchtitan.components.quantization.utils import has_quantization
    from torchtitan.models.common.attention import VarlenAttention
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

    training, parallelism = config.training, config.parallelism
    refused = [
        (not training.disable_cuda_graphs, "CUDA graphs", "set training.disable_cuda_graphs = true"),
        (training.enable_cpu_offload, "CPU offload", "set training.enable_cpu_offload = false"),
        (
            parallelism.enable_fsdp_symm_mem,
            "symmetric memory",
            "set parallelism.enable_fsdp_symm_mem = false",
        ),
        (
            parallelism.context_parallel_degree > 1,
            f"context parallelism (degree {parallelism.context_parallel_degree})",
            "set parallelism.context_parallel_degree = 1",
        ),
        (
            config.compile.enable_async_tensor_parallel,
            "asynchronous tensor parallelism",
            "set compile.enable_async_tensor_parallel = false",
        ),
        (
            config.profiler.enable_memory_snapshot,
            "memory snapshots",
            "set profiler.enable_memory_snapshot = false",
        ),
        (config.debug.batch_invariant, "batch-invariant mode", "set debug.batch_invariant = false"),
        (config.comm.mode == "torchcomms", "comm.mode 'torchcomms'", 'set comm.mode = "default"'),
        (
            getattr(config.checkpoint, "async_mode", None) == "async_with_pinned_mem",
            "checkpoint.async_mode 'async_with_pinned_mem'",
            'use "async" or "disabled"',
        ),
    ]
    if config.model_spec is not None:
        model = config.model_spec.model
        gpu_only = {
            type(node).__qualname__.split(".")[0]
            for _, node, _, _ in model.traverse(LocalTokenDispatcher.Config)
            if type(node) not in (LocalTokenDispatcher.Config, AllToAllTokenDispatcher.Config)
        }
        refused += [
            (has_quantization(model), "a quantized model", "take the quantization converters out"),
            (any(model.traverse(VarlenAttention.Config)), "attention backend 'varlen'", 'use "flex"'),
            (bool(gpu_only), f"the token dispatcher {', '.join(sorted(gpu_only))}", "use the standard one"),
        ]
    for asked, feature, remedy in refused:
        if asked:
            return f"{feature} needs a GPU and the device is 'cpu': {remedy}"
    return None


class _CpuDevice:
    """The part of the `torch.cuda` module's interface that TorchTitan calls, for the CPU.

    Memory is that of the whole process: `memory_stats` reports its peak resident set since it started,
    in bytes, which cannot be reset.
    """

    set_device = staticmethod(torch.cpu.set_device)
    synchronize = staticmethod(torch.cpu.synchronize)
    is_available = staticmethod(torch.cpu.is_available)

    class Properties:
        name = "CPU"
        total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return _CpuDevice.Properties.name

    @staticmethod
    def get_device_properties(device: Any = None) -> type[Properties]:
        return _CpuDevice.Properties

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "active_bytes.all.peak": kib * 1024,
            "reserved_bytes.all.peak": kib * 1024,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        pass

    @staticmethod
    def empty_cache() -> None:
        pass


def _prepare_cpu() -> None:
    # Modules that have copied the device's name keep the one they saw.
    bound = [name for name in ("torchtitan.distributed.utils", "torchtitan.components.metrics") if name in sys.modules]
    if bound:
        raise RuntimeError(f"device.prepare('cpu') has to run before torchtitan is imported, and {bound[0]} already is")
    from torchtitan.tools import utils

    utils.device_type = "cpu"
    utils.device_module = _CpuDevice
    utils.get_local_device = lambda: torch.device("cpu")
    # A CPU has no entry in TorchTitan's table, which would stand in an A100: infinity makes MFU read 0.
    utils.get_peak_flops = lambda device_name: float("inf")

    from torch.distributed.tensor import _random as random
    from torchtitan.distributed import fsdp
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.models.common import attention

    random._rng_tracker = cast(Any, _ShardedRandom())
    dist_utils.set_pg_timeouts = _set_pg_timeouts
    fsdp.disable_fsdp_gradient_division = _sum_gradients
    attention._compiled_create_block_mask = _block_mask
    attention.FlexAttention.compiled_flex_attn = staticmethod(_dense_attention)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        _ATEN.impl("_grouped_mm", _wide_grouped_mm(), "CPU")


class _ShardedRandom:
    """DTensor's tracker of random state, for CPUs: other numbers on every shard, the same on replicas of one."""

    distribute_region_enabled = True

    @contextmanager
    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        source = generator or torch.default_generator
        seed = int(torch.randint(2**48, (), generator=source))  # the same on all ranks, as their states are
        _, first = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
        index = sum(at * stride for at, stride in zip(first, spec.stride, strict=True))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + index)
            yield

    def _manual_seed(self, parallel_seed: int) -> None:
        torch.manual_seed(parallel_seed)


def _set_pg_timeouts(timeout: Any, parallel_dims: Any) -> None:
    """TorchTitan's function of that name, with a barrier that names no device."""
    torch.distributed.barrier()
    meshes = parallel_dims.get_all_one_dimensional_meshes().values()
    for group in [*(mesh.get_group() for mesh in meshes), None]:
        torch.distributed.set_timeout(timeout, group)


def _sum_gradients(model: torch.nn.Module) -> None:
    """Gradients are summed over ranks and not divided: TorchTitan scales by the global token count."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _wide_grouped_mm() -> Callable[..., torch.Tensor]:
    """`torch._grouped_mm` with a float32 product, rounded to `out_dtype` (by default that of `a`)."""
    kernel = torch.library.get_kernel("aten::_grouped_mm", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def grouped_mm(
        a: torch.Tensor,
        b: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        wide = kernel.call_boxed(keys, a.float(), b.float(), offs, None if bias is None else bias.float(), None)
        return wide.to(out_dtype or a.dtype)

    return grouped_mm


def _dense_attention(
    q_BNLH: torch.Tensor,
    k_BNLH: torch.Tensor,
    v_BNLH: torch.Tensor,
    *,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_aux: Any,
    kernel_options: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """FlexAttention's function for a mask alone: q (B, N, L, H), k and v with N or fewer heads -> like q."""
    if score_mod is not None or return_aux.lse:
        raise NotImplementedError("on the CPU attention takes a mask only: no score_mod, no log-sum-exp epilogue")
    out_BNLH = torch.nn.functional.scaled_dot_product_attention(
        q_BNLH, k_BNLH, v_BNLH, attn_mask=_dense_mask(block_mask), scale=scale, enable_gqa=enable_gqa
    )
    return out_BNLH, None


def _block_mask(*args: Any, **settings: Any) -> Any:
    """FlexAttention's create_block_mask, run eagerly, with the dense mask on it: made in the first layer, it would
    make the others unlike the first to the compiler.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    block_mask = create_block_mask(*args, **settings)
    _dense_mask(block_mask)
    return block_mask


def _dense_mask(block_mask: Any) -> torch.Tensor:
    """`block_mask` as booleans [B, 1 or N, L, L]; kept on it, because every layer of a step shares one."""
    from torch.nn.attention.flex_attention import create_mask

    if not hasattr(block_mask, "dense"):
        B, N, q_len, kv_len = block_mask.shape
        device = block_mask.kv_num_blocks.device
        block_mask.dense = create_mask(block_mask.mask_mod, B, N, q_len, kv_len, device=device)
    return block_mask.dense
