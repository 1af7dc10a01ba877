"""TOML files written for torchtitan 0.1.0 to 0.2.2, as tables for the 0.3 schema.

A file counts as old when it has a section or key that only the old schemas have. Every key of theirs is then
one of: still there under its name (not listed here), `MOVED`, `DROPPED` with a note that says what became of
it, or refused when it asks for what cannot be done (`REFUSED`, and the rules that look at more than one key).
"""

from collections.abc import Callable
from typing import Any

from titan_mega_moe.config.source import KeyProblem, Table, nearest, spell

Path = tuple[str, ...]  # a flat table's key: no place in a list
Flat = dict[Path, Any]

# Sections that torchtitan 0.3 has not, under this name.
SECTIONS = {"job", "profiling", "validation", "quantize", "float8", "mx"}
SECTIONS |= {"memory_estimation", "fault_tolerance", "experimental"}

MOVED = {
    "job.dump_folder": "dump_folder",
    "job.print_config": "debug.print_config",
    "job.print_args": "debug.print_config",
    "job.save_config_file": "debug.save_config_file",
    "profiling.enable_profiling": "profiler.enable_profiling",
    "profiling.save_traces_folder": "profiler.save_traces_folder",
    "profiling.profile_freq": "profiler.profile_freq",
    "profiling.profiler_active": "profiler.profiler_active",
    "profiling.profiler_warmup": "profiler.profiler_warmup",
    "profiling.enable_memory_snapshot": "profiler.enable_memory_snapshot",
    "profiling.save_memory_snapshot_folder": "profiler.save_memory_snapshot_folder",
    "model.hf_assets_path": "hf_assets_path",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.dataset": "dataloader.dataset",
    "training.dataset_path": "dataloader.dataset_path",
    "training.dataloader.num_workers": "dataloader.num_workers",
    "training.dataloader.persistent_workers": "dataloader.persistent_workers",
    "training.dataloader.pin_memory": "dataloader.pin_memory",
    "training.dataloader.prefetch_factor": "dataloader.prefetch_factor",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.debug_moe_force_load_balance": "debug.moe_force_load_balance",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        "activation_checkpoint.force_recompute_mm_shapes_by_fqns"
    ),
    "validation.enable": "validator.enable",
    "validation.freq": "validator.freq",
    "validation.steps": "validator.steps",
    "validation.dataset": "validator.dataloader.dataset",
    "validation.dataset_path": "validator.dataloader.dataset_path",
    "validation.dataloader.num_workers": "validator.dataloader.num_workers",
    "validation.dataloader.persistent_workers": "validator.dataloader.persistent_workers",
    "validation.dataloader.pin_memory": "validator.dataloader.pin_memory",
    "validation.dataloader.prefetch_factor": "validator.dataloader.prefetch_factor",
}

