"""load(): every key reaches its place, every error is one sentence, what is saved loads as it was."""

import dataclasses
import json
import logging
import re

import pytest
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.optimizer import default_adamw
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.trainer import Trainer

from titan_mega_moe import config, data
from titan_mega_moe.config import ConfigError, schema
from titan_mega_moe.config.run_config import RunConfig
from titan_mega_moe.routed_experts import MegaRoutedExperts

MODEL = '[model]\nname = "qwen3"\nflavor = "debugmodel_moe"\n'


@pytest.fixture
def file(tmp_path):
    def write(text="", model=MODEL):
        path = tmp_path / "file.toml"
        path.write_text(f"{text}\n{model}")
        return path

    return write


def refusal(path, *overrides):
    with pytest.raises(ConfigError) as error:
        config.load(path, list(overrides))
    text = str(error.value)
    assert text.startswith(f"{path}: ") and "\n" not in text
    return text.removeprefix(f"{path}: ")


def test_an_empty_file_but_for_the_model_is_torchtitans_defaults(file):
    loaded = config.load(file())
    upstream = Trainer.Config()
    assert isinstance(loaded, Trainer.Config)
    for field in dataclasses.fields(Trainer.Config):
        if field.name not in ("model_spec", "dataloader", "optimizer", "loss", "metrics"):
            assert getattr(loaded, field.name) == getattr(upstream, field.name), field.name
    assert loaded.optimizer == default_adamw()
    assert isinstance(loaded.loss, ChunkedLossWrapper.Config)
    assert loaded.loss.loss_fn.global_vocab_size == loaded.model_spec.model.vocab_size


def dotted_keys(cls, prefix=()):
    """Every dotted key below `cls` whose value is no table."""
    for name, (hint, default) in schema.fields_of(cls).items():
        arms = [a for a in schema.subcommands(hint).values() if a is not type(None)]
        inner = arms or [type(default) if dataclasses.is_dataclass(default) else schema.bare(hint)]
        for arm in inner:
            if dataclasses.is_dataclass(arm):
                yield from dotted_keys(arm, (*prefix, name))
            else:
                yield (*prefix, name)


def test_every_field_of_trainer_config_is_reachable():
    keys = set(dotted_keys(RunConfig))
    assert {("training", "steps"), ("validator", "dataloader", "dataset"), ("hf_assets_path",)} <= keys
    for key in keys:
        assert schema.leaf(RunConfig, key) is not None, key
    sections = {key[0] for key in keys} | {"tokenizer"}  # which has no keys of its own
    assert sections == {f.name for f in dataclasses.fields(RunConfig)} - {"model_spec"}


PLACES = [
    ('[validator.dataloader]\ndataset_path = "/x"', "validator.dataloader.dataset_path", "/x"),
    ('dump_folder = "/runs"', "dump_folder", "/runs"),
    ("[training]\nsteps = 7", "training.steps", 7),
    ("[training]\nmax_norm = 2", "training.max_norm", 2),
    ('[lr_scheduler]\ndecay_type = "cosine"', "lr_scheduler.decay_type", "cosine"),
    ("[lr_scheduler]\ndecay_ratio = 1", "lr_scheduler.decay_ratio", 1.0),
    ("[debug]\nseed = 3", "debug.seed", 3),
    (
        '[parallelism]\ncontext_parallel_load_balancer = "none"',
        "parallelism.context_parallel_load_balancer",
        None,
    ),
    ('[dataloader]\ndataset = "stdlib"', "dataloader.dataset", "stdlib"),
    ('[validator.dataloader]\ndataset = "c4"', "validator.dataloader.dataset", "c4"),
    ('[validator.dataloader]\ndataset = "c4"', "validator.dataloader.infinite", False),
    ("[loss]\nnum_chunks = 4", "loss.num_chunks", 4),
    ("[device]\nranks = 3", "device.ranks", 3),
    ("[mega_moe]\nmax_tokens = 3", "mega_moe.max_tokens", 3),
    ("[mega_moe]\nreserved_sms = 8", "mega_moe.reserved_sms", 8),
    ('[checkpoint]\nasync_mode = "async"', "checkpoint.async_mode", "async"),
    ("[compile]\nenable = true", "compile.enable", True),
]


@pytest.mark.parametrize("text, key, value", PLACES)
def test_a_key_lands_in_its_place(text, key, value, file):
    held = config.load(file(text))
    for name in key.split("."):
        held = getattr(held, name)
    assert held == value and type(held) is type(value)


