"""Values that have the right type and yet cannot work: what torchtitan would crash on after every rank has
started, or ignore.

`RANGES` holds one rule for a key; the functions hold rules between keys. Each raises KeyProblem with one
sentence.
"""

import copy
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining.schedules import get_schedule_class
from torchtitan.components.checkpointer.base import DATALOADER, LR_SCHEDULER, OPTIMIZER, TRAIN_STATE
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config.override import _resolve_active, _resolve_target
from torchtitan.distributed import ParallelDims, pipeline_parallel
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common import config_utils
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.tools import filesystem

from titan_mega_moe import data
from titan_mega_moe.config import resume, schema
from titan_mega_moe.config.run_config import RunConfig
from titan_mega_moe.config.source import Key, KeyProblem, nearest
from titan_mega_moe.op import backends
from titan_mega_moe.parallelize import tokens_per_rank

Rule = tuple[Callable[[Any], bool], str]


def at_least(least: float, *also: float) -> Rule:
    words = " or ".join([f"at least {least}", *map(str, also)])
    return lambda v: v >= least or v in also, words


def between(low: float, high: float) -> Rule:
    return lambda v: low <= v <= high, f"from {low} to {high}"


def one_of(*names: str) -> Rule:
    return lambda v: v in names, "one of " + ", ".join(map(repr, names))


_SPARE = 8  # times as many tokens as are ever routed that buffers may be made for, so that runs can share a file
POSITIVE: Rule = (lambda v: v > 0, "above 0")
FINITE: Rule = (math.isfinite, "a finite number")

RANGES: dict[str, Rule] = {
    "model.layers": at_least(1),
    "device.ranks": at_least(1),
    "training.local_batch_size": at_least(1),
    "training.global_batch_size": at_least(1, -1),
    "training.seq_len": at_least(1),
    "training.steps": at_least(1),
    "training.max_norm": POSITIVE,
    "training.gc_freq": at_least(1),
    "parallelism.data_parallel_replicate_degree": at_least(1),
    "parallelism.data_parallel_shard_degree": at_least(1, -1),
    "parallelism.tensor_parallel_degree": at_least(1),
    "parallelism.context_parallel_degree": at_least(1),
    "parallelism.pipeline_parallel_degree": at_least(1),
    "parallelism.expert_parallel_degree": at_least(1),
    "parallelism.pipeline_parallel_microbatch_size": at_least(1),
    "parallelism.pipeline_parallel_layers_per_stage": at_least(1),
    "parallelism.pipeline_parallel_first_stage_less_layers": at_least(0),
    "parallelism.pipeline_parallel_last_stage_less_layers": at_least(0),
    "parallelism.context_parallel_load_balancer": one_of("headtail", "ptrr"),
    "lr_scheduler.warmup_steps": at_least(0),
    "lr_scheduler.total_steps": at_least(1),
    "lr_scheduler.decay_ratio": between(0, 1),
    "lr_scheduler.min_lr_factor": between(0, 1),
    "activation_checkpoint.memory_budget": between(0, 1),
    "activation_checkpoint.determinism_check": one_of("default", "none"),
    "checkpoint.load_step": at_least(0, -1),
    # In it TorchTitan's command returns before it trains.
    "comm.mode": (lambda v: v != "local_tensor", "a mode that trains"),
    "comm.init_timeout_seconds": between(1, 2**31),
    "comm.train_timeout_seconds": between(1, 2**31),
    "comm.trace_buf_size": at_least(0),
    "metrics.log_freq": at_least(1),
    "metrics.gradient_steps": at_least(0),
    "metrics.routing_step": at_least(0),
    "profiler.profile_freq": at_least(1),
    "profiler.profiler_active": at_least(1),
    "profiler.profiler_warmup": at_least(0),
    "profiler.profiler_repeat": at_least(0),
    "profiler.profiler_skip_first": at_least(0),
    "profiler.profiler_skip_first_wait": at_least(0),
    "profiler.memory_snapshot_freq": at_least(1),
    "profiler.memory_snapshot_max_entries": at_least(1),
    "validator.freq": at_least(1),
    "validator.steps": at_least(1, -1),
    "debug.seed": between(0, 2**63 - 1),
    "loss.num_chunks": at_least(1),
}
LOADER: dict[str, Rule] = {"num_workers": at_least(0), "prefetch_factor": at_least(1), "weight": POSITIVE}
OPTIMIZER_KWARGS: dict[str, Rule] = {"lr": POSITIVE, "eps": at_least(0), "weight_decay": at_least(0)}


