"""Files of torchtitan 0.1 and 0.2: every key of theirs is mapped, dropped with one note, or refused."""

import ast
import json
import logging
from pathlib import Path

import pytest
import tomli_w

from titan_mega_moe import config
from titan_mega_moe.config import ConfigError, schema

VERSIONS = json.loads(Path(__file__).with_name("torchtitan_0_2_schema.json").read_text())
KEYS = sorted({(key, kind) for table in VERSIONS.values() for key, (kind, _) in table.items()})
MODEL = {"model.name": "qwen3", "model.flavor": "debugmodel_moe"}
# Marks a file as old without touching anything that is compared.
BASE = MODEL | {"training.disable_cuda_graphs": True, "job.config_file": "old.toml"}

# A value that differs from the default of both generations, where the type alone does not give one.
PROBES = {
    "model.name": "deepseek_v3",
    "model.flavor": "30B-A3B",
    "model.hf_assets_path": "./hf",
    "model.tokenizer_path": "./hf",
    "optimizer.name": "Adam",
    "training.dataset": "c4",
    "training.global_batch_size": 16,
    "training.seq_len": 4096,
    "validation.dataset": "c4_test",
    "validation.steps": 7,
    "checkpoint.last_save_model_weights_only": False,
    "checkpoint.load_step": 7,
    "checkpoint.initial_load_path": "/somewhere/step_10",
    "checkpoint.initial_load_in_hf_quantized": True,
    "checkpoint.exclude_from_loading": ["optimizer"],
    "compile.components": ["loss"],
    "compile.backend": "eager",
    "lr_scheduler.decay_ratio": 0.5,
    "lr_scheduler.min_lr_factor": 0.25,
    "lr_scheduler.lr_min": 0.25,
    "optimizer.beta1": 0.5,
    "optimizer.beta2": 0.75,
    "activation_checkpoint.mode": "full",
    "activation_checkpoint.preserve_rng_state": False,
    "activation_checkpoint.memory_budget": 0.25,
    "activation_checkpoint.determinism_check": "none",
    "activation_checkpoint.selective_ac_option": "op",
    "parallelism.pipeline_parallel_schedule": "GPipe",
    "parallelism.context_parallel_load_balancer": "ptrr",
    "parallelism.module_fqns_per_model_part": [["tok_embeddings"], ["layers.0"]],
    "parallelism.data_parallel_shard_degree": 4,
    "parallelism.context_parallel_degree": 2,
    "parallelism.tensor_parallel_degree": 2,
    "fault_tolerance.semi_sync_method": "diloco",
    "training.dataset_path": "/somewhere",
    "validation.dataset_path": "/somewhere",
}
# Keys that mean something only beside others.
BESIDE = {
    "training.dataloader.persistent_workers": {"training.dataloader.num_workers": 2},
    "training.dataloader.prefetch_factor": {"training.dataloader.num_workers": 2},
    "validation.dataloader.persistent_workers": {"validation.dataloader.num_workers": 2},
    "validation.dataloader.prefetch_factor": {"validation.dataloader.num_workers": 2},
    "activation_checkpoint.memory_budget": {
        "activation_checkpoint.mode": "memory_budget",
        "compile.enable": True,
    },
    "activation_checkpoint.visualize_memory_budget_pareto": {
        "activation_checkpoint.mode": "memory_budget",
        "compile.enable": True,
    },
    "parallelism.enable_async_tensor_parallel": {"compile.enable": True},
    "checkpoint.initial_load_in_hf_quantized": {
        "checkpoint.initial_load_in_hf": True,
        "checkpoint.initial_load_path": "/somewhere",
        "checkpoint.enable": True,
    },
    "checkpoint.initial_load_path": {"checkpoint.enable": True},
    "checkpoint.create_seed_checkpoint": {"checkpoint.enable": True},
    "checkpoint.load_only": {"checkpoint.enable": True},
    "checkpoint.last_save_in_hf": {"checkpoint.enable": True},
    "model.name": {"model.flavor": "16B"},
}
# Where the last part of a mapped key's name changed.
RENAMED = {
    "job.print_args": "print_config",
    "model.tokenizer_path": "hf_assets_path",
    "optimizer.name": "optimizer_name",
    "optimizer.beta1": "betas",
    "optimizer.beta2": "betas",
    "lr_scheduler.lr_min": "min_lr_factor",
    "training.compile": "enable",
    "training.debug_moe_force_load_balance": "moe_force_load_balance",
    "checkpoint.enable_checkpoint": "enable",
    "checkpoint.initial_load_model_weights_only": "initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "last_save_model_only",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": "force_recompute_mm_shapes_by_fqns",
}
# Asked for like this they cannot be honoured; the same key off or empty is dropped with a note.
REFUSED = {
    "model.converters": ["quantize.grouped_mm.float8"],
    "job.custom_config_module": "my_package.config",
    "experimental.custom_import": "my_package.model",
    "experimental.custom_args_module": "my_package.config",
    "memory_estimation.enable": True,
    "memory_estimation.enabled": True,
    "fault_tolerance.enable": True,
    "parallelism.expert_tensor_parallel_degree": 2,
    "parallelism.pipeline_parallel_split_points": ["layers.1"],
    # One value is all that either generation takes.
    "training.mixed_precision_reduce": "bfloat16",
}