@pytest.mark.parametrize(
    "arguments, key, value",
    [
        (["--training.steps", "20"], "training.steps", 20),
        (["--training.steps=20"], "training.steps", 20),
        (["--training.local-batch-size", "4"], "training.local_batch_size", 4),
        (["--training.steps", "1", "--training.steps", "2"], "training.steps", 2),
        (["--parallelism.data_parallel_shard_degree", "-1"], "parallelism.data_parallel_shard_degree", -1),
        (["--compile.enable"], "compile.enable", True),
        (["--compile.enable", "false"], "compile.enable", False),
        (["--checkpoint.no_initial_load_model_only"], "checkpoint.initial_load_model_only", False),
        (["--checkpoint.no-initial-load-model-only"], "checkpoint.initial_load_model_only", False),
        (["--compile.components", "loss,model"], "compile.components", ["loss", "model"]),
        (["--dump_folder", "/elsewhere"], "dump_folder", "/elsewhere"),
        (["--debug.seed", "none"], "debug.seed", None),
        (["--debug.seed", "None"], "debug.seed", None),
        (["--mega_moe.backend", "upstream"], "mega_moe.backend", "upstream"),
        (["--model.layers", "4"], "model.layers", 4),
        (["--override.imports", "a.b", 'c.d={"x": 1}'], "override.imports", ["a.b", ("c.d", {"x": 1})]),
        (["--metrics.log_freq", "3"], "metrics.log_freq", 3),
        (["--profiler.enable_profiling"], "profiler.enable_profiling", True),
        (["--activation_checkpoint.mode", "none"], "activation_checkpoint", None),
        (["--activation_checkpoint.mode", "full"], "activation_checkpoint", FullAC.Config()),
        (
            ["--parallelism.module_fqns_per_model_part", '[["a"], ["b", "c"]]'],
            "parallelism.module_fqns_per_model_part",
            [["a"], ["b", "c"]],
        ),
    ],
)
def test_the_command_line_overrides_the_file(arguments, key, value, file):
    text = "[training]\nsteps = 7\n[debug]\nseed = 3\n"
    held = config.load(file(text), arguments)
    for name in key.split("."):
        held = getattr(held, name)
    assert held == value


def plain_defaults(cls, start=None, prefix=()):
    """(dotted key, its default spelled as one word) of every key below `cls` that has such a default."""
    for name, (hint, default) in schema.fields_of(cls).items():
        key = (*prefix, name)
        default = getattr(start, name) if start else default
        if dataclasses.is_dataclass(default):
            yield from plain_defaults(type(default), default, key)
        elif isinstance(default, bool):
            yield ".".join(key), str(default).lower()
        elif isinstance(default, int | float | str) or default is None:
            yield ".".join(key), str(default)
        elif schema.bare(hint) == list[str] and default:
            yield ".".join(key), ",".join(default)


@pytest.mark.parametrize("key, word", plain_defaults(RunConfig))
def test_a_default_given_on_the_command_line_changes_nothing(key, word, file):
    assert config.to_toml(config.load(file(), [f"--{key}={word}"])) == config.to_toml(config.load(file()))


def test_optimizer_shorthand_and_groups(file):
    text = '[optimizer]\nname = "Adam"\nlr = 1e-3\nbetas = [0.8, 0.9]\neps = 1\nimplementation = "foreach"'
    optimizer = config.load(file(text)).optimizer
    expected = default_adamw(lr=1e-3, betas=(0.8, 0.9), eps=1.0)
    expected.param_groups[0].optimizer_name = "Adam"
    expected.implementation = "foreach"
    assert optimizer == expected
    groups = (
        '[[optimizer.param_groups]]\npattern = "router"\noptimizer_name = "Adam"\n'
        "optimizer_kwargs = {lr = 1e-4}\n"
        '[[optimizer.param_groups]]\npattern = ".*"\noptimizer_name = "AdamW"\n'
        "optimizer_kwargs = {lr = 1e-3, betas = [0.9, 0.99]}"
    )
    optimizer = config.load(file(groups)).optimizer
    assert [g.pattern for g in optimizer.param_groups] == ["router", ".*"]
    assert optimizer.param_groups[1].optimizer_kwargs == {"lr": 1e-3, "betas": (0.9, 0.99)}
    assert config.load(file(), ["--optimizer.lr", "0.5"]).optimizer == default_adamw(lr=0.5)


@pytest.mark.parametrize(
    "mode, policy",
    [
        ("selective", SelectiveAC.Config()),
        ("full", FullAC.Config()),
        ("memory-budget", MemoryBudgetAC.Config()),
        ("memory_budget", MemoryBudgetAC.Config()),
        ("none", None),
    ],
)
def test_activation_checkpoint_modes(mode, policy, file):
    text = f'[activation_checkpoint]\nmode = "{mode}"\n[compile]\nenable = true'
    assert config.load(file(text)).activation_checkpoint == policy


