"""Every TOML of the repository loads, and says what torchtitan's own registry says of the same flavor."""

import dataclasses
from pathlib import Path

import pytest
import tomli
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.deepseek_v3 import config_registry as deepseek_v3
from torchtitan.models.qwen3 import config_registry as qwen3
from torchtitan.trainer import Trainer

from titan_mega_moe import config
from titan_mega_moe.routed_experts import MegaRoutedExperts

ROOT = Path(__file__).parents[2]
TOMLS = sorted(path.relative_to(ROOT) for path in ROOT.glob("**/*.toml") if not {".venv", "outputs"} & {*path.parts})
SHIPPED = [path for path in TOMLS if path.parts[0] == "train_configs"]

# What a shipped file sets otherwise than torchtitan, and why: the layer is for experts spread over ranks, and
# torchtitan's layer, which the same file trains with backend "upstream", cannot be captured in a CUDA graph.
DIFFERENT = {"parallelism.expert_parallel_degree", "training.disable_cuda_graphs"}


@pytest.mark.parametrize("path", TOMLS, ids=str)
def test_every_toml_of_the_repository_parses(path):
    tomli.loads((ROOT / path).read_text())


def test_the_large_models_have_a_file_each():
    models = {(loaded.model.name, loaded.model.flavor) for loaded in map(config.load, (ROOT / p for p in SHIPPED))}
    assert models >= {
        ("qwen3", "30B-A3B"),
        ("qwen3", "235B-A22B"),
        ("deepseek_v3", "16B"),
        ("deepseek_v3", "671B"),
    }


@pytest.mark.parametrize("path", SHIPPED, ids=str)
@pytest.mark.parametrize("backend", ["auto", "upstream"])
def test_every_shipped_file_trains_either_layer(path, backend):
    loaded = config.load(ROOT / path, ["--mega_moe.backend", backend])
    node = RoutedExperts.Config if backend == "upstream" else MegaRoutedExperts.Config
    assert any(loaded.model_spec.traverse(node))


@pytest.mark.parametrize(
    "name, upstream",
    [
        ("qwen3_30b_a3b", qwen3.qwen3_30b_a3b),
        ("deepseek_v3_16b", deepseek_v3.deepseek_v3_16b),
        ("deepseek_v3_671b", deepseek_v3.deepseek_v3_671b),
    ],
)
def test_values_are_those_of_torchtitans_registry(name, upstream):
    ours, theirs = config.load(ROOT / "train_configs" / f"{name}.toml"), upstream()
    assert (ours.model.name, ours.model.flavor) == (theirs.model_spec.name, theirs.model_spec.flavor)
    for field in dataclasses.fields(Trainer.Config):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name in ("training", "parallelism"):
            for part in dataclasses.fields(other):
                if f"{field.name}.{part.name}" not in DIFFERENT:
                    assert getattr(mine, part.name) == getattr(other, part.name), part.name
        elif field.name == "activation_checkpoint" and name == "deepseek_v3_16b":
            assert isinstance(mine, FullAC.Config)  # selective checkpointing leaves no room for the layer's rows
        elif field.name == "metrics":
            assert other.to_dict().items() <= mine.to_dict().items()  # ours has more keys
        elif field.name not in ("model_spec", "dump_folder"):
            assert mine == other, field.name


NODES = [("qwen3_30b_a3b", 8), ("deepseek_v3_16b", 8)]
NODES += [(name, ranks) for name in ("qwen3_30b_a3b_multinode", "qwen3_235b_a22b") for ranks in (32, 64, 128)]


@pytest.mark.parametrize("name, world_size", NODES)
def test_the_parallel_degrees_fit_the_nodes_that_the_file_names(name, world_size):
    path = ROOT / "train_configs" / f"{name}.toml"
    config.check_world(config.load(path, ["--tokenizer.type", "StdlibTokenizer"]), world_size, path)
