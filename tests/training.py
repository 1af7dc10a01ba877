"""Short trainings with torchtitan's own Trainer, to compare our layer with upstream's on the same ranks."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor, debug
from torchtitan import trainer as upstream_trainer
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from titan_mega_moe.models import model_spec
from titan_mega_moe.routed_experts import MegaMoEOptions


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str):
        super().__init__()

    def encode(self, *args, **kwargs):
        raise NotImplementedError

    decode = get_vocab_size = encode


class Ramps(BaseDataLoader):
    """Learnable, endless, different on every data-parallel rank: tokens that count up from a random start."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        lengths: tuple[tuple[int, ...], ...] = ()
        """Tokens of a sequence in each step, by data-parallel rank; by default training.seq_len in all."""

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any):
        self.shape = (local_batch_size, seq_len)
        self.lengths = [step[dp_rank] for step in config.lengths]
        self.key = f"generator_{dp_rank}"
        self.generator = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        B, longest = self.shape
        for L in chain(self.lengths, repeat(longest)):
            start, pace = torch.randint(0, 500, (2, B, 1), generator=self.generator)
            text = (start + (1 + pace % 3) * torch.arange(L + 1)) % 500
            yield {"input": text[:, :-1], "positions": torch.arange(L).expand(B, L)}, text[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {self.key: self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state[self.key])


class Slices(Ramps):
    """The same, but of one global batch, whatever the number of ranks: a run can go on with another."""

    @dataclass(kw_only=True, slots=True)
    class Config(Ramps.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_):
        super().__init__(config, dp_rank=0, seq_len=seq_len, local_batch_size=local_batch_size * dp_world_size)
        self.rows = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for inputs, labels in super().__iter__():
            yield {name: rows[self.rows] for name, rows in inputs.items()}, labels[self.rows]


@dataclass(frozen=True)
class Run:
    """One training. `precision` is that of the experts' arithmetic, `params` of the parameters in use."""

    name: str = "qwen3"
    flavor: str = "debugmodel_moe"
    backend: str = "reference"
    precision: str = "float32"
    params: str = "float32"
    steps: int = 30
    layers: int = 2
    hidden_dim: int | None = None  # narrower experts, where the flavor's own take too long
    parallelism: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    ac: ActivationCheckpointing.Config | None = None
    debug: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    compile: str = ""  # torch.compile's backend for the blocks; "": none
    lengths: tuple[tuple[int, ...], ...] = ()  # see Ramps


@dataclass
class Result:
    losses: list[float]
    grad_norms: list[float]
    grads: dict[str, torch.Tensor]  # of step 1, this rank's shards
    expert_bias: list[torch.Tensor]
    expert_counts: list[torch.Tensor]  # (layers, experts) of each step, as this rank's forwards left them
    graphs: list[int]  # that torch.compile has made until the end of each step, since it was reset


def spec(run: Run) -> ModelSpec:
    options = MegaMoEOptions(backend=run.backend, compute_dtype=run.precision, **run.options)
    result = model_spec(run.name, run.flavor, layers=run.layers, options=options)
    if run.hidden_dim is not None:
        for _, experts, _, _ in result.model.traverse(GroupedExperts.Config):
            experts.hidden_dim = run.hidden_dim
    return result


def config(run: Run, folder: str) -> Trainer.Config:
    return Trainer.Config(
        model_spec=spec(run),
        dump_folder=folder,
        hf_assets_path=folder,
        tokenizer=NoTokenizer.Config(),
        dataloader=Ramps.Config(lengths=run.lengths),
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        metrics=MetricsProcessor.Config(log_freq=1),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            **{
                "local_batch_size": 1,
                "seq_len": 32,
                "steps": run.steps,
                "max_norm": 1e9,
                "disable_cuda_graphs": True,
                "mixed_precision_param": run.params,
                **run.training,
            }
        ),
        parallelism=ParallelismConfig(**run.parallelism),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=run.ac,
        compile=CompileConfig(enable=bool(run.compile), components=["model"], backend=run.compile or "inductor"),
        debug=DebugConfig(seed=1, **run.debug),
    )


def train(run: Run) -> Result:
    """On every rank of the default group."""
    with tempfile.TemporaryDirectory() as folder, upstream_casts(run.precision == "bfloat16"):
        return record(config(run, folder))


def record(settings: Trainer.Config, cls: type[Trainer] | None = None) -> Result:
    """Build, train until the configured number of steps, close; `cls`: another class than TorchTitan's."""
    # The cache knows meshes by value, FSDP by identity: a second training must not get the first one's.
    debug._clear_sharding_prop_cache()
    trainer = settings.build() if cls is None else cls(settings)
    losses: list[float] = []
    norms: list[float] = []
    grads: dict[str, torch.Tensor] = {}
    counts: list[torch.Tensor] = []
    graphs: list[int] = []

    write = trainer.metrics_processor.log

    def log(step: int, average: float, largest: float, norm: float, **rest: Any) -> None:
        losses.append(average)
        norms.append(norm)
        graphs.append(counters["stats"]["unique_graphs"])
        write(step, average, largest, norm, **rest)

    def buffers(kind: str) -> list[torch.Tensor]:
        return [b for part in trainer.model_parts for name, b in part.named_buffers() if kind in name]

    step = trainer.optimizers.step

    def keep_first(*args: Any) -> None:
        if not grads:
            for part in trainer.model_parts:
                for name, p in part.named_parameters():
                    grads[name.replace("_checkpoint_wrapped_module.", "")] = local(p.grad).clone()
        counts.append(torch.stack([local(b) for b in buffers("tokens_per_expert")]))
        step(*args)

    # Upstream's rank 0 sleeps two seconds after its last step.
    upstream_trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
    trainer.metrics_processor.log = log
    trainer.optimizers.step = keep_first
    trainer.train()
    trainer.close()
    return Result(losses, norms, grads, [local(b) for b in buffers("expert_bias")], counts, graphs)


def local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


@contextmanager
def upstream_casts(on: bool) -> Iterator[None]:
    """Upstream's experts call `.bfloat16()` on what they multiply; off: they compute as they are given."""
    cast = torch.Tensor.bfloat16
    if not on:
        torch.Tensor.bfloat16 = lambda self: self
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = cast


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = torch.linalg.vector_norm(actual.double() - expected.double()).item()
    return difference / (torch.linalg.vector_norm(expected.double()).item() or 1.0)


def upstream(run: Run) -> Run:
    return replace(run, backend="upstream")