def test_types_of_loss_dataloader_and_tokenizer(file):
    text = (
        '[loss]\ntype = "CrossEntropyLoss"\n[tokenizer]\ntype = "StdlibTokenizer"\n'
        '[dataloader]\ntype = "InterleavedHuggingFaceTextDataLoader"\nseed = 3\n'
        '[[dataloader.sources]]\ndataset = "c4"\nweight = 2\n[[dataloader.sources]]\ndataset = "stdlib"'
    )
    loaded = config.load(file(text))
    assert loaded.loss.global_vocab_size == loaded.model_spec.model.vocab_size
    assert schema.owner(type(loaded.tokenizer)) == "StdlibTokenizer"
    assert [(s.dataset, s.weight) for s in loaded.dataloader.sources] == [("c4", 2.0), ("stdlib", 1.0)]


def test_backend_upstream_leaves_torchtitans_layer(file):
    ours = config.load(file()).model_spec.model
    assert any(ours.traverse(MegaRoutedExperts.Config)) and not any(ours.traverse(RoutedExperts.Config))
    theirs = config.load(file(), ["--mega_moe.backend", "upstream"]).model_spec.model
    assert any(theirs.traverse(RoutedExperts.Config)) and not any(theirs.traverse(MegaRoutedExperts.Config))


def test_two_configurations_share_nothing(file):
    first, second = config.load(file()), config.load(file())
    first.compile.components.append("x")
    first.loss.loss_fn.global_vocab_size = 1
    assert second.compile.components == ["model", "loss"]
    assert config.load(file()).loss.loss_fn.global_vocab_size == second.loss.loss_fn.global_vocab_size != 1


