"""Starting ranks on this machine, as torchrun --standalone does, and ending them.

Rank 0's output is shown as it comes; every rank's is kept in files. When a rank fails the others are stopped
and the failed one's traceback comes last. A signal to the launcher reaches the ranks, and ranks whose
launcher is gone end.
"""

import ctypes
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from titan_mega_moe.stop import SAVE_FAILED

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
        0, the exit code of the first rank that failed, or 128 + the signal that ended it or the launcher.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # As torchrun: ranks that share the cores slow each other down when each uses all of them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[_LAUNCHER] = str(os.getpid())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex[:8],
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(log_dir), tee=Std.ALL, local_ranks_filter={0}),
    )
    try:
        elastic_launch(config, sys.executable)(*command)
    except SignalException as stopped:
        print(f"stopped by {signal.Signals(stopped.sigval).name}", file=sys.stderr)
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        log = next(Path(log_dir).glob(f"{config.run_id}_*/attempt_0/{rank}/stderr.log"))
        print(_failure_text(rank, failure, log), file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    finally:
        del os.environ[_LAUNCHER]
    return 0


def child_environment() -> dict[str, str]:
    """This process's environment, for a command of ours that shall end when this process does."""
    return {**os.environ, _LAUNCHER: str(os.getpid())}


def die_with_launcher() -> None:
    """In a process of `launch` or `child_environment`: end when the launcher does, even killed. Linux."""
    launcher = os.environ.pop(_LAUNCHER, None)
    if launcher is None or sys.platform != "linux":
        return
    end_with_parent()
    if os.getppid() != int(launcher):  # it ended before the line above
        sys.exit(128 + signal.SIGTERM)


def end_with_parent() -> None:
    """Have the kernel send this process SIGTERM when the one that started it ends. Linux; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


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
        said = [line for line in lines if line.startswith("checkpoint: ")] if failure.exitcode == SAVE_FAILED else []
        last = "\n".join(said or lines[-_TAIL:])
    return f"{last}\nrank {rank} {how}; its output is in {log.parent}"