def check(config: RunConfig) -> None:
    """Raise KeyProblem for the first value of `config` that cannot work with any number of ranks."""
    if not config.dump_folder:
        raise KeyProblem(("dump_folder",), "is empty: give the folder that the run shall write to")
    for dotted, rule in RANGES.items():
        held: Any = config
        for name in dotted.split("."):
            held = getattr(held, name, None)
        _apply(rule, held, tuple(dotted.split(".")))
    _check_optimizer(config)
    for key, loader in _loaders(config):
        _check_loader(loader, key)
    _check_loss(config)
    _check_checkpoint(config)
    _check_compile(config)
    _check_metrics(config)
    _check_schedules(config)


def check_world(config: RunConfig, world_size: int) -> None:
    """Raise KeyProblem for the first value that cannot work on `world_size` ranks, or for a missing asset."""
    p, training = config.parallelism, config.training
    try:
        dims = ParallelDims.from_config(p, world_size)
    except AssertionError as error:
        why = str(error) or "data_parallel_replicate * tensor * context * pipeline degree does not divide it"
        raise KeyProblem(("parallelism",), f"does not fit {world_size} ranks: {why}") from None
    sharded = dims.dp_shard * dims.cp * dims.tp
    if sharded % dims.ep:
        text = f"{dims.ep} does not divide data_parallel_shard * context * tensor degree = {sharded}"
        raise KeyProblem(("parallelism", "expert_parallel_degree"), f"{text} on {world_size} ranks")
    batch = training.local_batch_size * dims.dp_replicate * dims.dp_shard
    if training.global_batch_size != -1 and training.global_batch_size % batch:
        text = f"is no multiple of local_batch_size * data-parallel degree = {batch}"
        raise KeyProblem(("training", "global_batch_size"), f"{training.global_batch_size} {text}")
    assert config.model_spec is not None
    for _, experts, _, _ in config.model_spec.traverse(GroupedExperts.Config):
        if experts.num_experts % dims.ep:
            text = f"{dims.ep} does not divide the model's {experts.num_experts} experts"
            raise KeyProblem(("parallelism", "expert_parallel_degree"), text)
    _check_layer(config, dims)
    _check_model(config, dims)
    _check_overrides(config)
    checkpoint = config.checkpoint
    if checkpoint.create_seed_checkpoint and world_size > 1:
        raise KeyProblem(("checkpoint", "create_seed_checkpoint"), f"needs one rank, not {world_size}")
    source = checkpoint.initial_load_path
    if source and not filesystem.is_remote(source) and not os.path.isdir(source):
        raise KeyProblem(("checkpoint", "initial_load_path"), f"{source!r} is no folder")
    resume.check(config.checkpoint, config.dump_folder, dims.dp_replicate * dims.dp_shard)
    _check_tokenizer(config)
    for key, loader in _loaders(config):
        if isinstance(loader, HuggingFaceTextDataLoader.Config) and (
            reason := data.missing_reason(loader.dataset.lower(), loader.dataset_path)
        ):
            raise KeyProblem((*key, "dataset_path"), reason)


def _check_layer(config: RunConfig, dims: ParallelDims) -> None:
    layer = config.mega_moe
    if layer.backend in backends.UPSTREAM:
        return
    # On GPUs each rank asks its own, when it makes the layer: asking here would take memory of the first.
    if config.device.kind == "cpu" and layer.backend not in ("auto", "reference"):
        text = f"{layer.backend!r} needs a GPU and the device is 'cpu': use 'auto' or 'reference'"
        raise KeyProblem(("mega_moe", "backend"), text)
    try:
        tokens = tokens_per_rank(config.training, config.parallelism, dims)
    except ValueError as error:
        raise KeyProblem(("training", "seq_len"), str(error)) from None
    if layer.max_tokens is not None and layer.max_tokens < tokens:
        text = f"{layer.max_tokens} is less than the {tokens} tokens a rank routes in one forward"
        raise KeyProblem(("mega_moe", "max_tokens"), f"{text}: raise it or leave it out")
    if layer.max_tokens is not None and layer.max_tokens > _SPARE * tokens:
        text = f"{layer.max_tokens} is more than {_SPARE} times the {tokens} tokens a rank routes in one forward"
        raise KeyProblem(("mega_moe", "max_tokens"), f"{text}: lower it or leave it out")