NO_GRAPHS = "[training]\ndisable_cuda_graphs = true\n"
ERRORS = [
    ("[trainning]\nsteps = 1", "trainning: unknown section; did you mean 'training'?"),
    ("[training]\nstep = 1", "[training] step: unknown key; did you mean 'steps'?"),
    ("dump_foldr = 1", "dump_foldr: unknown key; did you mean 'dump_folder'?"),
    ("[device]\nzzz = 1", "[device] zzz: unknown key; known: kind, ranks"),
    ("[model_spec]\nname = 1", "model_spec: unknown section; did you mean"),
    (
        "[validator.dataloader]\ndatset = 'x'",
        "[validator.dataloader] datset: unknown key; did you mean 'dataset'?",
    ),
    ("[dataloader]\nsources = []", "[dataloader] sources: is a key of type = 'Interleaved"),
    ("[optimizer]\nlearning_rate = 1", "[optimizer] learning_rate: unknown key"),
    ("[optimizer]\nbeta = 1", "[optimizer] beta: unknown key; did you mean 'betas'?"),
    ("training = 3", "training: expected a table, got 3"),
    ("[training]\nsteps = 'many'", "[training] steps: expected an integer, got 'many'"),
    ("[training]\nsteps = 1.5", "[training] steps: expected an integer, got 1.5"),
    ("[training]\nsteps = true", "[training] steps: expected an integer, got True"),
    ("[training]\nsteps = [1]", "[training] steps: expected an integer, got [1]"),
    ("[training]\nmax_norm = nan", "[training] max_norm: expected a number"),
    ("[training]\nmax_norm = '1'", "[training] max_norm: expected a number or an integer, got '1'"),
    ("[training]\ndtype = 'float8'", "[training] dtype: expected one of 'bfloat16', 'float32', got 'float8'"),
    ("[training]\nenable_cpu_offload = 1", "[training] enable_cpu_offload: expected true or false, got 1"),
    ("[compile]\ncomponents = 'model'", "[compile] components: expected a list (a string each), got 'model'"),
    ("[compile]\ncomponents = [1]", "[compile.components] 0: expected a string, got 1"),
    ("[compile]\ncomponents = ['modl']", "[compile] components: expected one of 'model', 'loss', got 'modl'"),
    ("[compile]\nenable = true\nbackend = 'x'", "[compile] backend: torch.compile has no backend 'x'"),
    ("[debug]\nseed = 'x'", "[debug] seed: expected an integer or 'none', got 'x'"),
    ("[debug]\nseed = -1", "[debug] seed: expected from 0 to"),
    ("[optimizer]\nbetas = [0.9]", "[optimizer] betas: expected a list of 2 (a number, a number), got [0.9]"),
    ("[optimizer]\nbetas = [0.9, 1.0]", "[optimizer] betas: expected values from 0 to below 1, got 1.0"),
    ("[optimizer]\nlr = 0", "[optimizer] lr: expected above 0, got 0.0"),
    ("[optimizer]\nlr = -1e-3", "[optimizer] lr: expected above 0, got -0.001"),
    ("[optimizer]\neps = -1", "[optimizer] eps: expected at least 0"),
    (
        "[optimizer]\nname = 'AdamX'",
        "[optimizer] name: expected one of 'AdamW', 'Adam', got 'AdamX'; did you mean",
    ),
    ("[optimizer]\nparam_groups = []", "[optimizer] param_groups: is empty"),
    ("[optimizer]\nlr = 1\nparam_groups = []", "[optimizer] lr: stands beside param_groups"),
    ("[[optimizer.param_groups]]\npattern = '.'", "[optimizer.param_groups.0] optimizer_name: is missing"),
    (
        "[[optimizer.param_groups]]\npattern = '.'\noptimizer_name = 'SGD'",
        "[optimizer.param_groups.0] optimizer_name: torchtitan has no optimizer 'SGD'",
    ),
    (
        "[[optimizer.param_groups]]\npattern = '.'\noptimizer_name = 'Adam'\noptimizer_kwargs = {lrr = 1}",
        "[optimizer.param_groups.0.optimizer_kwargs] lrr: Adam has no such argument; did you mean 'lr'?",
    ),
    (
        "[[optimizer.param_groups]]\npattern = '('\noptimizer_name = 'Adam'",
        "[optimizer.param_groups.0] pattern: '(' is no regular expression",
    ),
    (
        "[activation_checkpoint]\nmode = 'ful'",
        "[activation_checkpoint] mode: expected one of 'selective', 'full'",
    ),
    ("[activation_checkpoint]\nmode = 3", "[activation_checkpoint] mode: expected one of"),
    ("[activation_checkpoint]\nmode = 'none'\ndebug = true", "[activation_checkpoint] debug: has no effect"),
    (
        "[activation_checkpoint]\nmode = 'full'\nmemory_budget = 0.5",
        "[activation_checkpoint] memory_budget: is a key of mode = 'memory-budget' only",
    ),
    (
        "[activation_checkpoint]\nmode = 'memory-budget'",
        "[compile] enable: Memory budget activation checkpointing",
    ),
    (
        "[activation_checkpoint]\nmode = 'memory-budget'\nmemory_budget = 2.0\n[compile]\nenable = true",
        "[activation_checkpoint] memory_budget: expected from 0 to 1, got 2.0",
    ),
    (
        "[loss]\ntype = 'Focal'",
        "[loss] type: expected one of 'ChunkedLossWrapper', 'CrossEntropyLoss', got 'Focal'",
    ),
    ("[loss]\nnum_chunks = 0", "[loss] num_chunks: expected at least 1, got 0"),
    ("[loss]\nnum_chunks = 7", "[loss] num_chunks: 7 does not divide the local sequence length 2048"),
    (
        "[loss.loss_fn]\ntype = 'ChunkedLossWrapper'",
        "[loss.loss_fn] type: a chunked loss cannot hold another",
    ),
    (
        "[dataloader]\ndataset = 'c4_tset'",
        "[dataloader] dataset: unknown dataset 'c4_tset'; did you mean 'c4_test'?",
    ),
    ("[dataloader]\nnum_workers = -1", "[dataloader] num_workers: expected at least 0"),
    ("[dataloader]\nprefetch_factor = 2", "[dataloader] prefetch_factor: has no effect with num_workers = 0"),
    ("[dataloader]\npersistent_workers = true", "[dataloader] persistent_workers: has no effect"),
    (
        "[validator]\nenable = true\n[validator.dataloader]\ndataset = 'zzz'",
        "[validator.dataloader] dataset: unknown dataset 'zzz'; known: 'c4'",
    ),
    ("[validator]\nsteps = 0", "[validator] steps: validation steps must be positive or -1"),
    ("[validator]\nfreq = 0", "[validator] freq: expected at least 1, got 0"),
    ("[checkpoint]\ninterval = 0", "[checkpoint] interval: Checkpoint interval needs to be at least 1 step."),
    ("[checkpoint]\nkeep_latest_k = 1", "[checkpoint] keep_latest_k: We need to maintain at least 2"),
    (
        "[checkpoint]\ninitial_load_path = 'relative'",
        "[checkpoint] initial_load_path: initial_load_path must be",
    ),
    (
        "[checkpoint]\ninitial_load_path = '/x'",
        "[checkpoint] initial_load_path: has no effect with enable = false",
    ),
    ("[checkpoint]\nload_only = true", "[checkpoint] load_only: has no effect with enable = false"),
    (
        "[checkpoint]\nexclude_from_loading = ['dataloader', 'optimiser']",
        "[checkpoint] exclude_from_loading: expected one of 'optimizer', 'lr_scheduler', 'dataloader', 'train_state'",
    ),
    ("[training]\nsteps = 9223372036854775808", "[training] steps: expected an integer of at most 64 bits"),
    ("[debug]\nseed = -9223372036854775809", "[debug] seed: expected"),
    ('hf_assets_path = "a\\u0000b"', "hf_assets_path: expected a string without NUL characters"),
    ("dump_folder = ''", "dump_folder: is empty"),
    ("'' = 1", "'': unknown key; known: "),
    ("'a\\nb' = 1".replace("'", '"'), "'a\\nb': unknown key; known: "),
    *(
        (f"[optimizer]\n{name} = inf", f"[optimizer] {name}: expected a finite number, got inf")
        for name in ("lr", "eps", "weight_decay")
    ),
    (
        "[loss.loss_fn]\nglobal_vocab_size = 7",
        "[loss.loss_fn] global_vocab_size: expected the model's 2048, got 7",
    ),
    ("[comm]\ntrain_timeout_seconds = 99999999999", "[comm] train_timeout_seconds: expected from 1 to"),
    ("[metrics]\nlog_freq = 0", "[metrics] log_freq: expected at least 1, got 0"),
    ("[comm]\ninit_timeout_seconds = 0", "[comm] init_timeout_seconds: expected from 1 to 2147483648, got 0"),
    ("[comm]\nmode = 'nccl'", "[comm] mode: expected one of 'default'"),
    ("[comm]\nmode = 'local_tensor'", "[comm] mode: expected a mode that trains, got 'local_tensor'"),
    ("[metrics]\ngradient_steps = -1", "[metrics] gradient_steps: expected at least 0, got -1"),
    ("[metrics]\ngradient_steps = 2", "[metrics] gradient_steps: 2 steps begin with some that are not logged"),
    ("[metrics]\nrouting_step = -1", "[metrics] routing_step: expected at least 0, got -1"),
    *(
        (
            f"[metrics]\nrouting_step = {step}\n{text}",
            f"[metrics] routing_step: the routing of step {step} cannot {why}",
        )
        for step, text, why in (
            (15, NO_GRAPHS, "be recorded: metrics.log_freq = 10 does not log it: set 1"),
            (20, NO_GRAPHS + "steps = 19", "be recorded: training ends after 19 steps"),
            (20, NO_GRAPHS + "[compile]\nenable = true", "be recorded: set compile.enable = false"),
            (20, "", "be recorded: set training.disable_cuda_graphs = true"),
            (
                1,
                NO_GRAPHS + "[parallelism]\npipeline_parallel_degree = 2",
                "be recorded: not all stages of a pipeline",
            ),
        )
    ),
    ("[profiler]\nprofile_freq = 0", "[profiler] profile_freq: expected at least 1, got 0"),
    ("[profiler]\nenable_profiling = true\nprofile_freq = 2", "[profiler] profile_freq: 2 is less than"),
    ("[lr_scheduler]\nwarmup_steps = -1", "[lr_scheduler] warmup_steps: expected at least 0, got -1"),
    ("[lr_scheduler]\ndecay_ratio = 1.5", "[lr_scheduler] decay_ratio: expected from 0 to 1, got 1.5"),
    ("[lr_scheduler]\ndecay_type = 'step'", "[lr_scheduler] decay_type: expected one of 'linear'"),
    ("[training]\nsteps = -5", "[training] steps: expected at least 1, got -5"),
    ("[training]\nlocal_batch_size = 0", "[training] local_batch_size: expected at least 1, got 0"),
    ("[training]\nglobal_batch_size = 0", "[training] global_batch_size: expected at least 1 or -1, got 0"),
    ("[training]\nseq_len = 0", "[training] seq_len: expected at least 1, got 0"),
    ("[training]\nmax_norm = 0", "[training] max_norm: expected above 0, got 0"),
    ("[training]\ngc_freq = 0", "[training] gc_freq: expected at least 1, got 0"),
    (
        "[training]\nseq_len = 1022\n[loss]\nnum_chunks = 1\n[parallelism]\ntensor_parallel_degree = 4",
        "[training] seq_len",
    ),
    *(
        (f"[parallelism]\n{name} = 0", f"[parallelism] {name}: expected at least 1")
        for name in (
            "data_parallel_replicate_degree",
            "data_parallel_shard_degree",
            "tensor_parallel_degree",
            "context_parallel_degree",
            "pipeline_parallel_degree",
            "expert_parallel_degree",
        )
    ),
    ("[parallelism]\nspmd_backend = 'x'", "[parallelism] spmd_backend: expected one of"),
    ("[parallelism]\npipeline_parallel_schedule = 'x'", "[parallelism] pipeline_parallel_schedule: "),
    (
        "[parallelism]\npipeline_parallel_degree = 2",
        "[training] disable_cuda_graphs: CUDA graphs do not support pipeline",
    ),
    (
        "[parallelism]\ncontext_parallel_load_balancer = 'x'",
        "[parallelism] context_parallel_load_balancer: expected one",
    ),
    (
        "[mega_moe]\nbackend = 'cutlass'",
        "[mega_moe] backend: mega_moe.backend is 'cutlass'; it must be one of auto",
    ),
    ("[mega_moe]\ncompute_dtype = 'float16'", "[mega_moe] compute_dtype: "),
    ("[mega_moe]\nkeep = 'all'", "[mega_moe] keep: "),
    ("[mega_moe]\nmax_tokens = 0", "[mega_moe] max_tokens: "),
    ("[mega_moe]\nreserved_sms = -2", "[mega_moe] reserved_sms: "),
    ("[mega_moe]\nreserved_sms = 1000", "[mega_moe] reserved_sms: "),
    ("[mega_moe]\nbakend = 'auto'", "[mega_moe] bakend: unknown key; did you mean 'backend'?"),
    ("[device]\nkind = 'tpu'", "[device] kind: expected one of 'cuda', 'cpu', got 'tpu'"),
    ("[device]\nranks = 0", "[device] ranks: expected at least 1, got 0"),
    ("[device]\nkind = 'cpu'", "[training] disable_cuda_graphs: CUDA graphs"),
    ("[override]\nimports = 'a.b'", "[override] imports: expected a list"),
    (
        "[mega_moe]\nbackend = 'upstream'\n[parallelism]\nexpert_parallel_degree = 2",
        "[training] disable_cuda_graphs: CUDA graphs support only expert parallel token dispatcher",
    ),
]


