"""What a run takes per GPU, found without GPUs: one training step of a configuration, played on fake tensors.

    plan = make("train_configs/qwen3_30b_a3b.toml", [], world_size=64)
    print(plan.mesh, plan.total)

The model is built by torchtitan's own config, ParallelDims, sharding plan and FSDP, as rank 0 of a group that
does not communicate; its tensors are fake, so memory is counted and not used. Four things are stand-ins:

- attention keeps q, k, v, its output and a float32 per row and head, as its fused kernels do;
- the layer's op keeps what its backend says (`saved_like`), its buffers are what it says (`buffer_bytes`);
- clipping and the optimizer's step add nothing, as with fused or foreach kernels on a GPU;
- nothing is compiled: without activation checkpointing, torch.compile keeps less than is said here.

The CUDA context, NCCL's buffers and what the allocator holds unused come on top.
"""

import dataclasses
import importlib
import logging
import multiprocessing
import signal
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_mega_moe import config, launch

if TYPE_CHECKING:
    import torch
    from torchtitan.distributed import ParallelDims

    from titan_mega_moe.config.run_config import RunConfig
    from titan_mega_moe.op.backends import BufferPlan
    from titan_mega_moe.op.fastest import Sizes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes on rank 0 at the peak of a training step, and what the configuration makes of the ranks."""

    world_size: int
    mesh: dict[str, int]
    """Axis -> ranks along it, those with more than one."""

    device: str
    """"cuda" or "cpu", as the file says."""

    asked: str
    """The file's backend, "auto" and "upstream" among them."""

    backend: str
    """The backend that was planned for; "triton" for "auto" on a GPU."""

    max_tokens: int
    """The most tokens that one rank routes in one forward."""

    sizes: "Sizes | None"
    """Of the first layer that the op computes; None where TorchTitan's own layer does."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None
    """The rest of the peak: activations, gathered parameters, temporaries. None: `unplanned` says why."""

    buffers: int | None
    """What the layers' backend allocates before training. None: only the library it calls knows."""

    unplanned: str | None
    refused: str | None
    """Why `train` would refuse to start on these ranks from this folder, or None."""

    @property
    def total(self) -> int:
        """Bytes of all parts that are known."""
        known = (self.parameters, self.gradients, self.optimizer, self.activations, self.buffers)
        return sum(part or 0 for part in known)