def _check_model(config: RunConfig, dims: ParallelDims) -> None:
    """What TorchTitan would refuse when every rank builds the model and cuts it into pipeline stages."""
    p = config.parallelism
    assert config.model_spec is not None
    model: Any = copy.deepcopy(config.model_spec.model)
    try:
        model.update_from_config(config=config)
    except (ValueError, NotImplementedError) as error:
        raise KeyProblem(("parallelism",), schema.sentence(error)) from None
    parts = p.module_fqns_per_model_part
    key: Key = ("parallelism", "module_fqns_per_model_part")
    if not dims.pp_enabled:
        if parts is not None:
            raise KeyProblem(key, "has no effect with pipeline_parallel_degree = 1: set that or take it out")
        return
    try:
        stages, *layers = pipeline_parallel._get_pipeline_metadata(dims, p, model)
        if parts is None:
            pipeline_parallel._generate_llm_fqn_per_model_part(stages, *layers)
    except ValueError as error:
        raise KeyProblem(("parallelism", "pipeline_parallel_degree"), schema.sentence(error)) from None
    if parts is not None:
        if len(parts) % dims.pp:
            raise KeyProblem(key, f"{len(parts)} parts do not divide over the {dims.pp} ranks of a pipeline")
        # TorchTitan drops what no part names, and passes over a name that the model has not.
        known = Counter(pipeline_parallel._generate_llm_fqn_per_model_part(1, layers[0])[0])
        known["vision_encoder"] += getattr(model, "vision_encoder", None) is not None
        named = Counter(itertools.chain(*parts))
        if wrong := [*(named - known), *(known - named)]:
            text = f"the parts have to name each of {', '.join(+known)} once, unlike {wrong[0]!r}"
            raise KeyProblem(key, text)


def _check_overrides(config: RunConfig) -> None:
    """Import the overrides, as torchtitan will: what an import of the user's code raises is said as it is."""
    named = [(entry, {}) if isinstance(entry, str) else entry for entry in config.override.imports]
    try:
        _resolve_active([(*_resolve_target(name), kwargs) for name, kwargs in named])
    except Exception as error:
        raise KeyProblem(("override", "imports"), schema.sentence(error)) from None


def _check_tokenizer(config: RunConfig) -> None:
    assert config.model_spec is not None
    known = config_utils.decoder_vocab_size(config.model_spec)
    key: Key = ("hf_assets_path",)
    if isinstance(config.tokenizer, data.StdlibTokenizer.Config):
        key, tokens = ("tokenizer", "vocab_size"), config.tokenizer.vocab_size
        if reason := data.missing_reason("stdlib", None):
            raise KeyProblem(("tokenizer", "type"), reason)
    elif type(config.tokenizer) is HuggingFaceTokenizer.Config:
        path = config.hf_assets_path
        if not os.path.isdir(path):
            text = f"{path!r} is no folder; download the model's tokenizer and files there"
            raise KeyProblem(key, text)
        try:
            tokens = config.tokenizer.build(tokenizer_path=path).get_vocab_size()
        except Exception as error:  # `tokenizers` raises no narrower one for a file that it cannot parse
            text = f"{path!r} holds no tokenizer that can be read: {schema.sentence(error)}"
            raise KeyProblem(key, text) from None
    else:
        return
    if tokens > known:
        raise KeyProblem(key, f"a tokenizer of {tokens} tokens is too large for the model, which knows {known}")


def _apply(rule: Rule, value: Any, key: Key) -> None:
    allowed, words = rule
    if value is not None and not allowed(value):
        raise KeyProblem(key, f"expected {words}, got {value!r}")