@pytest.mark.parametrize("text, expected", ERRORS)
def test_each_error_is_one_sentence_that_names_the_key(text, expected, file):
    assert refusal(file(text)).startswith(expected)


@pytest.mark.parametrize(
    "model, expected",
    [
        ("", "[model] name: is missing and has no default"),
        ("[model]\nname = 'qwen3'", "[model] flavor: is missing and has no default"),
        (
            "[model]\nname = 'qwen33'\nflavor = '8B'",
            "[model] name: model 'qwen33' is not known; did you mean 'qwen3'?",
        ),
        ("[model]\nname = 'qwen3'\nflavor = '30B'", "[model] flavor: model 'qwen3' has no flavor '30B'"),
        (
            "[model]\nname = 'qwen3'\nflavor = '8B'",
            "[model] flavor: model 'qwen3' '8B' has no mixture of experts",
        ),
        (MODEL + "layers = 0", "[model] layers: expected at least 1, got 0"),
        (MODEL + "layers = 99", "[model] layers: model.layers is 99"),
        (MODEL + "attn_backend = 'flash4'", "[model] attn_backend: "),
        (MODEL + "flavour = 'x'", "[model] flavour: unknown key; did you mean 'flavor'?"),
    ],
)
def test_errors_of_the_model_section(model, expected, file):
    assert refusal(file(model=model)).startswith(expected)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (
            ["--training.stepz", "3"],
            "[training] stepz (from the command line): unknown key; did you mean 'steps'?",
        ),
        (
            ["--trainin.steps", "3"],
            "trainin (from the command line): unknown section; did you mean 'training'?",
        ),
        (
            ["--training.steps", "abc"],
            "[training] steps (from the command line): expected an integer, got 'abc'",
        ),
        (
            ["--training.steps", "1", "2"],
            "[training] steps (from the command line): expected an integer, got '1 2'",
        ),
        (["--training.steps"], "[training] steps (from the command line): needs a value: an integer"),
        (["--training.steps", "-3"], "[training] steps (from the command line): expected at least 1, got -3"),
        (
            ["--compile.enable", "yes"],
            "[compile] enable (from the command line): expected true or false, got 'yes'",
        ),
        (["--training", "3"], "training (from the command line): expected a table, got "),
        (["--optimizer.betas", "0.9 0.9"], "[optimizer] betas (from the command line): expected a list of 2"),
        (["--dump_folder.x", "1"], "dump_folder (from the command line): expected a string"),
    ],
)
def test_errors_of_the_command_line(arguments, expected, file):
    assert refusal(file(), *arguments).startswith(expected)