_EXPERIMENT = "torchtitan 0.3 keeps fault tolerance in its torchft experiment, which this package does not run"
_QUANTIZE = "dropped: it only configures a converter, and [model] converters turns none on"
DROPPED = {
    "job.config_file": "dropped: the file is named on the command line",
    "job.description": "dropped: torchtitan 0.3 has no description of a run",
    "job.custom_config_module": "dropped: empty",
    "job.use_for_integration_test": "dropped: it marked torchtitan's own tests",
    "model.converters": "dropped: empty; torchtitan 0.3 converts models in Python",
    "model.print_after_conversion": "dropped: no converter runs",
    "optimizer.early_step_in_backward": (
        "dropped: torchtitan 0.3 steps after the whole backward and clips gradients to [training] max_norm"
    ),
    "parallelism.enable_compiled_autograd": "dropped: torchtitan 0.3 does not use compiled autograd",
    "parallelism.disable_loss_parallel": (
        "dropped: torchtitan 0.3 always shards the loss over tensor-parallel ranks; the loss is the same"
    ),
    "parallelism.pipeline_parallel_split_points": "dropped: empty; module_fqns_per_model_part took its place",
    "parallelism.pipeline_parallel_expert_parallel_overlap": (
        "dropped: torchtitan 0.3 does not overlap pipeline and expert parallelism"
    ),
    "parallelism.context_parallel_rotate_method": "dropped: torchtitan 0.3 has one way to exchange keys",
    "parallelism.expert_tensor_parallel_degree": (
        "dropped: torchtitan 0.3 shards experts over expert-parallel ranks only"
    ),
    "parallelism.expert_parallel_comm_backend": (
        "dropped: [mega_moe] backend moves the tokens; with backend 'upstream' it is torchtitan's all-to-all"
    ),
    "checkpoint.enable_ft_dataloader_checkpoints": f"dropped: {_EXPERIMENT}",
    "activation_checkpoint.selective_ac_option": (
        "dropped: 'selective' always decides op by op in torchtitan 0.3, never every n-th layer"
    ),
    "activation_checkpoint.early_stop": "dropped: torchtitan 0.3 never stops recomputation early",
    "validation.local_batch_size": "dropped: torchtitan 0.3 validates with [training] local_batch_size",
    "validation.seq_len": "dropped: torchtitan 0.3 validates with [training] seq_len",
    "memory_estimation.enable": "dropped: off, and torchtitan 0.3 has no memory estimation",
    "memory_estimation.enabled": "dropped: off, and torchtitan 0.3 has no memory estimation",
    "memory_estimation.disable_fake_mode": "dropped: torchtitan 0.3 has no memory estimation",
    "experimental.custom_import": "dropped: empty",
    "experimental.custom_args_module": "dropped: empty",
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": _QUANTIZE,
    "quantize.linear.mx.recipe_name": _QUANTIZE,
    "quantize.linear.mx.filter_fqns": _QUANTIZE,
    "quantize.grouped_mm.float8.fqns": _QUANTIZE,
    "quantize.grouped_mm.mx.recipe_name": _QUANTIZE,
    "quantize.grouped_mm.mx.fqns": _QUANTIZE,
    "float8.force_recompute_fp8_weight_in_bwd": _QUANTIZE,
    "mx.use_fp8_dim1_cast_triton_kernel": _QUANTIZE,
    "mx.recipe_name": _QUANTIZE,
    "mx.filter_fqns": _QUANTIZE,
}
_FLOAT8 = (
    "enable_fsdp_float8_all_gather",
    "precompute_float8_dynamic_scale_for_fsdp",
    "recipe_name",
    "filter_fqns",
    "emulate",
)
DROPPED |= {f"{section}.{key}": _QUANTIZE for section in ("float8", "quantize.linear.float8") for key in _FLOAT8}
_FAULT_TOLERANCE = (
    "process_group",
    "process_group_timeout_ms",
    "replica_id",
    "group_size",
    "min_replica_size",
    "semi_sync_method",
    "sync_steps",
    "should_quantize",
    "fragment_sync_delay",
    "fragment_update_alpha",
)
DROPPED |= {f"fault_tolerance.{key}": f"dropped: {_EXPERIMENT}" for key in ("enable", *_FAULT_TOLERANCE)}

# Asked for and not to be had: (does the value ask for it, why not and what to do).
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "job.custom_config_module": (bool, "torchtitan 0.3 extends configurations in Python: take it out"),
    "experimental.custom_args_module": (bool, "torchtitan 0.3 extends configurations in Python: take it out"),
    "experimental.custom_import": (
        bool,
        "torchtitan 0.3 imports nothing by this key; use [override] imports",
    ),
    "model.converters": (
        bool,
        "the layer computes experts in bfloat16 or float32 and 0.3 converts models in Python: take it out",
    ),
    "parallelism.expert_tensor_parallel_degree": (
        lambda v: v != 1,
        "torchtitan 0.3 has no tensor parallelism inside experts: set 1, or take it out",
    ),
    "parallelism.pipeline_parallel_split_points": (
        bool,
        "torchtitan 0.3 takes module_fqns_per_model_part, one list of modules for each stage",
    ),
    "memory_estimation.enable": (bool, "torchtitan 0.3 has no memory estimation: take it out"),
    "memory_estimation.enabled": (bool, "torchtitan 0.3 has no memory estimation: take it out"),
    "fault_tolerance.enable": (bool, f"{_EXPERIMENT}: take it out"),
}
# Keys that are rewritten by a rule of their own below.
_SPECIAL = {
    "model.tokenizer_path",
    "optimizer.beta1",
    "optimizer.beta2",
    "parallelism.enable_async_tensor_parallel",
}
# torchtitan 0.1 and 0.2 named the attention backend in the flavor.
_ATTENTION = {"_flex_attn": "flex", "_varlen_attn": "varlen"}
_MODE_KEYS = {
    "activation_checkpoint.force_recompute_mm_shapes_by_fqns": ("selective",),
    "activation_checkpoint.memory_budget": ("memory-budget",),
    "activation_checkpoint.visualize_memory_budget_pareto": ("memory-budget",),
    "activation_checkpoint.preserve_rng_state": ("selective", "full", "memory-budget"),
    "activation_checkpoint.determinism_check": ("selective", "full", "memory-budget"),
    "activation_checkpoint.debug": ("selective", "full", "memory-budget"),
}


