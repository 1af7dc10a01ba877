"""TorchTitan's Trainer, which a signal can stop after a step, and a full disk with one sentence."""

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import _get_default_store
from torchtitan.config.function import Function
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_mega_moe import stop
from titan_mega_moe.config import resume
from titan_mega_moe.metrics import RecordedMetrics
from titan_mega_moe.op import backends


class SaveFailed(SystemExit):
    """A checkpoint could not be written; its text is one sentence on why and what to do.

    A SystemExit, because torch records an Exception that leaves a rank as a crash, with its traceback.
    """


class StoppableTrainer(Trainer):
    """On one of stop.SIGNALS it stops after a step that all ranks agree on, with a checkpoint to go on from.

    `exit_code` is then stop.EXIT_CODE, and 128 + signal without checkpoints: that run would begin anew.
    Raises RuntimeError at the end if kernels of the last step gave up waiting for a peer; the layer does of any other
    step, and before it is saved. Raises SaveFailed where a checkpoint could not be written.
    """

    exit_code = 0

    def __init__(self, config: Trainer.Config) -> None:
        super().__init__(config)
        metrics = self.metrics_processor
        if config.profiler.trace_post_processor is None and isinstance(metrics, RecordedMetrics):
            config.profiler.trace_post_processor = Function.Config(fn=metrics.log_share)
        save = self.checkpointer.save
        setattr(self.checkpointer, "save", lambda *args, **kwargs: self._written(save, *args, **kwargs))  # noqa: B010

    def train(self) -> None:
        self._stop = stop.Agreement(_get_default_store(), torch.distributed.get_rank()) if stop.listening() else None
        super().train()
        backends.check(wait=True)

    def should_continue_training(self) -> bool:
        if not super().should_continue_training():
            return False
        if self._stop is None or not self._stop.reached(self.step):
            return True
        saves = self.config.checkpoint.enable and not self.config.checkpoint.load_only
        if saves:
            self._save()
        # Another rank may not have heard yet.
        self.exit_code = stop.EXIT_CODE if saves else 128 + (stop.received() or stop.SIGNALS[0])
        result = "saved: the same command goes on from there" if saves else "not saved: [checkpoint] is off"
        logger.info(f"Stopped by a signal after step {self.step}, {result}")
        return False

    def _save(self) -> None:
        if self.step % self.checkpointer.interval != 0:  # else it has been saved already
            # The save of a last step may leave out what training needs.
            self.checkpointer.last_save_model_only = self.checkpointer.last_save_in_hf = False
            self.checkpointer.save(self.step, last_step=True)
        self.checkpointer.maybe_wait_for_saving()

    def _written(self, save: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        try:
            return save(*args, **kwargs)
        except CheckpointException as error:
            if error.args[0] != "write":
                raise
            # What each rank that failed met. torch.save turns an error of the file into one of its own format.
            rank, (reason, _) = min(error.failures.items())
        except OSError as failed:
            rank, reason = torch.distributed.get_rank(), failed
        raise SaveFailed(_how_to_go_on(self.checkpointer.folder, rank, reason))


def _how_to_go_on(folder: str, rank: int, reason: BaseException) -> str:
    if isinstance(reason, OSError) and reason.errno:
        why = os.strerror(reason.errno)
    else:
        why = f"a file is shorter than its data, as on a full disk ({reason})"
    room = ""
    if os.path.isdir(folder):
        usage = shutil.disk_usage(folder)
        room = f" ({usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB are free there)"
    last = resume.latest(folder)
    if filesystem.is_remote(folder):
        begun = "goes on from the last that is whole"
    else:
        begun = "begins anew" if last == -1 else f"goes on from step {last}, the last that is whole"
    return (
        f"checkpoint: rank {rank} could not write to {folder!r}: {why}; make room there{room}, look at the quota, "
        f"and the same command {begun}"
    )
