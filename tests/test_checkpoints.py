"""Weights and checkpoints are upstream's: they travel between Hugging Face, upstream's layer and ours."""

import itertools
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import filesystem
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config import ConfigManager, ParallelismConfig
from torchtitan.trainer import Trainer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests import ranks
from tests.training import Run, Slices, config, record, spec, upstream, upstream_casts
from titan_mega_moe.config import resume
from titan_mega_moe.op import reference
from titan_mega_moe.trainer import SaveFailed, StoppableTrainer

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


def settings_of(run: Run, folder: str, **checkpoint: Any) -> Trainer.Config:
    """Four rows a step over the ranks there are; the whole state is saved."""
    world = torch.distributed.get_world_size()
    batch = {"local_batch_size": 4 // world, "global_batch_size": 4}
    settings = config(replace(run, training=batch), folder)
    settings.dataloader = Slices.Config()
    settings.checkpoint = CheckpointManager.Config(
        **{"enable": True, "interval": 2, "last_save_model_only": False, **checkpoint}
    )
    return settings


def losses(run: Run, folder: str, **checkpoint: Any) -> list[float]:
    with upstream_casts(False):
        return record(settings_of(run, folder, **checkpoint)).losses


def ep(degree: int) -> Run:
    return replace(TINY, parallelism={"expert_parallel_degree": degree, "spmd_backend": "partial_dtensor"})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of four steps on two ranks, with asynchronous saves: its folder and losses."""
    folder = str(tmp_path_factory.mktemp("saved"))
    whole = ranks.run(2, losses, ep(2), folder, async_mode="async", timeout=280)[0]
    assert len(whole) == 4
    return folder, whole


def test_upstream_goes_on_from_our_checkpoint(saved):
    folder, whole = saved
    after = ranks.run(2, losses, upstream(ep(2)), folder, load_step=2, load_only=True, timeout=280)[0]
    assert after == pytest.approx(whole[2:], rel=1e-5)


def test_we_go_on_from_upstreams_checkpoint(tmp_path):
    whole = ranks.run(2, losses, upstream(ep(2)), str(tmp_path), timeout=280)[0]
    after = ranks.run(2, losses, ep(2), str(tmp_path), load_step=2, load_only=True, timeout=280)[0]
    assert after == pytest.approx(whole[2:], rel=1e-5)


@pytest.mark.parametrize("world, degree", [(1, 1), (4, 2), (4, 4)])
def test_goes_on_with_other_ranks_and_degrees(saved, world, degree):
    folder, whole = saved
    for after in ranks.run(world, losses, ep(degree), folder, load_step=2, load_only=True, timeout=280):
        assert after == pytest.approx(whole[2:], rel=1e-5)


def copy_of_step_2(folder: str, to: Path) -> str:
    shutil.copytree(Path(folder, "checkpoint", "step-2"), to / "checkpoint" / "step-2")
    return str(to)


def cannot_write(folder: str, mode: str) -> str:
    """Rank 1's files cannot grow beyond three megabytes; what the training ends with."""

    class Trainer(StoppableTrainer):
        def train_step(self, *args: Any) -> None:
            super().train_step(*args)
            if torch.distributed.get_rank() == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, resource.RLIM_INFINITY))

    with pytest.raises(SaveFailed) as ended:
        try:
            record(settings_of(ep(2), folder, interval=1, async_mode=mode), Trainer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(ended.value)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_ends_training_with_one_sentence(saved, mode, tmp_path):
    """And it goes on where it was once there is room."""
    folder = copy_of_step_2(saved[0], tmp_path)
    for said in ranks.run(2, cannot_write, folder, mode, timeout=280):
        assert said.startswith(f"checkpoint: rank 1 could not write to '{folder}/checkpoint': ")
        assert said.endswith("and the same command goes on from step 2, the last that is whole")
        assert " GiB are free there)" in said and len(said.splitlines()) == 1
    after = ranks.run(2, losses, ep(2), folder, interval=1, async_mode=mode, timeout=280)[0]
    assert after == pytest.approx(saved[1][2:], rel=1e-5)
    assert resume.latest(folder + "/checkpoint") == 4


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


MODES = ("disabled", "async")  # of a save, each in a folder of that name


def alone(body: Callable[..., Any], folder: str) -> Any:
    """Each rank for itself: a training of one rank with a mode of its own."""
    mode = MODES[torch.distributed.get_rank()]
    torch.distributed.destroy_process_group()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/{mode}/{body.__name__}", rank=0, world_size=1
    )
    return body(ep(1), f"{folder}/{mode}", interval=1, async_mode=mode)


def killed(run: Run, folder: str, **checkpoint: Any) -> None:
    """This process ends in the middle of a file of its first save, once the other's is there too."""
    write, calls = filesystem._write_item, itertools.count()

    def last(transforms: Any, stream: Any, *rest: Any) -> Any:
        if next(calls) == 20:
            stream.write(b"half")
            stream.flush()
            Path(folder, "cut").touch()
            while not all(Path(folder).with_name(mode).joinpath("cut").exists() for mode in MODES):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(transforms, stream, *rest)

    filesystem._write_item = last
    losses(run, folder, **checkpoint)


def test_killed_in_a_save_it_goes_on_from_the_last_whole_checkpoint(saved, tmp_path):
    for mode in MODES:
        copy_of_step_2(saved[0], tmp_path / mode)
    with pytest.raises(AssertionError, match="the process died"):
        ranks.run(2, alone, killed, str(tmp_path), timeout=120)
    cut = [tmp_path / mode / "checkpoint" / "step-3" for mode in MODES]
    assert all(any(step.iterdir()) and not (step / ".metadata").exists() for step in cut)
    for after in ranks.run(2, alone, losses, str(tmp_path), timeout=120):
        assert after == pytest.approx(saved[1][2:], rel=1e-5)
    for step in cut:
        assert (step / ".metadata").exists() and resume.latest(str(step.parent)) == 4