def test_an_argument_that_is_no_option(file):
    with pytest.raises(ConfigError, match=r"^command line: 'steps' is no option"):
        config.load(file(), ["steps"])


def test_files_that_cannot_be_read(tmp_path):
    assert refusal(tmp_path / "none.toml") == "no such file; give the path of a TOML file"
    assert refusal(tmp_path) == "cannot be read: Is a directory"
    path = tmp_path / "file.toml"
    path.write_text(MODEL + "\n[training\nsteps = 3")
    assert re.match(r"line 5, column \d+: malformed TOML: ", refusal(path))
    path.write_text(MODEL + "\n[model]\n")
    assert re.match(r"line 5, column \d+: malformed TOML: ", refusal(path))
    path.write_bytes(b"a = '\xff'")
    assert refusal(path) == "not a TOML file: byte 5 is not UTF-8"
    for text in ("a = " + "[" * 5000, "[" + ".".join("a" * 5000) + "]", "a = " + "9" * 5000):
        path.write_text(text)
        assert refusal(path).startswith("malformed TOML: ")


def test_a_byte_order_mark_is_no_part_of_the_file(file):
    path = file()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert config.load(path).model.name == "qwen3"


@pytest.mark.parametrize("text", ["", *(text for text, _, _ in PLACES)])
def test_a_saved_configuration_loads_as_it_was(text, file, tmp_path):
    first = config.load(file(text), ["--override.imports", "a.b", 'c.d={"x": 1}', "--model.layers", "2"])
    saved = tmp_path / "saved.toml"
    saved.write_text(config.to_toml(first))
    second = config.load(saved)
    for field in dataclasses.fields(RunConfig):
        if field.name != "model_spec":
            assert getattr(second, field.name) == getattr(first, field.name), field.name
    models = [re.sub(" at 0x[0-9a-f]+", "", json.dumps(c.model_spec.model.to_dict())) for c in (first, second)]
    assert models[0] == models[1]
    assert config.to_toml(second) == config.to_toml(first)


