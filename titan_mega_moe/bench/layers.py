"""What is benchmarked: a layer's inputs, and the layers that take them.

Shape suffixes as in titan_mega_moe.op; P: T with the tokens that upstream's layers need added.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from titan_mega_moe.bench.routing import Place, Routing
from titan_mega_moe.op import backends, mega_moe

TENSORS = ("out", "dx", "dscores", "dw1", "dw2", "dw3")
DISPATCHERS = ("alltoall", "minimal_async_ep", "deepep")


@dataclass(frozen=True)
class Shape:
    """T is the most tokens of a rank; E experts of all ranks, K experts per token."""

    T: int
    D: int
    F: int
    E: int
    K: int

    def __str__(self) -> str:
        return f"{self.T}x{self.D}x{self.F} E={self.E} K={self.K}"


@dataclass
class Inputs:
    """One rank's arguments of the layer, bf16 and float32 leaves, and the gradient of its output."""

    shape: Shape
    routing: Routing
    group: ProcessGroup | None
    x_TD: torch.Tensor
    ids_TK: torch.Tensor
    scores_TK: torch.Tensor
    w1_eFD: torch.Tensor
    w2_eDF: torch.Tensor
    w3_eFD: torch.Tensor
    dy_TD: torch.Tensor

    def leaves(self) -> list[torch.Tensor]:
        return [self.x_TD, self.scores_TK, self.w1_eFD, self.w2_eDF, self.w3_eFD]


def ranks_of(group: ProcessGroup | None) -> tuple[int, int]:
    """(rank, EP)."""
    return (0, 1) if group is None else (group.rank(), group.size())