def probe(key, kind):
    if key in REFUSED:
        return REFUSED[key]
    if key in PROBES:
        return PROBES[key]
    default = next(table[key][1] for table in VERSIONS.values() if key in table)
    if kind == "bool":
        return not default
    if kind.startswith("Literal"):
        choices = ast.literal_eval(kind.removeprefix("Literal").removesuffix(" | None"))
        return next((choice for choice in choices if choice != default), choices[0])
    if kind.startswith("int"):
        return (default or 0) * 2 + 3
    if kind.startswith("float"):
        return (default or 1.0) * 2
    if kind.startswith("list"):
        return ["layers"]
    return "another"


def write(path, flat):
    table = {}
    for dotted, value in flat.items():
        *sections, name = dotted.split(".")
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    path.write_text(tomli_w.dumps(table))
    return path


def load(path, flat, caplog):
    """(every leaf of the configuration, the notes)."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        loaded = config.load(write(path, flat))
    notes = [r.getMessage() for r in caplog.records if r.getMessage().startswith(str(path))]
    return leaves(schema.unstructure(loaded)), notes


def leaves(value, prefix=""):
    if isinstance(value, dict):
        return {k: v for name, item in value.items() for k, v in leaves(item, f"{prefix}{name}.").items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {k: v for i, item in enumerate(value) for k, v in leaves(item, f"{prefix}{i}.").items()}
    return {prefix[:-1]: value}


def spelled(dotted):
    section, _, name = dotted.rpartition(".")
    return f"[{section}] {name}"


@pytest.mark.parametrize("key, kind", KEYS, ids=[f"{k}-{t}" for k, t in KEYS])
def test_every_key_is_mapped_noted_or_refused(key, kind, tmp_path, caplog):
    value, path = probe(key, kind), tmp_path / "file.toml"
    beside = BASE | BESIDE.get(key, {})
    if key in REFUSED:
        with pytest.raises(ConfigError) as refusal:
            config.load(write(path, beside | {key: value}))
        assert str(refusal.value).startswith(f"{path}: {spelled(key)}")
        return
    before, notes_before = load(path, BASE if key in MODEL else without(beside, key), caplog)
    after, notes = load(path, beside | {key: value}, caplog)
    changed = {name: item for name, item in after.items() if before.get(name) != item}
    named = [note for note in notes if f"{spelled(key)}: dropped" in note]
    if named:
        assert len(named) == 1 and len(notes) == len(notes_before) + 1
        assert not changed
    else:
        assert notes == notes_before
        name = RENAMED.get(key, key.rpartition(".")[2])
        held = [item for changed_key, item in changed.items() if changed_key.rpartition(".")[2] == name]
        assert value in held or any(isinstance(item, list) and value in item for item in held), changed


def without(flat, key):
    return {name: value for name, value in flat.items() if name != key}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_with_every_key_at_its_default_loads_as_one_with_none(version, tmp_path, caplog):
    defaults = {key: default for key, (_, default) in VERSIONS[version].items() if default is not None}
    if defaults.get("model.tokenizer_path", "").endswith("tokenizer.model"):
        del defaults["model.tokenizer_path"]  # refused, see below
    # Where torchtitan's own defaults moved between the generations.
    moved = {"job.dump_folder", "activation_checkpoint.preserve_rng_state"}
    moved |= {key for key in defaults if key.startswith(("profiling.save", "checkpoint.last_save_model_weights"))}
    defaults = {key: value for key, value in defaults.items() if key not in moved}
    before, _ = load(tmp_path / "none.toml", BASE, caplog)
    after, notes = load(tmp_path / "all.toml", defaults | BASE, caplog)
    assert after == before
    assert len(notes) == len(set(notes))


def test_old_files_run_without_cuda_graphs_which_they_never_had(tmp_path, caplog):
    after, notes = load(tmp_path / "file.toml", MODEL | {"training.dataset": "c4"}, caplog)
    assert after["training.disable_cuda_graphs"] is True
    assert any("[training] disable_cuda_graphs" in note for note in notes)
    new, notes = load(tmp_path / "file.toml", MODEL | {"dataloader.dataset": "c4"}, caplog)
    assert new["training.disable_cuda_graphs"] is False and not notes


@pytest.mark.parametrize(
    "flat, expected",
    [
        (
            {"model.name": "llama3", "model.flavor": "8B"},
            "[model] flavor: model 'llama3' '8B' has no mixture of experts",
        ),
        ({"model.name": "llama4", "model.flavor": "17bx16e"}, "[model] name: model 'llama4' is not known"),
        ({"model.name": "flux", "model.flavor": "flux-dev"}, "[model] "),
        (
            {"model.name": "gpt_oss", "model.flavor": "20b"},
            "[model] flavor: model 'gpt_oss' '20b' cannot use the layer",
        ),
        ({"model.converters": ["float8"]}, "[model] converters: ['float8'] cannot be honoured"),
        (
            {"model.tokenizer_path": "./tokenizer.model"},
            "[model] tokenizer_path: './tokenizer.model' is a file",
        ),
        ({"training.datasett": "c4"}, "[training] datasett: unknown key"),
        ({"profiling.profile_frequency": 3}, "[profiling] profile_frequency: unknown key"),
        # A key and the one that took its place, with different values.
        (
            {"job.dump_folder": "a", "dump_folder": "b"},
            "[job] dump_folder: 'a' stands beside dump_folder = 'b'",
        ),
        (
            {"training.dataset": "c4", "dataloader.dataset": "stdlib"},
            "[training] dataset: 'c4' stands beside [dataloader] dataset = 'stdlib'",
        ),
        (
            {"training.compile": True, "compile.enable": False},
            "[training] compile: True stands beside [compile] enable = False",
        ),
        (
            {"model.tokenizer_path": "a", "model.hf_assets_path": "b"},
            "[model] tokenizer_path: 'a' stands beside hf_assets_path = 'b'",
        ),
        (
            {"optimizer.beta2": 0.99, "optimizer.betas": [0.9, 0.95]},
            "[optimizer] beta2: [0.9, 0.99] stands beside [optimizer] betas = [0.9, 0.95]",
        ),
        (
            {
                "parallelism.enable_async_tensor_parallel": True,
                "compile.enable": True,
                "compile.components": 3,
            },
            "[compile] components: expected a list",
        ),
    ],
)
def test_what_cannot_be_honoured_is_one_sentence(flat, expected, tmp_path):
    path = write(tmp_path / "old.toml", BASE | flat)
    with pytest.raises(ConfigError) as refusal:
        config.load(path)
    assert str(refusal.value).startswith(f"{path}: {expected}")
    assert "\n" not in str(refusal.value)


def test_flavors_that_named_the_attention_backend(tmp_path, caplog):
    flat = BASE | {"model.name": "deepseek_v3", "model.flavor": "debugmodel_flex_attn"}
    after, _ = load(tmp_path / "file.toml", flat, caplog)
    assert (after["model.flavor"], after["model.attn_backend"]) == ("debugmodel", "flex")


def test_async_tensor_parallel_without_compilation_is_dropped(tmp_path, caplog):
    after, notes = load(tmp_path / "f.toml", BASE | {"parallelism.enable_async_tensor_parallel": True}, caplog)
    assert after["compile.enable_async_tensor_parallel"] is False
    assert sum("enable_async_tensor_parallel" in note for note in notes) == 1


def test_a_second_beta_of_zero_is_zero(tmp_path, caplog):
    after, _ = load(tmp_path / "f.toml", BASE | {"optimizer.beta2": 0.0}, caplog)
    assert str(after).count("0.95") == 0


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_keys_of_other_checkpoint_modes_are_dropped_with_a_note(mode, tmp_path, caplog):
    flat = BASE | {"activation_checkpoint.mode": mode, "activation_checkpoint.memory_budget": 0.25}
    after, notes = load(tmp_path / "file.toml", flat, caplog)
    assert after["activation_checkpoint.mode"] == mode
    assert sum("[activation_checkpoint] memory_budget" in note for note in notes) == 1


def test_sections_of_the_new_schema_may_stand_in_an_old_file(tmp_path, caplog):
    flat = BASE | {"mega_moe.backend": "upstream", "training.dataset": "c4", "device.kind": "cpu"}
    after, _ = load(tmp_path / "file.toml", flat, caplog)
    assert (after["mega_moe.backend"], after["dataloader.dataset"]) == ("upstream", "c4")
