"""Upstream's parallelization with our layer in the model: refuse what cannot work, shard as upstream does,
allocate the layer's buffers once.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from titan_mega_moe import hosts
from titan_mega_moe.activation_checkpoint import save_op
from titan_mega_moe.op import backends
from titan_mega_moe.routed_experts import MegaRoutedExperts


def parallelize(
    model: nn.Module,
    *,
    upstream: Callable[..., nn.Module],
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    ac_config: ActivationCheckpointing.Config | None,
    **rest: Any,
) -> nn.Module:
    """`upstream` is the model family's own parallelize function; the other arguments are those it takes.

    Raises ValueError or RuntimeError, before any communication, for what cannot work.
    """
    layers = [module for module in model.modules() if isinstance(module, MegaRoutedExperts)]
    tokens = tokens_per_rank(training, parallelism, parallel_dims)
    for layer in layers:
        _check(layer, tokens, training, parallel_dims)
        layer.max_tokens = layer.max_tokens or tokens
    if layers and not layers[0].across_hosts:
        _check_hosts(parallel_dims)
    if layers:
        asked = layers[0].backend  # "auto" on GPUs is settled, and logged, when buffers are allocated
        backend = asked if device_type == "cuda" else backends.require(asked, device_type)
        logger.info(f"mega_moe computes {len(layers)} MoE layers with backend {backend!r}")
    model = upstream(
        model,
        parallel_dims=parallel_dims,
        training=training,
        parallelism=parallelism,
        ac_config=save_op(ac_config),
        **rest,
    )
    # Layers that upstream's plan sharded are prepared already; without EP or TP it does not visit them.
    for layer in layers:
        layer.prepare()
    return model


def tokens_per_rank(training: TrainingConfig, parallelism: ParallelismConfig, parallel_dims: ParallelDims) -> int:
    """The most tokens a rank routes in one forward: its share of a (micro)batch under CP, and under TP with
    EP.

    Without EP, tensor parallelism shards the experts and every rank routes all tokens.
    """
    batch = training.local_batch_size
    if parallel_dims.pp_enabled:
        batch = parallelism.pipeline_parallel_microbatch_size
    shards = parallel_dims.cp * (parallel_dims.tp if parallel_dims.ep_enabled else 1)
    if training.seq_len % shards != 0:
        raise ValueError(
            f"mega_moe: training.seq_len={training.seq_len} does not divide over the {shards} ranks of "
            f"context and tensor parallelism that share a sequence; make it a multiple of {shards}"
        )
    return batch * training.seq_len // shards


def _check_hosts(parallel_dims: ParallelDims) -> None:
    mesh = parallel_dims.get_optional_mesh("ep")
    if mesh is None or dist.get_backend() == "fake":
        return
    if (reason := hosts.crossing_reason(mesh.get_group())) is not None:
        axes = {name: axis.size() for name, axis in parallel_dims.get_all_one_dimensional_meshes().items()}
        raise ValueError(f"mega_moe: {reason}, in the mesh {axes}; {hosts.remedy()}")


def _check(layer: MegaRoutedExperts, tokens: int, training: TrainingConfig, parallel_dims: ParallelDims) -> None:
    if layer.num_experts % parallel_dims.ep != 0:
        raise ValueError(
            f"mega_moe: {layer.num_experts} experts do not divide over "
            f"parallelism.expert_parallel_degree={parallel_dims.ep}"
        )
    if layer.max_tokens is not None and layer.max_tokens < tokens:
        raise ValueError(
            f"mega_moe.max_tokens={layer.max_tokens} is less than the {tokens} tokens a rank routes in one "
            "forward; raise it or leave it out"
        )
    backend = backends.require(layer.backend, device_type)
    if backend == "reference" and device_type == "cuda" and not training.disable_cuda_graphs:
        raise ValueError(
            "mega_moe: the reference backend waits for row counts on the host, which a CUDA graph cannot "
            "capture; set training.disable_cuda_graphs = true"
        )