def convert(table: Table) -> tuple[Table, list[str]]:
    """(the table in 0.3's keys, one note for each key that was dropped); a new file comes back as it is.

    Raises:
        KeyProblem: a key that asks for what torchtitan 0.3 or the layer cannot do.
    """
    flat = _flatten(table)
    known = {*MOVED, *DROPPED, *_SPECIAL}
    if not any(key[0] in SECTIONS or ".".join(key) in known for key in flat):
        return table, []
    notes: list[str] = []
    new: Flat = {}
    for key, value in flat.items():
        dotted = ".".join(key)
        asked, why = REFUSED.get(dotted, (lambda v: False, ""))
        if asked(value):
            raise KeyProblem(key, f"{value!r} cannot be honoured: {why}")
        if dotted in DROPPED:
            notes.append(f"{spell(key)}: {DROPPED[dotted]}")
        elif dotted in MOVED:
            _move(key, tuple(MOVED[dotted].split(".")), value, flat, new)
        elif key[0] in SECTIONS and value != {}:
            names = [name.removeprefix(f"{key[0]}.") for name in known if name.startswith(f"{key[0]}.")]
            raise KeyProblem(key, f"unknown key{nearest('.'.join(key[1:]), names)}")
        elif key[0] not in SECTIONS and dotted not in _SPECIAL:
            new.setdefault(key, value)
    _tokenizer(flat, new)
    _betas(flat, new)
    _async_tensor_parallel(flat, new, notes)
    _attention(new)
    _checkpoint_mode(new, notes)
    if ("training", "disable_cuda_graphs") not in new:
        new["training", "disable_cuda_graphs"] = True
        notes.append("[training] disable_cuda_graphs: set to true, because torchtitan 0.2 had no CUDA graphs")
    return _nest(new), notes


def _move(key: Path, to: Path, value: Any, flat: Flat, new: Flat) -> None:
    other = new.get(to, flat.get(to, value))
    if other != value:
        text = f"{value!r} stands beside {spell(to)} = {other!r}, which took its place: keep one of them"
        raise KeyProblem(key, text)
    new[to] = value


def _tokenizer(flat: Flat, new: Flat) -> None:
    key = ("model", "tokenizer_path")
    path = flat.get(key)
    if path is None:
        return
    if str(path).endswith("tokenizer.model"):
        text = f"{path!r} is a file that torchtitan 0.3 cannot read"
        raise KeyProblem(key, f"{text}: give the folder of the Hugging Face tokenizer as hf_assets_path")
    _move(key, ("hf_assets_path",), path, new, new)


def _betas(flat: Flat, new: Flat) -> None:
    given = {name: flat.get(("optimizer", name)) for name in ("beta1", "beta2")}
    if any(value is not None for value in given.values()):
        # The defaults of torchtitan 0.1 and 0.2.
        betas = [default if given[name] is None else given[name] for name, default in (("beta1", 0.9), ("beta2", 0.95))]
        name = next(name for name, value in given.items() if value is not None)
        _move(("optimizer", name), ("optimizer", "betas"), betas, flat, new)


def _async_tensor_parallel(flat: Flat, new: Flat, notes: list[str]) -> None:
    key = ("parallelism", "enable_async_tensor_parallel")
    if key not in flat:
        return
    components = new.get(("compile", "components"), ["model"])
    compiled = new.get(("compile", "enable"), False) and "model" in str(components)
    if flat[key] and not compiled:
        notes.append(f"{spell(key)}: dropped: it had no effect without compiling the model, and 0.3 refuses it then")
    else:
        new["compile", "enable_async_tensor_parallel"] = flat[key]


def _attention(new: Flat) -> None:
    flavor = new.get(("model", "flavor"))
    for suffix, backend in _ATTENTION.items():
        if isinstance(flavor, str) and flavor.endswith(suffix):
            new["model", "flavor"] = flavor.removesuffix(suffix)
            new.setdefault(("model", "attn_backend"), backend)


def _checkpoint_mode(new: Flat, notes: list[str]) -> None:
    """Old files list the keys of every mode; 0.3 takes those of the chosen one."""
    mode = str(new.get(("activation_checkpoint", "mode"), "selective")).replace("_", "-")
    for dotted, modes in _MODE_KEYS.items():
        key = tuple(dotted.split("."))
        if key in new and mode not in modes:
            del new[key]
            notes.append(f"{spell(key)}: dropped: it has no effect with mode = {mode!r}")


def _flatten(table: Table, prefix: Path = ()) -> Flat:
    flat: Flat = {}
    for name, value in table.items():
        key = (*prefix, name)
        if isinstance(value, dict) and value:
            flat |= _flatten(value, key)
        else:
            flat[key] = value
    return flat


def _nest(flat: Flat) -> Table:
    table: Table = {}
    for (*section, name), value in flat.items():
        inner = table
        for part in section:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return table
