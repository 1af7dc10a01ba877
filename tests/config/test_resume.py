"""A checkpoint that training cannot go on from is told before any rank starts."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer import CheckpointManager

from titan_mega_moe.config import resume
from titan_mega_moe.config.source import KeyProblem

STATE = {"w": torch.ones(1000), "train_state": {"step": torch.tensor(3)}}


@pytest.fixture
def folder(tmp_path):
    """Steps 1 and 3 whole; 5 was cut short before its metadata."""
    for step in (1, 3):
        save(tmp_path, step)
    save(tmp_path, 5)
    (tmp_path / "checkpoint" / "step-5" / ".metadata").unlink()
    return tmp_path


def save(folder, step, state=STATE):
    dcp.save(dict(state), checkpoint_id=folder / "checkpoint" / f"step-{step}", no_dist=True)


def check(folder, readers=2, **fields):
    resume.check(CheckpointManager.Config(enable=True, **fields), str(folder), readers)


def refusal(folder, **fields):
    with pytest.raises(KeyProblem) as problem:
        check(folder, **fields)
    return f"{problem.value.key[-1]}: {problem.value.text}"


def test_whole_checkpoints_and_none_at_all_are_no_problem(folder, tmp_path):
    check(folder)
    check(folder, load_step=1)
    check(tmp_path / "new")


def test_a_step_that_is_not_there(folder):
    assert refusal(folder, load_step=7).endswith("has no checkpoint of step 7")
    assert refusal(folder / "new", load_step=7).startswith("load_step: ")


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "checkpoint").write_text("")
    assert refusal(tmp_path).endswith("is there and is no folder")


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_damaged_data(harm, folder):
    (data,) = (folder / "checkpoint" / "step-3").glob("*.distcp")
    size = data.stat().st_size
    data.unlink()
    if harm == "cut":
        data.write_bytes(b"x" * 100)
    said = refusal(folder)
    assert f"step-3' is damaged: {data.name} has {100 if harm == 'cut' else 0} of " in said
    assert int(said.split(" of ")[1].split()[0]) <= size
    check(folder, load_step=1)


def test_damaged_metadata(folder):
    (folder / "checkpoint" / "step-3" / ".metadata").write_bytes(b"junk")
    assert "step-3' has metadata that cannot be read" in refusal(folder)


def test_the_model_alone(folder):
    save(folder, 9, {"w": STATE["w"]})
    said = refusal(folder)
    assert "step-9' holds the model alone" in said and "unless checkpoint.last_save_model_only = false" in said
    check(folder, load_step=3)
    check(folder, exclude_from_loading=["train_state"])
    save(folder / "seed", 0, {"w": STATE["w"]})
    check(folder / "seed")


def test_other_ranks_than_had_read_the_data(folder):
    read = {f"dp_rank_{rank}": torch.ones(1) for rank in range(2)}
    save(folder, 9, {**STATE, "dataloader": {**read, "world_size": torch.tensor(2)}})
    check(folder)
    said = refusal(folder, readers=4)
    assert said.startswith("exclude_from_loading: ") and "how far 2 ranks had read the data" in said
    check(folder, readers=4, exclude_from_loading=["dataloader"])
