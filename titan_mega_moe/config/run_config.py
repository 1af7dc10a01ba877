"""RunConfig: torchtitan's Trainer.Config with the sections a TOML needs beside it."""

from dataclasses import dataclass, field
from typing import Literal

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.components.optimizer import OptimizersContainer, default_adamw
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.trainer import Trainer

from titan_mega_moe.metrics import RecordedMetrics
from titan_mega_moe.routed_experts import MegaMoEOptions


@dataclass(kw_only=True, slots=True)
class ModelSection:
    """Which of torchtitan's models to train."""

    name: str
    """Model family, e.g. "qwen3" or "deepseek_v3"."""

    flavor: str
    """Size within the family, e.g. "30B-A3B"."""

    attn_backend: str | None = None
    """torchtitan's attention backend, e.g. "flex" or "varlen"; None takes the family's default."""

    layers: int | None = None
    """Keep only the first layers, for a cut-down run; None keeps all."""


@dataclass(kw_only=True, slots=True)
class DeviceSection:
    """Where to train."""

    kind: Literal["cuda", "cpu"] = "cuda"
    """"cuda" trains on GPUs with NCCL, "cpu" on the CPU with gloo, to develop without a GPU."""

    ranks: int | None = None
    """
    Processes that `train` starts when it does not run under torchrun. None starts one per visible GPU; on the
    CPU, the fewest that hold the degrees of [parallelism].
    """


@dataclass(kw_only=True, slots=True)
class RunConfig(Trainer.Config):
    """A Trainer.Config that remembers which model, layer options and device it was made from.

    Three of torchtitan's defaults cannot train (no parameter groups, the abstract loss and dataloader); here
    they are what its own language model configurations use.
    """

    model: ModelSection
    mega_moe: MegaMoEOptions = field(default_factory=MegaMoEOptions)
    device: DeviceSection = field(default_factory=DeviceSection)
    metrics: RecordedMetrics.Config = field(default_factory=RecordedMetrics.Config)
    dataloader: BaseDataLoader.Config = field(default_factory=HuggingFaceTextDataLoader.Config)
    optimizer: OptimizersContainer.Config = field(default_factory=default_adamw)
    loss: BaseLoss.Config = field(default_factory=ChunkedLossWrapper.Config)

    def ranks(self) -> int:
        """Processes to start: [device] ranks, else the fewest that hold the degrees of [parallelism]."""
        p = self.parallelism
        inner = p.context_parallel_degree * p.tensor_parallel_degree
        shard = p.data_parallel_shard_degree
        if shard == -1:
            shard = -(-p.expert_parallel_degree // inner)
        needed = p.data_parallel_replicate_degree * shard * inner * p.pipeline_parallel_degree
        return self.device.ranks or needed
