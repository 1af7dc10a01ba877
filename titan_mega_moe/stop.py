"""Stopping between two steps because a signal asked for it: which step that is, all ranks have to agree.

SLURM sends the signal some time before a job's limit (sbatch --signal), and before it takes the nodes for another job.
Whoever starts ranks hands on to them what it is sent itself.
"""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

EXIT_CODE = 75
"""Of a run that stopped with a checkpoint, and goes on from it when started again (EX_TEMPFAIL)."""

SAVE_FAILED = 74
"""Of a run that could not write a checkpoint; its last line on stderr says why and what to do (EX_IOERR)."""

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
"""What SLURM sends. Ranks that it did not start take the first alone: their launcher ends them with the second."""

_KEPT = 1000  # decisions; a rank's host is never as many steps behind another's
_listening = False
_received: int | None = None


def listen(signals: Iterable[signal.Signals]) -> None:
    """From now on `signals` are noted, and nothing else."""
    global _listening
    _listening = True
    for number in signals:
        signal.signal(number, _note)


@contextmanager
def handed_on(send: Callable[[signal.Signals], None]) -> Iterator[None]:
    """In the block, signals that ask this process to stop, SIGNALS and Ctrl-C, go to `send` instead."""
    before = {
        number: signal.signal(number, lambda number, _: send(signal.Signals(number)))
        for number in (*SIGNALS, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _note(number: int, _: FrameType | None) -> None:
    global _received
    _received = number


def listening() -> bool:
    return _listening


def received() -> int | None:
    """The last signal that was noted."""
    return _received


class Agreement:
    """After each step rank 0 puts into the store whether it has been asked to stop; all read what it put there the step
    before, so that nobody waits for it and all stop after the same step.

    One small request a rank and step, on the host: no collective, no synchronisation with a GPU.
    """

    def __init__(self, store: "Store", rank: int) -> None:
        self._store, self._rank, self._step = store, rank, -1

    def reached(self, step: int) -> bool:
        """Whether to stop after `step`; called on every rank after every step."""
        before, self._step = self._step, step
        if self._rank == 0:
            self._store.set(f"stop/{step}", str(int(received() is not None)))
            self._store.delete_key(f"stop/{step - _KEPT}")
        return before >= 0 and self._store.get(f"stop/{before}") == b"1"
