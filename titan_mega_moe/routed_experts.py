"""MegaRoutedExperts: TorchTitan's RoutedExperts with dispatch, experts and combine as one op.

The one file that knows upstream's MoE internals. The router, the shared experts, the expert counts and the
load-balancing bias stay upstream's; so do the parameters (`inner_experts` and its three names), and with them
checkpoints, Hugging Face adapters, FSDP placement and sharding plans.

Shape suffixes: B batch, L sequence, and those of titan_mega_moe.op.
"""

from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import spmd_types as spmd
import torch
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.tools.utils import device_module, device_type

from titan_mega_moe import op
from titan_mega_moe.op import backends

MOST_SMS = 160  # of any GPU, a B200's; deep_gemm asks its own how many it has
COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class MegaMoEOptions:
    """How the layer runs; the `[mega_moe]` section of a TOML and the keyword arguments of the override.

    Raises ValueError for a value that is not one of those allowed.
    """

    backend: str = "auto"
    """"auto", "triton", "deep_gemm", "reference"; or of backends.UPSTREAM, which replaces nothing."""

    compute_dtype: str = "bfloat16"
    """What x and the weights are cast to on entry: "bfloat16", as upstream does, or "float32"."""

    keep: str = "activations"
    """What the forward leaves for the backward: "activations" (fastest) or "inputs" (least memory)."""

    max_tokens: int | None = None
    """The most tokens one rank routes in one forward; None: what the training configuration gives."""

    reserved_sms: int = 16
    """Multiprocessors of the GPU that deep_gemm leaves to FSDP's collectives."""

    across_hosts: bool = False
    """Allow an expert-parallel group on several hosts, where one NVLink domain spans them."""

    def __post_init__(self) -> None:
        allowed = {
            "backend": (*backends.NAMES, *backends.UPSTREAM),
            "compute_dtype": tuple(COMPUTE_DTYPES),
            "keep": backends.KEEP,
        }
        for name, values in allowed.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"mega_moe.{name} is {value!r}; it must be one of {', '.join(values)}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"mega_moe.max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.reserved_sms <= MOST_SMS:
            raise ValueError(f"mega_moe.reserved_sms is {self.reserved_sms}; it must be from 0 to {MOST_SMS}")


class MegaRoutedExperts(Module):
    """Routed experts as one collective op; takes the place of upstream's RoutedExperts under MoE."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        inner_experts: GroupedExperts.Config
        num_experts: int
        top_k: int
        backend: str
        compute_dtype: str
        keep: str
        max_tokens: int | None
        reserved_sms: int
        across_hosts: bool
        # Upstream's update_from_config looks at every layer's dispatcher; this layer has none.
        token_dispatcher: None = None

    def __init__(self, config: Config):
        super().__init__()
        self.inner_experts = config.inner_experts.build()
        self.num_experts = config.num_experts
        self.top_k = config.top_k
        self.backend = config.backend
        self.compute_dtype = COMPUTE_DTYPES[config.compute_dtype]
        self.keep = config.keep
        self.max_tokens = config.max_tokens
        self.reserved_sms = config.reserved_sms
        self.across_hosts = config.across_hosts
        self.dim = config.inner_experts.dim
        self.hidden_dim = config.inner_experts.hidden_dim
        self.group_name = ""
        backends.check_before_optimizers()
        self.register_state_dict_pre_hook(_check_before_save)

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """(B, L, D) local tokens -> (B, L, D) in x's dtype. The op counts for itself."""
        del num_local_tokens_per_expert_E
        if not spmd.is_type_checking():
            return self._run(x_BLD, topk_scores_BLK, topk_expert_ids_BLK)
        # To the type checker the op is one local computation whose result is laid out like x.
        with spmd.no_typecheck():
            y_BLD = self._run(x_BLD, topk_scores_BLK, topk_expert_ids_BLK)
        spmd.assert_type_like(y_BLD, x_BLD)
        return y_BLD

    def _run(self, x_BLD: torch.Tensor, scores_BLK: torch.Tensor, ids_BLK: torch.Tensor) -> torch.Tensor:
        B, L, D = x_BLD.shape
        K = ids_BLK.shape[2]
        experts = self.inner_experts
        y_TD = op.mega_moe(
            x_BLD.reshape(B * L, D),
            ids_BLK.reshape(B * L, K),
            # float32 except on the CPU, whose autocast leaves the router in its weights' dtype.
            scores_BLK.reshape(B * L, K).to(torch.promote_types(scores_BLK.dtype, torch.float32)),
            _local(experts.w1_EFD),
            _local(experts.w2_EDF),
            _local(experts.w3_EFD),
            num_experts=self.num_experts,
            group=self.group_name,
            backend=self.backend,
            compute_dtype=self.compute_dtype,
            keep=self.keep,
        )
        return y_TD.view(B, L, D)

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Shard the experts by upstream's plan, learn the expert-parallel group, allocate its buffers."""
        super().parallelize(parallel_dims)
        ep_mesh = parallel_dims.get_optional_mesh("ep")
        if ep_mesh is not None:
            self.group_name = ep_mesh.get_group().group_name
        # Without expert parallelism, tensor parallelism shards F.
        self.hidden_dim = _local(self.inner_experts.w1_EFD).shape[1]
        if self.max_tokens is not None:
            self.prepare()

    def prepare(self) -> None:
        """Allocate the backend's buffers, once per group and shape. A collective over the group."""
        assert self.max_tokens is not None
        plan = backends.BufferPlan(
            group_name=self.group_name,
            device=torch.device(device_type, device_module.current_device()),
            max_tokens=self.max_tokens,
            dim=self.dim,
            hidden_dim=self.hidden_dim,
            num_experts=self.num_experts,
            top_k=self.top_k,
            keep=self.keep,
            reserved_sms=self.reserved_sms,
        )
        sizes = (plan.num_experts, plan.top_k, plan.dim, plan.hidden_dim)
        backends.load(backends.choose(self.backend, device_type, plan.group_name, *sizes)).prepare(plan)