STDLIB = "[tokenizer]\ntype = 'StdlibTokenizer'\n"
LAYERS = [f"layers.{i}" for i in range(8)]
CPU = "[device]\nkind = 'cpu'\n" + NO_GRAPHS


@pytest.mark.parametrize(
    "text, world, expected",
    [
        (
            "[parallelism]\ntensor_parallel_degree = 2",
            3,
            "parallelism: does not fit 3 ranks: Invalid parallel dims",
        ),
        (
            "[parallelism]\nexpert_parallel_degree = 4",
            2,
            "[parallelism] expert_parallel_degree: 4 does not divide",
        ),
        (
            "[parallelism]\nexpert_parallel_degree = 3",
            3,
            "[parallelism] expert_parallel_degree: 3 does not divide the model's 64",
        ),
        ("[training]\nglobal_batch_size = 12", 2, "[training] global_batch_size: 12 is no multiple of"),
        (
            "[checkpoint]\nenable = true\ncreate_seed_checkpoint = true",
            2,
            "[checkpoint] create_seed_checkpoint: needs one rank, not 2",
        ),
        (
            "[checkpoint]\nenable = true\ninitial_load_path = '/nowhere'",
            1,
            "[checkpoint] initial_load_path: '/nowhere' is no folder",
        ),
        ('hf_assets_path = "/nowhere"', 2, "hf_assets_path: '/nowhere' is no folder"),
        ('hf_assets_path = "{here}"', 2, "hf_assets_path: '{here}' holds no tokenizer that can be read: "),
        (STDLIB + "vocab_size = 5000", 2, "[tokenizer] vocab_size: a tokenizer of 5000 tokens is too large"),
        (
            "[parallelism]\ntensor_parallel_degree = 2\npipeline_parallel_degree = 2\n" + NO_GRAPHS,
            3,
            "parallelism: does not fit 3 ranks: ",
        ),
        (
            "[parallelism]\ndata_parallel_replicate_degree = 3",
            2,
            "parallelism: does not fit 2 ranks: data_parallel_replicate * ",
        ),
        # What TorchTitan itself cannot do, in its words, before a rank starts.
        (
            "[parallelism]\ntensor_parallel_degree = 32",
            32,
            "parallelism: tensor_parallel_degree (32) must divide n_heads (16)",
        ),
        (
            "[parallelism]\npipeline_parallel_degree = 16\n" + NO_GRAPHS + "local_batch_size = 16",
            16,
            "[parallelism] pipeline_parallel_degree: Number of stages (16) cannot be greater than",
        ),
        (
            "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'InterleavedZeroBubble'\n"
            "pipeline_parallel_layers_per_stage = 5\n" + NO_GRAPHS,
            2,
            "[parallelism] pipeline_parallel_degree: Multi-stage schedule requires at least 2 stages per rank",
        ),
        (
            "[mega_moe]\nmax_tokens = 8",
            2,
            "[mega_moe] max_tokens: 8 is less than the 16384 tokens a rank routes",
        ),
        (
            "[mega_moe]\nmax_tokens = 1000000",
            2,
            "[mega_moe] max_tokens: 1000000 is more than 8 times the 16384 tokens a rank routes",
        ),
        *(
            (
                f"[parallelism]\npipeline_parallel_degree = {degree}\nmodule_fqns_per_model_part = {parts}\n"
                + NO_GRAPHS,
                2,
                f"[parallelism] module_fqns_per_model_part: {why}",
            )
            for degree, parts, why in (
                (1, [["tok_embeddings"]], "has no effect with pipeline_parallel_degree = 1"),
                (2, [["tok_embeddings"]], "1 parts do not divide over the 2 ranks"),
                (
                    2,
                    [["tok_embeddings"], [*LAYERS, "norm", "output"]],
                    "the parts have to name each of tok_embeddings, ",
                ),
                (2, [["tok_embeddings"], [*LAYERS[1:], "norm", "lm_head"]], "the parts have to name each of"),
                (2, [LAYERS, [*LAYERS, "tok_embeddings", "norm", "lm_head"]], "the parts have to name each of"),
            )
        ),
        ("[mega_moe]\nbackend = 'triton'\n" + CPU, 2, "[mega_moe] backend: 'triton' needs a GPU"),
        ("[mega_moe]\nbackend = 'deep_gemm'\n" + CPU, 2, "[mega_moe] backend: 'deep_gemm' needs a GPU"),
        *(
            (f"[override]\nimports = ['{name}']", 2, f"[override] imports: {why}")
            for name, why in (
                ("no_such_module.f", "Failed to import override target 'no_such_module.f'"),
                (
                    "titan_mega_moe.routed_experts.f",
                    "override.imports target 'titan_mega_moe.routed_experts.f' names no",
                ),
                ("x", "override.imports target 'x' must be a 'module.function' path"),
            )
        ),
        (
            STDLIB + "[dataloader]\ndataset = 'stdlib'\ndataset_path = '{here}'",
            2,
            "[dataloader] dataset_path: no Python source in {here}",
        ),
        (
            STDLIB + "[dataloader]\ndataset = 'stdlib'\ndataset_path = '/nowhere'",
            2,
            "[dataloader] dataset_path: no Python source in /nowhere",
        ),
        (
            STDLIB + "[dataloader]\ndataset = 'c4'\ndataset_path = '/nowhere'",
            2,
            "[dataloader] dataset_path: '/nowhere' is not there",
        ),
        (
            STDLIB + "[dataloader]\ndataset = 'c4_test'",
            2,
            "[dataloader] dataset_path: 'tests/assets/c4_test' is not there",
        ),
        (
            STDLIB + "[dataloader]\ndataset = 'c4'\n[validator]\nenable = true\n"
            "[validator.dataloader]\ndataset = 'stdlib_validation'\ndataset_path = '{here}'",
            2,
            "[validator.dataloader] dataset_path: no held-out Python source in {here}",
        ),
        (STDLIB + "[checkpoint]\nenable = true\nload_step = 7", 2, "[checkpoint] load_step: "),
        (
            STDLIB + "[checkpoint]\nenable = true\nfolder = '/dev/null'",
            2,
            "[checkpoint] folder: '/dev/null' is there and is no",
        ),
    ],
)
def test_what_does_not_fit_the_number_of_ranks(text, world, expected, file, tmp_path):
    path = file(text.replace("{here}", str(tmp_path)))
    loaded = config.load(path)
    with pytest.raises(ConfigError) as error:
        config.check_world(loaded, world, path)
    assert str(error.value).startswith(f"{path}: {expected.replace('{here}', str(tmp_path))}")


