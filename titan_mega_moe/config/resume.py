"""What a run will find in its checkpoint folder, told before any rank starts.

TorchTitan takes the highest step with metadata, so a save that was cut short is passed over. A checkpoint whose
files were cut or lost afterwards, or that holds the model alone, it meets in the middle of loading.
"""

import os
import re
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.tools import filesystem

from titan_mega_moe.config.source import KeyProblem


def check(checkpoint: BaseCheckpointManager.Config, dump_folder: str, readers: int) -> None:
    """Raise KeyProblem if the run cannot write its checkpoints, or cannot go on from the one it will load.

    `readers` is the data-parallel degree: that many ranks read data, each from a place of its own.
    """
    folder = os.path.join(dump_folder, checkpoint.folder)
    if not checkpoint.enable or filesystem.is_remote(folder):
        return
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise KeyProblem(("checkpoint", "folder"), f"{folder!r} is there and is no folder")
    step = checkpoint.load_step if checkpoint.load_step != -1 else latest(folder)
    saved = Path(folder, f"step-{step}")
    if checkpoint.load_step != -1 and not saved.is_dir():
        raise KeyProblem(("checkpoint", "load_step"), f"{folder!r} has no checkpoint of step {step}")
    if not (saved / ".metadata").is_file():
        return
    try:
        metadata = FileSystemReader(saved).read_metadata()
    except Exception as error:  # a pickle: anything may come of a damaged one
        reason: str | None = f"has metadata that cannot be read ({type(error).__name__})"
    else:
        reason = _refusal_reason(metadata, saved, step, checkpoint.exclude_from_loading)
    if reason:
        elsewhere = "name an earlier step as load_step, or another dump_folder"
        raise KeyProblem(("checkpoint", "folder"), f"{str(saved)!r} {reason}: {elsewhere}")
    before = sum(name.startswith("dataloader.dp_rank_") for name in metadata.state_dict_metadata)
    if before not in (0, readers) and step != 0 and "dataloader" not in checkpoint.exclude_from_loading:
        text = (
            f"{str(saved)!r} says how far {before} ranks had read the data, which TorchTitan cannot divide among "
            f'{readers}: set exclude_from_loading = ["dataloader"] to go on with the data from its beginning, or '
            f"keep a data-parallel degree of {before}"
        )
        raise KeyProblem(("checkpoint", "exclude_from_loading"), text)


def latest(folder: str) -> int:
    """The step of the last whole checkpoint in `folder`, as TorchTitan finds it; -1 if there is none."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = [int(found[1]) for name in names if (found := re.search(r"step-(\d+)", name))]
    marks = (".metadata", "model.safetensors.index.json")
    return max((s for s in steps if any(Path(folder, f"step-{s}", m).is_file() for m in marks)), default=-1)


def _refusal_reason(metadata: Metadata, saved: Path, step: int, excluded: list[str]) -> str | None:
    ends: dict[str, int] = {}
    for part in (metadata.storage_data or {}).values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in sorted(ends.items()):
        size = (saved / name).stat().st_size if (saved / name).is_file() else 0
        if size < end:
            return f"is damaged: {name} has {size} of {end} bytes"
    held = {name.split(".")[0] for name in metadata.state_dict_metadata}
    # Step 0 is a seed checkpoint, of which only the model is loaded.
    if step != 0 and "train_state" not in held and "train_state" not in excluded:
        return (
            "holds the model alone, as the last step of a run does unless checkpoint.last_save_model_only = false, "
            "and training cannot go on from it"
        )
    return None