def _check_before_save(*_: Any) -> None:
    """Whoever saves the layer asks for its weights: let kernels end first, and raise if one gave up."""
    backends.check(wait=True)


def _local(w: torch.Tensor) -> torch.Tensor:
    return w.to_local() if isinstance(w, DTensor) else w


def layer_sizes(spec: ModelSpec, ep_size: int) -> backends.Sizes:
    """Of the first layer with experts in a model's configuration, ours or TorchTitan's."""
    ours, theirs = (spec.traverse(c) for c in (MegaRoutedExperts.Config, RoutedExperts.Config))
    node: Any = next(node for _, node, _, _ in chain(ours, theirs))
    experts, owner = node.inner_experts, node.token_dispatcher or node
    return backends.Sizes(ep_size, experts.num_experts, owner.top_k, experts.dim, experts.hidden_dim)


def refusal_reason(config: RoutedExperts.Config) -> str | None:
    """Why the layer cannot stand in for this node, or None."""
    experts = config.inner_experts
    if type(experts) is GroupedExperts.Config:
        return None
    return (
        f"its experts are {type(experts).__qualname__.removesuffix('.Config')}, "
        "and the layer computes only TorchTitan's GroupedExperts: SwiGLU without bias, clamp or quantization"
    )


def replace_routed_experts(config: RoutedExperts.Config, options: MegaMoEOptions) -> MegaRoutedExperts.Config:
    """The node that takes the place of `config`, with its experts and sharding; ValueError if none can."""
    if (reason := refusal_reason(config)) is not None:
        raise ValueError(f"mega_moe cannot replace {type(config).__qualname__}: {reason}")
    return derive(
        config,
        MegaRoutedExperts.Config,
        num_experts=config.inner_experts.num_experts,
        top_k=config.token_dispatcher.top_k,
        token_dispatcher=None,
        **asdict(options),
    )


@override(target=RoutedExperts.Config, description="Dispatch, experts and combine as one fused op.")
def mega_moe(config: RoutedExperts.Config, **options: object) -> MegaRoutedExperts.Config:
    """Switch the layer on in any config registry:

        --override.imports titan_mega_moe.routed_experts.mega_moe
        --override.imports 'titan_mega_moe.routed_experts.mega_moe={"keep": "inputs"}'

    The options in JSON are those of MegaMoEOptions.
    """
    return replace_routed_experts(config, MegaMoEOptions(**options))  # type: ignore[arg-type]
