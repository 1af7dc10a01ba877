"""Weights and checkpoints are upstream's: they travel between Hugging Face, upstream's layer and ours."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config import ConfigManager, ParallelismConfig
from torchtitan.trainer import Trainer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests import ranks
from tests.training import Run, config, record, spec, upstream, upstream_casts
from titan_mega_moe.op import reference
from titan_mega_moe.trainer import StoppableTrainer

TINY = Run(layers=2, hidden_dim=64, steps=4)


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    """A tiny random Qwen3-MoE as transformers saves it: the model, and the tensors of its file."""
    torch.manual_seed(0)
    oracle = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=2048,
            hidden_size=256,
            moe_intermediate_size=TINY.hidden_dim,
            num_hidden_layers=TINY.layers,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            num_experts=64,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            rope_theta=1000000.0,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            use_sliding_window=False,
        )
    ).eval()
    folder = tmp_path_factory.mktemp("qwen3_moe")
    oracle.save_pretrained(folder)
    return oracle, load_file(folder / "model.safetensors"), folder


def test_logits_equal_transformers(hugging_face):
    oracle, tensors, folder = hugging_face
    built = spec(TINY)
    model = built.model.build().eval()
    adapter = built.state_dict_adapter(built.model, str(folder))
    loaded = model.load_state_dict(adapter.from_hf(dict(tensors)), strict=False)
    assert not loaded.unexpected_keys
    assert all("expert_bias" in key or "rope" in key for key in loaded.missing_keys), loaded.missing_keys
    tokens = torch.randint(0, 2048, (2, 24))
    positions = torch.arange(24).expand(2, 24)
    with torch.no_grad():
        ours = model(tokens, positions=positions, attention_masks=model.get_attention_masks(positions))
        theirs = oracle(tokens).logits
    # Measured: 4.8e-7, of logits up to 1.5.
    assert (ours - theirs).abs().max() < 1e-4, (ours - theirs).abs().max()

    exported = adapter.to_hf(model.state_dict())
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in tensors.items())


def interrupted(first: Run, second: Run, folder: str) -> tuple[list[float], list[float]]:
    """Losses of a run that stops after two of its steps, and of the one that goes on from its checkpoint."""
    losses = []
    for run, stop in ((first, 2), (second, 4)):
        settings = config(run, folder)
        settings.checkpoint = CheckpointManager.Config(
            enable=True, interval=2, last_save_model_only=False, enable_first_step_checkpoint=False
        )
        with upstream_casts(False):
            losses.append(record(settings, stop).losses)
    return losses[0], losses[1]


def uninterrupted(run: Run, folder: str) -> list[float]:
    with upstream_casts(False):
        return record(config(run, folder)).losses


@pytest.mark.parametrize("direction", ["upstream_to_ours", "ours_to_upstream"])
def test_checkpoints_are_exchangeable(direction, tmp_path):
    ours = replace(TINY, parallelism={"expert_parallel_degree": 2, "spmd_backend": "partial_dtensor"})
    first, second = (upstream(ours), ours) if direction == "upstream_to_ours" else (ours, upstream(ours))
    before, after = ranks.run(2, interrupted, first, second, str(tmp_path / "exchanged"), timeout=280)[0]
    whole = ranks.run(2, uninterrupted, first, str(tmp_path / "whole"), timeout=280)[0]
    assert len(before) == len(after) == 2 and len(whole) == 4
    assert before + after == pytest.approx(whole, rel=1e-5)


def from_the_command_line(folder: str) -> Trainer.Config:
    options = '{"backend": "reference", "compute_dtype": "float32"}'
    layer = f"titan_mega_moe.routed_experts.mega_moe={options}"
    registry = ["--module", "tests.foreign_registry", "--config", "tiny", "--dump_folder", folder]
    return ConfigManager().parse_args([*registry, "--override.imports", layer])


def gives_up(way: str, step: int, folder: str, **parallelism: Any) -> tuple[str, list[str], int]:
    """A training whose kernels give up in that step: its error, its checkpoints, its changes of the weights."""
    settings = from_the_command_line(folder) if way == "override" else config(TINY, folder)
    settings.parallelism = ParallelismConfig(spmd_backend="partial_dtensor", **parallelism)
    settings.training.local_batch_size = 2
    settings.checkpoint = CheckpointManager.Config(enable=True, interval=2, enable_first_step_checkpoint=True)
    trainer = StoppableTrainer(settings) if way == "train" else settings.build()

    def check(wait: bool) -> None:
        # As on a GPU: only who waits for the device knows of the step that it still works on.
        if trainer.step > step or (trainer.step == step and wait):
            raise RuntimeError("waited 60 s for the combined sums of rank 1")

    said = ""
    reference.BACKEND.check = check
    try:
        trainer.train()
    except RuntimeError as error:
        said = str(error)
    finally:
        del reference.BACKEND.check
        trainer.close()
    changes = {int(state["step"]) for inner in trainer.optimizers for state in inner.state.values()}
    return said, sorted(os.listdir(folder + "/checkpoint")) if os.path.isdir(folder + "/checkpoint") else [], *changes


def in_all_ways(folder: str) -> None:
    for way in ("train", "module", "override"):
        said = "waited 60 s for the combined sums of rank 1"
        assert gives_up(way, 1, f"{folder}/{way}_1") == (said, [], 1), way
        # The third step is not saved, so it is found in the fourth, before that one changes a weight.
        assert gives_up(way, 3, f"{folder}/{way}_3") == (said, ["step-1", "step-2"], 3), way


def in_a_pipeline(folder: str) -> None:
    pipeline = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
    said, saved, _ = gives_up("module", 2, folder, **pipeline)
    assert said.startswith("waited 60 s") and saved == ["step-1"]


def test_a_step_whose_kernels_gave_up_is_not_saved(tmp_path):
    """With our command, and with TorchTitan's own Trainer: a registry with the layer in it, and the override."""
    ranks.run(1, in_all_ways, str(tmp_path), timeout=280)
    ranks.run(2, in_a_pipeline, str(tmp_path / "pipeline"), timeout=120)