def make(path: str | Path, overrides: list[str], world_size: int | None = None) -> Plan:
    """The plan of a TOML file on `world_size` ranks; None: on as many as its degrees need.

    Works in a process of its own, in which it replaces parts of torchtitan.

    Raises:
        ConfigError: the file or an override is wrong, torchtitan refuses it on so many ranks, or there is not enough
            memory to plan it.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_end_silently) as process:
        try:
            return process.submit(_make, path, overrides, world_size).result()
        except BrokenProcessPool:
            raise config.ConfigError(
                f"{path}: the process that planned it was ended, by a signal or for want of memory: plan fewer ranks"
            ) from None


def _end_silently() -> None:
    """In the process of `make`: end with the one that waits for the plan, and without a word when interrupted."""
    launch.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _make(path: str | Path, overrides: list[str], world_size: int | None) -> Plan:
    from titan_mega_moe import device

    kind = config.device_kind(path, overrides)
    warnings.simplefilter("ignore")  # what a CPU does otherwise than a GPU is of no interest here
    logging.getLogger().setLevel("ERROR")  # nor what torchtitan says of a configuration before it trains
    device.prepare("cpu")
    if kind == "cuda":  # this process trains nothing: what a CPU cannot train is no reason
        device.refusal_reason = lambda config: None
    resolved = config.load(path, overrides)
    if resolved.training.enable_cpu_offload:
        raise config.ConfigError(
            f"{path}: [training] enable_cpu_offload: runs that keep parameters on the host are not planned"
        )
    ranks = world_size or resolved.ranks()
    refused: config.ConfigError | None = None
    try:
        config.check_world(resolved, ranks, path)
    except config.ConfigError as error:
        refused = error
    try:
        return dataclasses.replace(_play(resolved, ranks, kind), refused=str(refused) if refused else None)
    except (AssertionError, ValueError, RuntimeError, NotImplementedError) as error:
        raise refused or config.ConfigError(f"{path}: cannot run on {ranks} ranks: {error}") from error


def _play(config: "RunConfig", ranks: int, kind: str) -> Plan:
    """Build the model as the trainer does, run one step on fake tensors, count."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.tools import utils

    from titan_mega_moe.op.backends import UPSTREAM

    backend = config.mega_moe.backend
    if backend == "auto":
        backend = "triton" if kind == "cuda" else "reference"
    planned = _replace_kernels(backend)
    config.compile.enable = False

    dist.init_process_group("fake", rank=0, world_size=ranks)
    torch.autograd.set_multithreading_enabled(False)  # as the trainer does: recomputation reads thread-local meshes
    dims = ParallelDims.from_config(config.parallelism, ranks)
    dims.build_mesh()
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    spec = config.model_spec
    assert spec is not None
    spec.model.update_from_config(config=config)
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model = spec.model.build()
    loss_fn = config.loss.build(compile_config=config.compile)
    parts = _parallelize(config, model, dims, loss_fn)

    unplanned = None
    if dims.pp_enabled:
        unplanned = "pipeline parallelism: they depend on the schedule"
    elif backend in UPSTREAM:
        unplanned = f'backend "{backend}": its row counts are those of the data'
    with FakeTensorMode(allow_non_fake_inputs=True):
        for part in parts:
            part.to_empty(device="cpu")
            part.train()
        optimizers = _with_states(config, parts)
        parameters = [p for part in parts for p in part.parameters()]
        states = [s for o in optimizers for state in o.state.values() for s in state.values()]
        peak = 0 if unplanned else _peak_of_step(config, dims, parts[0], optimizers, loss_fn)
        persistent = {
            "parameters": _bytes(parameters),
            "gradients": _bytes(parameters),  # sharded gradients have their parameters' dtype
            "optimizer": _bytes(states),
        }
    return Plan(
        world_size=ranks,
        mesh={name: mesh.size() for name, mesh in dims.get_all_one_dimensional_meshes().items()},
        device=kind,
        asked=config.mega_moe.backend,
        backend=backend,
        max_tokens=max((plan.max_tokens for plan in planned), default=0),
        sizes=_sizes(planned[0], dims.ep) if planned else None,
        activations=None if unplanned else peak - sum(persistent.values()),
        buffers=_buffer_bytes(backend, planned),
        unplanned=unplanned,
        refused=None,
        **persistent,
    )


