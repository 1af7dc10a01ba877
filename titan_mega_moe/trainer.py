"""TorchTitan's Trainer, which a signal can stop after a step."""

import torch
from torch.distributed.distributed_c10d import _get_default_store
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_mega_moe import stop
from titan_mega_moe.op import backends


class StoppableTrainer(Trainer):
    """On one of stop.SIGNALS it stops after a step that all ranks agree on, with a checkpoint to go on from.

    `exit_code` is then stop.EXIT_CODE, and 128 + signal without checkpoints: that run would begin anew.
    Raises RuntimeError at the end if kernels of the last step gave up waiting for a peer; the layer does of any other
    step, and before it is saved.
    """

    exit_code = 0

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
        self.exit_code = stop.EXIT_CODE if saves else 128 + (stop.received() or 0)
        result = "saved: the same command goes on from there" if saves else "not saved: [checkpoint] is off"
        logger.info(f"Stopped by a signal after step {self.step}, {result}")
        return False

    def _save(self) -> None:
        if self.step % self.checkpointer.interval != 0:  # else it has been saved already
            # The save of a last step may leave out what training needs.
            self.checkpointer.last_save_model_only = self.checkpointer.last_save_in_hf = False
            self.checkpointer.save(self.step, last_step=True)
        self.checkpointer.maybe_wait_for_saving()