def make_inputs(shape: Shape, routing: Routing, group: ProcessGroup | None, device: torch.device, seed: int) -> Inputs:
    """Random inputs, other ones for every rank and seed."""
    rank, ep = ranks_of(group)
    T, D, F, E, K = routing.tokens(shape.T, ep, rank), shape.D, shape.F, shape.E, shape.K
    g = torch.Generator(device).manual_seed(1_000_003 * seed + rank)

    def normal(*size: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=g, device=device) * std).bfloat16()

    def weight(*size: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(normal(*size, std=size[-1] ** -0.5))

    scores_TK = torch.rand(T, K, generator=g, device=device)
    return Inputs(
        shape=shape,
        routing=routing,
        group=group,
        x_TD=normal(T, D).requires_grad_(),
        ids_TK=routing.ids(Place(T, E, K, ep, rank), g),
        scores_TK=(scores_TK / scores_TK.sum(1, keepdim=True)).requires_grad_(),
        w1_eFD=weight(E // ep, F, D),
        w2_eDF=weight(E // ep, D, F),
        w3_eFD=weight(E // ep, F, D),
        dy_TD=normal(T, D),
    )


@dataclass
class Bound:
    """A layer with its inputs: what `step` and `results` run."""

    forward: Callable[[], torch.Tensor]
    leaves: list[torch.Tensor]
    dy: torch.Tensor
    ids_TK: torch.Tensor

    def step(self) -> tuple[torch.Tensor, ...]:
        """Forward and backward: out, dx, dscores, dw1, dw2, dw3, of as many tokens as the layer was given."""
        y = self.forward()
        return (y.detach(), *torch.autograd.grad(y, self.leaves, self.dy))

    def results(self) -> dict[str, torch.Tensor]:
        """By name, of this rank's tokens alone."""
        T = self.ids_TK.shape[0]
        named = dict(zip(TENSORS, self.step(), strict=True))
        named |= {name: named[name][:T] for name in ("out", "dx", "dscores")}
        # A score without an expert has gradient zero; a layer that cannot leave a slot empty has another.
        return named | {"dscores": named["dscores"].masked_fill(self.ids_TK < 0, 0)}


class Layer(Protocol):
    """One of those that are compared. Methods are called on every rank alike."""

    name: str

    def refusal(self, shape: Shape, routing: Routing, group: ProcessGroup | None) -> str | None:
        """One sentence on why it cannot run that case here, or None."""

    def prepare(self, shape: Shape, group: ProcessGroup | None, device: torch.device) -> None:
        """Allocate for the shape. A collective; ValueError for a shape that it does not take."""

    def buffer_bytes(self) -> int | None:
        """Bytes that `prepare` took on the device; None where only a measurement knows."""

    def bind(self, inputs: Inputs) -> Bound:
        """The layer on these inputs."""

    def release(self) -> None:
        """Give back what `prepare` took, as far as it can be."""


class OpLayer:
    """The op with one backend; name "triton", or "triton:inputs" for keep="inputs"."""

    def __init__(self, name: str, device_type: str):
        self.name = name
        self.backend, _, keep = name.partition(":")
        self.keep = keep or "activations"
        self.device_type = device_type
        self.plan: backends.BufferPlan | None = None

    def refusal(self, shape: Shape, routing: Routing, group: ProcessGroup | None) -> str | None:
        return backends.unavailable_reason(self.backend, self.device_type)

    def prepare(self, shape: Shape, group: ProcessGroup | None, device: torch.device) -> None:
        name = "" if group is None else group.group_name
        self.plan = backends.BufferPlan(name, device, shape.T, shape.D, shape.F, shape.E, shape.K, self.keep)
        backends.load(self.backend).prepare(self.plan)

    def buffer_bytes(self) -> int | None:
        return None if self.plan is None else backends.load(self.backend).buffer_bytes(self.plan)

    def bind(self, inputs: Inputs) -> Bound:
        def forward() -> torch.Tensor:
            x, scores, w1, w2, w3 = inputs.leaves()
            return mega_moe(
                x, inputs.ids_TK, scores, w1, w2, w3,
                num_experts=inputs.shape.E, group=inputs.group, backend=self.backend, keep=self.keep,
            )  # fmt: skip

        return Bound(forward, inputs.leaves(), inputs.dy_TD, inputs.ids_TK)

    def release(self) -> None:
        if self.plan is not None:
            backends.load(self.backend).release(self.plan)


class UpstreamLayer:
    """TorchTitan's RoutedExperts with one of its dispatchers, called as its MoE does; no FSDP around it.

    Its dispatchers know no empty slot and want equal token counts, so such inputs are padded as upstream pads
    sequences: with tokens and slots of score 0.
    """

    def __init__(self, name: str, device_type: str):
        self.name = name
        self.device_type = device_type
        self.config: Any = None
        self.dispatcher: Any = None

    def refusal(self, shape: Shape, routing: Routing, group: ProcessGroup | None) -> str | None:
        if (reason := upstream_missing()) is not None:
            return reason
        if self.name == "alltoall":
            return None
        if self.device_type != "cuda":
            return f"it needs GPUs, the device is {self.device_type}"
        if group is None:
            return "it needs more than one rank"
        if self.name == "deepep":
            return None if importlib.util.find_spec("deep_ep") else "deep_ep is not installed"
        if routing.kind == "same-expert":
            return "its buffer has room for one row per token and expert"
        return _no_peer_access()

    def prepare(self, shape: Shape, group: ProcessGroup | None, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torchtitan.distributed.utils import set_spmd_backend
        from torchtitan.models.common import token_dispatcher as dispatchers

        set_spmd_backend("partial_dtensor")  # plain tensors in, plain tensors out
        ep = ranks_of(group)[1]
        common: dict[str, Any] = {"num_experts": shape.E, "top_k": shape.K}
        # As many more tokens as _padded may add.
        sizes: dict[str, Any] = {"hidden_dim": shape.D, "num_max_tokens_per_rank": shape.T + ep}
        if self.name == "minimal_async_ep":
            config: Any = dispatchers.MinimalAsyncEPTokenDispatcher.Config(
                **common, **sizes, dtype=torch.bfloat16, device=device
            )
        elif self.name == "deepep":
            config = dispatchers.DeepEPTokenDispatcher.Config(**common, **sizes)
        elif group is None:
            config = dispatchers.LocalTokenDispatcher.Config(**common)
        else:
            config = dispatchers.AllToAllTokenDispatcher.Config(**common)
        self.config, self.dispatcher = config, config.build()
        mesh = init_device_mesh(device.type, (ep,), mesh_dim_names=("ep",)) if group is not None else None
        self.dispatcher.wire_meshes(ep_mesh=mesh)

    def buffer_bytes(self) -> int | None:
        return 0 if self.name == "alltoall" else None

    def bind(self, inputs: Inputs) -> Bound:
        from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

        padded = _padded(inputs)
        e, F, D = inputs.w1_eFD.shape
        with torch.device("meta"):  # the weights come with the inputs
            module = RoutedExperts.Config(
                inner_experts=GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=e),
                token_dispatcher=self.config,
            ).build()
        module.token_dispatcher = self.dispatcher
        experts = module.inner_experts
        experts.w1_EFD, experts.w2_EDF, experts.w3_EFD = inputs.w1_eFD, inputs.w2_eDF, inputs.w3_eFD
        # TorchTitan's MoE counts for its load statistics, before it calls the layer.
        counts_E = torch.bincount(padded.ids_TK.flatten(), minlength=inputs.shape.E)

        def forward() -> torch.Tensor:
            y_BLD = module(padded.x_TD[None], padded.scores_TK[None], padded.ids_TK[None], counts_E)
            return y_BLD[0]

        return Bound(forward, padded.leaves(), padded.dy_TD, inputs.ids_TK)

    def release(self) -> None:
        self.dispatcher = None
        if self.name == "minimal_async_ep":
            # It keeps one buffer a process and refuses another shape's.
            from torchtitan.distributed.minimal_async_ep import api

            api._buffer_state = api._buffer_key = None


def _padded(inputs: Inputs) -> Inputs:
    """With equal token counts, no empty slot, and a row for every rank; what is added has score 0."""
    T, K, e = inputs.ids_TK.shape[0], inputs.shape.K, inputs.w1_eFD.shape[0]
    rank, ep = ranks_of(inputs.group)
    device = inputs.x_TD.device

    def fill(P: int) -> torch.Tensor:
        slot = torch.arange(P * K, device=device).view(P, K)
        ids_PK = slot % ep * e + (slot // ep + rank) % e
        ids_PK[:T] = torch.where(inputs.ids_TK < 0, ids_PK[:T], inputs.ids_TK)
        return ids_PK

    most = torch.tensor(T, device=device)
    if inputs.group is not None:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=inputs.group)
    ids_PK = fill(int(most))
    rows_EP = torch.bincount(ids_PK.flatten() // e, minlength=ep)
    if inputs.group is not None:
        dist.all_reduce(rows_EP, group=inputs.group)
    # Not every grouped matmul takes an operand without rows: each rank then gets some.
    if int(rows_EP.min()) == 0:
        ids_PK = fill(int(most) + ep)
    P, empty_TK = ids_PK.shape[0], inputs.ids_TK < 0
    if P == T and not bool(empty_TK.any()):
        return inputs

    def grow(t: torch.Tensor) -> torch.Tensor:
        out = t.new_zeros(P, *t.shape[1:])
        out[:T] = t.detach()
        return out.requires_grad_(t.requires_grad)

    return replace(
        inputs,
        x_TD=grow(inputs.x_TD),
        ids_TK=ids_PK,
        scores_TK=grow(inputs.scores_TK.detach().masked_fill(empty_TK, 0)).requires_grad_(),
        dy_TD=grow(inputs.dy_TD),
    )


def upstream_missing() -> str | None:
    """Why TorchTitan's layers cannot be had, or None."""
    try:
        importlib.import_module("torchtitan.models.common.token_dispatcher")
    except (ImportError, AttributeError) as error:  # an older torch lacks names that it reads
        return f"torchtitan does not import beside torch {torch.__version__} ({error})"
    return None


def _no_peer_access() -> str | None:
    here = torch.cuda.current_device()
    peers = [i for i in range(torch.cuda.device_count()) if i != here]
    blocked = [i for i in peers if not torch.cuda.can_device_access_peer(here, i)]
    return f"GPU {here} has no peer access to GPU {blocked[0]}" if blocked else None


def layer(name: str, device_type: str) -> Layer:
    """The layer of that name, see DISPATCHERS and titan_mega_moe.op.backends.NAMES."""
    return (UpstreamLayer if name in DISPATCHERS else OpLayer)(name, device_type)


def exact(inputs: Inputs) -> dict[str, torch.Tensor]:
    """The layer's results in float64, by the reference backend."""
    leaves = [t.detach().double().requires_grad_() for t in inputs.leaves()]

    def forward() -> torch.Tensor:
        x, scores, w1, w2, w3 = leaves
        return mega_moe(
            x, inputs.ids_TK, scores, w1, w2, w3,
            num_experts=inputs.shape.E, group=inputs.group, backend="reference", compute_dtype=torch.float64,
        )  # fmt: skip

    return Bound(forward, leaves, inputs.dy_TD.double(), inputs.ids_TK).results()