def _replace_kernels(backend: str) -> "list[BufferPlan]":
    """Attention by shape alone, the layer's op as `backend` has it; buffer plans go to the list returned."""
    import torch
    from torchtitan.models.common import attention

    from titan_mega_moe.op import backends, deep_gemm

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = q.new_empty(*q.shape[:-1], v.shape[-1])
            ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
            return out

        @staticmethod
        def backward(ctx: Any, *grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(torch.empty_like(t) for t in ctx.saved_tensors[:3])

    # Sharding plans find the arguments by these names.
    def forward(self: Any, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, **_: Any) -> torch.Tensor:
        return Attention.apply(q_BLNH, k_BLNH, v_BLNH)

    for kernel in (
        attention.FlexAttention,
        attention.ScaledDotProductAttention,
        attention.VarlenAttention,
    ):
        kernel.forward = forward

    planned: list[BufferPlan] = []

    class Recorder:
        @staticmethod
        def prepare(plan: "BufferPlan") -> None:
            reason = deep_gemm.shape_reason(plan.dim, plan.hidden_dim) if backend == "deep_gemm" else None
            if reason is not None:
                raise ValueError(reason)
            planned.append(plan)

    backends.require = backends.choose = lambda *_: backend
    backends.load = lambda name: Recorder()  # type: ignore[assignment,return-value]
    return planned


def _sizes(plan: "BufferPlan", ep_size: int) -> "Sizes":
    from titan_mega_moe.op.fastest import Sizes

    return Sizes(ep_size, plan.num_experts, plan.top_k, plan.dim, plan.hidden_dim)


def _parallelize(config: "RunConfig", model: Any, dims: "ParallelDims", loss_fn: Any) -> list[Any]:
    """This rank's model parts, sharded; the loss knows the output layer, as in the trainer."""
    import torch
    from torchtitan.components.loss import ChunkedLossWrapper

    spec = config.model_spec
    assert spec is not None
    common = {
        "parallel_dims": dims,
        "training": config.training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": config.activation_checkpoint,
        "dump_folder": config.dump_folder,
    }
    if dims.pp_enabled:
        if spec.pipelining_fn is None:
            raise ValueError(f"{spec.name} does not support pipeline parallelism")
        _, parts, _, _ = spec.pipelining_fn(
            model,
            device=torch.device("cpu"),
            model_config=spec.model,
            parallelize_fn=spec.parallelize_fn,
            loss_fn=loss_fn,
            **common,
        )
        return parts
    model = spec.parallelize_fn(model, **common)
    if isinstance(loss_fn, ChunkedLossWrapper):
        loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    return [model]


def _with_states(config: "RunConfig", parts: list[Any]) -> list[Any]:
    """The optimizers, with the states that their first step makes."""
    import torch

    # What Adam and AdamW compute is of no interest either, and takes DTensor seconds for each group of parameters.
    importlib.import_module("torch.optim.adam").adam = lambda *_, **__: None  # type: ignore[attr-defined]
    container = config.optimizer.build(model_parts=parts)
    for part in parts:
        for p in part.parameters():
            p.grad = torch.empty_like(p)
    container.step()
    container.zero_grad(set_to_none=config.training.disable_cuda_graphs)
    return list(container.optimizers)


def _peak_of_step(config: "RunConfig", dims: "ParallelDims", model: Any, optimizers: list[Any], loss_fn: Any) -> int:
    """Bytes at the peak of forward and backward."""
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker
    from torchtitan.distributed import full_dtensor
    from torchtitan.distributed import utils as dist_utils

    class StepMemory(MemTracker):
        """Its numbers per module fail for a module that runs twice, as the output layer does: total alone."""

        def _ignore(self, *_: Any) -> None:
            pass

        _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _ignore  # type: ignore[assignment]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # More than half of all calls ask a fake tensor for its device, and allocate nothing.
            if func is torch.ops.prim.device.default:
                return func(*args)
            return super().__torch_dispatch__(func, types, args, kwargs)

    shape = (config.training.local_batch_size, config.training.seq_len // dims.cp)
    inputs, labels = torch.zeros(2, *shape, dtype=torch.int64).unbind()
    if config.parallelism.spmd_backend == "full_dtensor":
        inputs, labels, _ = full_dtensor.parallelize_inputs(dims, inputs, labels, {})
    memory = StepMemory()
    memory.track_external(model, *optimizers, inputs, labels)
    with memory, dist_utils.get_spmd_context(parallel_dims=dims)():
        loss, _ = loss_fn(model(inputs), labels, torch.tensor(labels.numel()))
        loss.backward()
    (by_kind,) = memory.get_tracker_snapshot("peak").values()
    return by_kind["Total"]


def _bytes(tensors: "Iterable[torch.Tensor]") -> int:
    from torch.distributed.tensor import DTensor

    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def _buffer_bytes(backend: str, planned: "list[BufferPlan]") -> int | None:
    from titan_mega_moe.op.library import load  # backends.load records here

    if not planned:
        return 0
    sizes = [load(backend).buffer_bytes(plan) for plan in set(planned)]
    return None if None in sizes else sum(size or 0 for size in sizes)
