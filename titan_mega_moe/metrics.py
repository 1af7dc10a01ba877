"""TorchTitan's metrics, and beside them raw records: what every table of `compare` is computed from."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.distributed.tensor import DTensor
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor

from titan_mega_moe import traces

FOLDER = "records"


class RecordLogger(BaseLogger):
    """Appends one JSON object a logged step to `file`: `step` and all of TorchTitan's metrics of that rank.

    Each line is flushed, so a reader can follow a run. A resumed run appends: the last line of a step counts.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lines = file.open("a")

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self._lines.write(json.dumps({"step": step, **metrics}) + os.linesep)
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()


class RecordedMetrics(MetricsProcessor):
    """A MetricsProcessor that also logs how evenly tokens fall on experts, as `moe/...`, and whose every rank writes
    `<dump_folder>/records/rank_N.jsonl`.

    Of each step that is logged, over all layers and of each: tokens of the busiest expert over the mean; and of
    the rank with the most, if each rank of an expert-parallel group has the next E / EP experts, also how many (a token
    counts once for each of its experts; a mean over the groups), beside those of a rank on average. Of a step that
    TorchTitan's profiler recorded, what percent of its time dispatch, experts and combine took.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        gradient_steps: int = 0
        """In the first so many steps each rank also records the norm of every parameter's gradient, see gradients()"""

        routing_step: int = 0
        """Of this step, save the expert ids of the first layer with experts as routing_step_N.pt in dump_folder: int64,
        (ranks, tokens, K), for `bench --routing file:PATH`. Not of layers that are compiled or in a CUDA graph."""

    def __init__(self, config: Config, *, dump_folder: str = "./outputs", **kwargs: Any) -> None:
        super().__init__(config, dump_folder=dump_folder, **kwargs)
        self._record = RecordLogger(Path(dump_folder) / FOLDER / f"rank_{torch.distributed.get_rank()}.jsonl")
        self.logger: BaseLogger = _both(self.logger, self._record)
        self._gradient_steps, self._routing_step = config.gradient_steps, config.routing_step
        self._routing_file = Path(dump_folder) / f"routing_step_{config.routing_step}.pt"
        self._ids_TK: torch.Tensor | None = None
        self._seen_LE: torch.Tensor | None = None
        self._counts_LE: torch.Tensor | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "model_parts" and value is not None:  # TorchTitan sets the optimizers just before
            self._watch()

    def _watch(self) -> None:
        """Read TorchTitan's counts before every optimizer step, ahead of its load balancing, which zeroes them."""
        if _moe_blocks(self.model_parts) and self.optimizers is not None:
            handle = self.optimizers.register_step_pre_hook(lambda *_: self._count())
            hooks: Any = self.optimizers._optimizer_step_pre_hooks
            hooks.move_to_end(handle.id, last=False)
            if self._routing_step > 0:
                first = next(iter(_moe_blocks(self.model_parts).values()))
                first.moe.routed_experts.register_forward_pre_hook(self._keep_ids)

    def _keep_ids(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and not torch.compiler.is_compiling():
            self._ids_TK = _local(args[2]).detach().flatten(0, -2)

    def _save_routing(self) -> None:
        if self._ids_TK is None:
            raise RuntimeError(
                "metrics.routing_step: no expert ids were seen; set compile.enable = false and "
                "training.disable_cuda_graphs = true to record them"
            )
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, self._ids_TK.cpu())
        if torch.distributed.get_rank() == 0:
            torch.save(torch.stack(everyone).long(), self._routing_file)

    def _count(self) -> None:
        blocks = _moe_blocks(self.model_parts).values()
        moes = [block.moe for block in blocks]
        totals_LE = torch.stack([_local(moe.tokens_per_expert_E) for moe in moes])
        # TorchTitan counts once more when it runs a checkpointed block again.
        times = [2 if getattr(block, "checkpoint_impl", None) is CheckpointImpl.NO_REENTRANT else 1 for block in blocks]
        if max(times) > 1:
            totals_LE = totals_LE / totals_LE.new_tensor(times).unsqueeze(1)
        self._counts_LE = totals_LE if self._seen_LE is None else totals_LE - self._seen_LE
        if moes[0].load_balance_coeff is None:
            self._seen_LE = totals_LE  # nobody zeroes them

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        load = self._load() if self._counts_LE is not None else {}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, {**load, **(extra_metrics or {})})
        if 0 < step == self._routing_step:
            self._save_routing()
        if step <= self._gradient_steps and self.model_parts is not None:
            self._record.log({"gradients": gradients(self.model_parts)}, step)

    def log_share(self, trace: str) -> None:
        """Of the trace that TorchTitan's profiler wrote to `trace`."""
        split = traces.time_split(Path(trace))
        step = traces.step_of(Path(trace))
        if split is not None and step is not None and _moe_blocks(self.model_parts):
            share = sum(split.get(name, 0.0) for name in ("dispatch", "experts", "combine"))
            self.logger.log({"moe/share_of_step(%)": share}, step)

    def _load(self) -> dict[str, float]:
        """The metrics of the last optimizer step. A collective over the ranks that share the loss."""
        assert self._counts_LE is not None
        counts_LE = self._counts_LE.clone()
        ranks = 1
        # With EP each rank of a tensor-parallel group routes its part of the sequence.
        for name in ("loss", "tp") if self.parallel_dims.ep_enabled else ("loss",):
            mesh = self.parallel_dims.get_optional_mesh(name)
            if mesh is not None:
                torch.distributed.all_reduce(counts_LE, group=mesh.get_group())
                ranks *= mesh.size()
        ranks_LP = counts_LE.unflatten(1, (self.parallel_dims.ep, -1)).sum(2)
        tokens_LP = ranks_LP * (self.parallel_dims.ep / ranks)
        # One tensor, as each that the host reads is waited for.
        of_layers = [_over_mean(counts_LE), _over_mean(ranks_LP), tokens_LP.max(1).values, tokens_LP.mean(1)]
        by_layer, by_rank, most, mean = torch.stack(of_layers).tolist()
        layers = _moe_blocks(self.model_parts)
        return {
            "moe/expert_load(max/mean)": max(by_layer),
            "moe/rank_load(max/mean)": max(by_rank),
            "moe/rank_tokens(max)": max(most),
            "moe/rank_tokens(mean)": sum(mean) / len(mean),
            **{f"moe/layer_{name}/expert_load(max/mean)": x for name, x in zip(layers, by_layer, strict=True)},
        }


