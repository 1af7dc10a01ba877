"""`titan-mega-moe train FILE`: torchtitan's training of the model that a TOML file describes.

Under torchrun or as a task of srun (RANK is set) this process is one rank. Otherwise it checks the configuration, saves
it in the run's dump folder and starts the ranks from there: on this machine, or on all nodes of its SLURM allocation.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from titan_mega_moe import config, device, slurm, stop
from titan_mega_moe.config import ConfigError
from titan_mega_moe.launch import launch

if TYPE_CHECKING:
    from titan_mega_moe.config.run_config import RunConfig

_RANKS_PER_CORE = 16  # more would wait for each other, and a process takes half a GiB

USAGE = """usage: titan-mega-moe train FILE [--print-config] [--section.key value ...]

  FILE              a TOML file, see train_configs/; files of torchtitan 0.1 and 0.2 are read too
  --print-config    print the whole resolved configuration as TOML and stop
  --section.key     any key of the file: --training.steps 20 --mega_moe.backend upstream --model.layers 4"""


def main(args: list[str]) -> int:
    """Train. Returns the exit code. Raises ConfigError for input that cannot be trained from."""
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    path, *overrides = args
    if not path or path.startswith("-"):
        raise ConfigError(f"titan-mega-moe train: the TOML file comes first, got {path!r}")
    if "--print-config" in overrides:
        overrides.remove("--print-config")
        print(config.to_toml(config.load(path, overrides)), end="")
        return 0
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # As TorchTitan's launch script: without it free memory that fits no request adds a tenth and more.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    prepare_device(path, overrides)
    from torchtitan.tools.logging import init_logger, logger

    init_logger()
    under_torchrun = "RANK" in os.environ
    if not under_torchrun:
        logger.setLevel("ERROR")  # what torchtitan says of the configuration, the ranks will say
    resolved = config.load(path, overrides)
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun else rank_count(resolved, path)
    config.check_world(resolved, ranks, path)
    saved = Path(resolved.dump_folder) / "config.toml"
    if not under_torchrun:
        if slurm.allocated() and (reason := slurm.crossing_reason(resolved, ranks)) is not None:
            raise ConfigError(f"{path}: [parallelism] expert_parallel_degree: {reason}")
        save(resolved, saved)
        start = slurm.launch if slurm.allocated() else launch
        return start(["-m", "titan_mega_moe", "train", str(saved)], ranks, saved.with_name("ranks"))
    if os.environ["RANK"] == "0" and Path(path).absolute() != saved.absolute():
        save(resolved, saved)
    return train(resolved)


def prepare_device(path: str | Path, overrides: list[str]) -> None:
    """Prepare this process for the device that the file asks for; ConfigError if it cannot be."""
    kind = config.device_kind(path, overrides)
    if kind == "cuda" and slurm.allocated():
        return  # the ranks do: a login node that holds an allocation has no GPU
    try:
        device.prepare(kind)
    except RuntimeError as error:
        config.load(path, overrides)  # what is wrong with the file is said first
        raise ConfigError(f"{path}: [device] kind: {error}") from None


def rank_count(resolved: "RunConfig", path: str | Path) -> int:
    """How many ranks to start here: [device] ranks, else one per GPU, or what the parallel degrees need.

    Raises ConfigError where they cannot run here, or would train nothing.
    """
    if resolved.comm.mode == "fake_backend":
        text = "'fake_backend' plays one rank and trains nothing: take it out; titan-mega-moe doctor plans a run"
        raise ConfigError(f"{path}: [comm] mode: {text}")
    if slurm.allocated():
        try:
            return slurm.rank_count(resolved)
        except ValueError as error:
            raise ConfigError(f"{path}: [device] ranks: {error}") from None
    if resolved.device.kind == "cpu":
        ranks, most = resolved.ranks(), _RANKS_PER_CORE * (os.cpu_count() or 1)
        if ranks > most:
            raise ConfigError(f"{path}: [device] ranks: {ranks} are too many for this machine's CPU: at most {most}")
        return ranks
    import torch

    visible = torch.cuda.device_count()
    ranks = resolved.device.ranks or visible
    if ranks > visible:
        raise ConfigError(f"{path}: [device] ranks: {ranks} ranks need as many GPUs and {visible} are visible")
    return ranks


def save(resolved: "RunConfig", path: Path) -> None:
    """Write `resolved` as TOML that `train` takes, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(config.to_toml(resolved))
        os.replace(file.name, path)
    except OSError as error:
        raise ConfigError(f"dump_folder: {str(path.parent)!r} cannot be written: {error.strerror}") from None


def train(resolved: "RunConfig") -> int:
    """Train on this rank, as torchtitan's own train.py does, and leave no process group behind.

    Returns the exit code: 0, stop.SAVE_FAILED, or the trainer's if a signal stopped it.
    """
    import torch
    from torch.distributed.elastic.multiprocessing.errors import record
    from torchtitan.observability import structured_logger as sl

    from titan_mega_moe.trainer import SaveFailed, StoppableTrainer

    @record
    def run() -> int:
        sl.init_structured_logger(
            source="training",
            output_dir=resolved.dump_folder,
            enable=resolved.debug.enable_structured_logging,
        )
        trainer = StoppableTrainer(resolved)
        try:
            if resolved.checkpoint.create_seed_checkpoint:
                trainer.checkpointer.save(curr_step=0, last_step=True)
            else:
                trainer.train()
        except SaveFailed as failed:
            print(failed, file=sys.stderr)
            return stop.SAVE_FAILED  # not after the others: they may wait for this rank
        finally:
            trainer.close()
        if torch.distributed.is_initialized():
            if trainer.exit_code != 0:
                torch.distributed.barrier()  # srun ends the others when the first one ends with such a code
            torch.distributed.destroy_process_group()
        return trainer.exit_code

    return run() or 0
