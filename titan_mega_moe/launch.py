"""Starting ranks on this machine, as torchrun --standalone does, and ending them.

Rank 0's output is shown as it comes; every rank's is kept in files. When a rank fails the others are stopped
and the failed one's traceback comes last. A signal that asks the launcher to stop reaches the ranks as SIGUSR1, which
they may take for a reason to save first; a second Ctrl-C ends them. Ranks whose launcher is gone end.
"""

import ctypes
import logging
import os
import signal
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from titan_mega_moe import stop

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_LAUNCHER = "TITAN_MEGA_MOE_LAUNCHER"
_PR_SET_PDEATHSIG = 1
_TAIL = 20  # lines of a failed rank's stderr to show where it left no traceback


def launch(command: list[str], ranks: int, log_dir: str | Path) -> int:
    """Run `python COMMAND...` as `ranks` processes that find each other through torch.distributed.

    Args:
        command: arguments to this Python, such as ["-m", "titan_mega_moe", "train", "file.toml"].
        ranks: how many processes.
        log_dir: folder for the ranks' stdout and stderr; created if missing.

    Returns:
        0, the exit code of the first rank that failed, or 128 + the signal that ended it or the launcher;
        stop.EXIT_CODE if a signal stopped the run in good order.
    """
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel("CRITICAL")  # who failed is said below
    # This process serves the ranks' rendezvous, as torchrun's does: the port is free, and stays so.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {
        # As torchrun: ranks that share the cores slow each other down when each uses all of them.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex[:8],
        _LAUNCHER: str(os.getpid()),
    }
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # those that ask to stop are ours
    context = start_processes(
        "rank",
        sys.executable,
        args={rank: tuple(command) for rank in range(ranks)},
        envs={rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)},
        logs_specs=DefaultLogsSpecs(log_dir=str(log_dir), tee=Std.ALL, local_ranks_filter={0}),
    )
    asked: list[signal.Signals] = []

    def tell(number: signal.Signals) -> None:
        if not asked:
            print(f"{number.name}: stopping after this step; Ctrl-C twice stops at once", file=sys.stderr)
        asked.append(number)
        for pid in context.pids().values():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL if asked.count(signal.SIGINT) > 1 else signal.SIGUSR1)

    try:
        with stop.handed_on(tell):
            result = context.wait(period=0.1)
    finally:
        context.close()
    if result is None or not result.failures:
        return 0
    rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
    in_order = (stop.EXIT_CODE, 128 + signal.SIGUSR1, -signal.SIGUSR1, -signal.SIGKILL)
    if asked and failure.exitcode in in_order:
        print(f"stopped by {asked[0].name}", file=sys.stderr)
        return stop.EXIT_CODE if failure.exitcode == stop.EXIT_CODE else 128 + asked[0]
    print(_failure_text(rank, failure, Path(result.stderrs[rank])), file=sys.stderr)
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def child_environment() -> dict[str, str]:
    """This process's environment, for a command of ours that shall end when this process does."""
    return {**os.environ, _LAUNCHER: str(os.getpid())}


def die_with_launcher() -> None:
    """In a process of `launch` or `child_environment`: end when the launcher does, even killed. Linux."""
    launcher = os.environ.pop(_LAUNCHER, None)
    if launcher is None or sys.platform != "linux":
        return
    end_with_parent(signal.SIGKILL)  # SIGTERM may be a reason to go on to the end of a step
    if os.getppid() != int(launcher):  # it ended before the line above
        sys.exit(128 + signal.SIGTERM)


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process `number` when the one that started it ends. Linux; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def _failure_text(rank: int, failure: "ProcessFailure", log: Path) -> str:
    """How `failure` ended its rank: the traceback it recorded, else the end of `log`, its stderr."""
    if failure.exitcode < 0:
        how = f"was ended by {signal.Signals(-failure.exitcode).name}"
    else:
        how = f"failed with exit code {failure.exitcode}"
    message = failure.error_file_data.get("message")
    if isinstance(message, dict) and "extraInfo" in message:
        last = message["extraInfo"]["py_callstack"].rstrip()
    else:
        lines = log.read_text(errors="replace").splitlines()
        save_failed = failure.exitcode == stop.SAVE_FAILED
        said = [line for line in lines if line.startswith("checkpoint: ")] if save_failed else []
        last = "\n".join(said or lines[-_TAIL:])
    return f"{last}\nrank {rank} {how}; its output is in {log.parent}"