def _moe_blocks(model_parts: list[torch.nn.Module] | None) -> dict[str, Any]:
    """Transformer blocks with experts, by the name of the layer."""
    return {
        name: block
        for part in model_parts or []
        for name, block in part.get_submodule("layers").named_children()
        if getattr(block, "moe_enabled", False)
    }


def _local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _over_mean(counts_LN: torch.Tensor) -> torch.Tensor:
    return counts_LN.max(1).values / counts_LN.mean(1).clamp(min=1e-9)


@torch.no_grad()
def gradients(model_parts: list[torch.nn.Module]) -> dict[str, list[float]]:
    """Of each parameter's gradient, whole: its norm, and its sums over even and over odd elements.

    The sums tell two gradients of one norm apart. A collective over the ranks that a parameter is sharded on.
    """
    found = {}
    for part in model_parts:
        for name, parameter in part.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                flat = grad.flatten().float()
                values = torch.stack([torch.linalg.vector_norm(flat), flat[::2].sum(), flat[1::2].sum()])
                found[clean_name(name)] = values.tolist()
    return found


def clean_name(name: str) -> str:
    """A parameter's name without what compilation and checkpointing wrap around modules."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _both(*loggers: BaseLogger) -> LoggerContainer:
    container = LoggerContainer()
    for logger in loggers:
        container.add_logger(logger)
    return container