def _check_optimizer(config: RunConfig) -> None:
    if not config.optimizer.param_groups:
        raise KeyProblem(("optimizer", "param_groups"), "is empty: no parameter would be trained")
    for i, group in enumerate(config.optimizer.param_groups):
        key: Key = ("optimizer", "param_groups", i)
        schema.check_group(group, key)
        for name, rule in OPTIMIZER_KWARGS.items():
            value = group.optimizer_kwargs.get(name)
            # A shorthand key is written [optimizer] lr; a sole catch-all group is reported that way.
            at = ("optimizer", name) if len(config.optimizer.param_groups) == 1 else (*key, "optimizer_kwargs", name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise KeyProblem(at, f"expected a number, got {value!r}")
            _apply(rule, value, at)
            _apply(FINITE, value, at)
        for beta in group.optimizer_kwargs.get("betas", ()):
            if not 0 <= beta < 1:
                raise KeyProblem(("optimizer", "betas"), f"expected values from 0 to below 1, got {beta!r}")


def _loaders(config: RunConfig) -> list[tuple[Key, Any]]:
    roots: list[tuple[Key, Any]] = [(("dataloader",), config.dataloader)]
    if config.validator.enable:
        roots.append((("validator", "dataloader"), config.validator.dataloader))
    for key, loader in list(roots):
        sources = getattr(loader, "sources", ())
        roots += [((*key, "sources", i), source) for i, source in enumerate(sources)]
    return roots


def _check_loader(loader: Any, key: Key) -> None:
    for name, rule in LOADER.items():
        _apply(rule, getattr(loader, name, None), (*key, name))
    _apply(FINITE, getattr(loader, "weight", None), (*key, "weight"))
    if isinstance(loader, HuggingFaceTextDataLoader.Config) and loader.dataset.lower() not in DATASETS:
        near = nearest(loader.dataset, list(DATASETS))
        known = ", ".join(map(repr, DATASETS))
        raise KeyProblem((*key, "dataset"), f"unknown dataset {loader.dataset!r}{near or f'; known: {known}'}")
    if isinstance(loader, ParallelAwareDataloader.Config) and not loader.num_workers:
        for name in ("persistent_workers", "prefetch_factor"):
            if getattr(loader, name):
                raise KeyProblem((*key, name), "has no effect with num_workers = 0: set num_workers or take it out")


def _check_loss(config: RunConfig) -> None:
    loss = config.loss
    if not isinstance(loss, ChunkedLossWrapper.Config):
        return
    if isinstance(loss.loss_fn, ChunkedLossWrapper.Config):
        raise KeyProblem(("loss", "loss_fn", "type"), "a chunked loss cannot hold another: use 'CrossEntropyLoss'")
    local = config.training.seq_len // config.parallelism.context_parallel_degree
    if local % loss.num_chunks:
        text = f"{loss.num_chunks} does not divide the local sequence length {local}"
        raise KeyProblem(("loss", "num_chunks"), text)


def _check_checkpoint(config: RunConfig) -> None:
    checkpoint = config.checkpoint
    for name in ("initial_load_path", "create_seed_checkpoint", "load_only"):
        if getattr(checkpoint, name) and not checkpoint.enable:
            raise KeyProblem(("checkpoint", name), "has no effect with enable = false: set it or take it out")
    states = one_of(OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE)
    for name in checkpoint.exclude_from_loading:
        _apply(states, name, ("checkpoint", "exclude_from_loading"))


def _check_compile(config: RunConfig) -> None:
    for name in config.compile.components:
        _apply(one_of("model", "loss"), name, ("compile", "components"))
    if config.compile.enable and config.compile.backend not in torch._dynamo.list_backends(exclude_tags=()):
        raise KeyProblem(("compile", "backend"), f"torch.compile has no backend {config.compile.backend!r}")


def _check_metrics(config: RunConfig) -> None:
    """Of steps that are not logged, and of layers that TorchTitan compiles or replays, our metrics see nothing."""
    metrics, step = config.metrics, config.metrics.routing_step
    if metrics.gradient_steps > 1 and metrics.log_freq > 1:
        text = f"{metrics.gradient_steps} steps begin with some that are not logged: set metrics.log_freq = 1"
        raise KeyProblem(("metrics", "gradient_steps"), text)
    unseen = [
        (step > config.training.steps, f"training ends after {config.training.steps} steps"),
        (step != 1 and step % metrics.log_freq != 0, f"metrics.log_freq = {metrics.log_freq} does not log it: set 1"),
        (config.compile.enable and "model" in config.compile.components, "set compile.enable = false to record it"),
        (not config.training.disable_cuda_graphs, "set training.disable_cuda_graphs = true to record it"),
        (config.parallelism.pipeline_parallel_degree > 1, "not all stages of a pipeline have the first layer"),
    ]
    if step and (why := next((why for bad, why in unseen if bad), None)):
        raise KeyProblem(("metrics", "routing_step"), f"the routing of step {step} cannot be recorded: {why}")


def _check_schedules(config: RunConfig) -> None:
    p, profiler = config.parallelism, config.profiler
    if profiler.enable_profiling and profiler.profile_freq < profiler.profiler_warmup + profiler.profiler_active:
        text = f"{profiler.profile_freq} is less than profiler_warmup + profiler_active"
        raise KeyProblem(("profiler", "profile_freq"), text)
    try:
        get_schedule_class(p.pipeline_parallel_schedule)
    except ValueError as error:
        raise KeyProblem(("parallelism", "pipeline_parallel_schedule"), str(error)) from None
    divisor = (p.tensor_parallel_degree if p.enable_sequence_parallel else 1) * (
        2 * p.context_parallel_degree if p.context_parallel_degree > 1 else 1
    )
    if config.training.seq_len % divisor:
        text = f"is no multiple of {divisor}, which sequence and context parallelism need"
        raise KeyProblem(("training", "seq_len"), f"{config.training.seq_len} {text}")