def test_without_the_librarys_source_its_tokenizer_is_refused(file, tmp_path, monkeypatch):
    monkeypatch.setattr(data.DATASETS["stdlib"], "path", str(tmp_path))
    path = file(STDLIB)
    with pytest.raises(ConfigError, match=r"\[tokenizer\] type: no Python source in"):
        config.check_world(config.load(path), 1, path)


@pytest.mark.parametrize(
    "text, ranks",
    [
        ("", 1),
        ("[parallelism]\nexpert_parallel_degree = 4", 4),
        ("[parallelism]\nexpert_parallel_degree = 4\ntensor_parallel_degree = 2", 4),
        ("[parallelism]\ndata_parallel_shard_degree = 3\ndata_parallel_replicate_degree = 2", 6),
        ("[device]\nranks = 5", 5),
    ],
)
def test_ranks_are_the_fewest_that_hold_the_degrees(text, ranks, file):
    assert config.load(file(text)).ranks() == ranks


def test_torchtitans_warning_of_its_own_default_is_not_heard(file, caplog, monkeypatch):
    needless = "initial_load_model_only=True has no effect"
    dataclasses.replace(config.load(file(), ["--checkpoint.enable"]).checkpoint)
    assert needless not in caplog.text
    monkeypatch.setattr(logging.getLogger(), "filters", [])
    CheckpointManager.Config()
    assert needless in caplog.text
