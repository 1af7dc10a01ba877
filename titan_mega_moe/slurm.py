"""Ranks on all nodes of a SLURM allocation.

`launch` runs in the batch script (or under salloc) and starts them with one srun; `become_rank` runs in each of them.
Ranks that somebody's own srun started become ranks in the same way.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import defaultdict, deque
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from titan_mega_moe import launch as local
from titan_mega_moe import stop

if TYPE_CHECKING:
    from titan_mega_moe.config.run_config import RunConfig

SRUN_ARGS = "TITAN_MEGA_MOE_SRUN_ARGS"
"""Environment variable: more arguments for srun, separated by blanks."""

_TAIL = 20  # lines of a failed rank to show where it left no traceback
_FORCED = 10  # seconds after a failure in which the other ranks have to be gone
_PORTS = range(12000, 32000)  # below those that Linux gives to outgoing connections
_LINE = re.compile(r" *(\d+): ?(.*)")
_ENDED = re.compile(r"srun: error: (\S+): tasks? (\d+)\S*: (.+)")
_FAILED = re.compile(r"(\[rank\d+\]: )?rank \d+ of \d+ on \S+ failed:$")  # torch adds its own name of the rank


def allocated() -> bool:
    """Whether this process holds an allocation and is no task of a step in it: one that can start ranks."""
    return "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ and "RANK" not in os.environ


def node_count() -> int:
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))


def rank_count(resolved: "RunConfig") -> int:
    """Ranks to start in this allocation: [device] ranks, else one per GPU or, on the CPU, one per --ntasks-per-node.

    Raises ValueError if they do not divide over the nodes, or the allocation has no GPUs.
    """
    nodes = node_count()
    if resolved.device.ranks is not None or resolved.device.kind == "cpu":
        per_node = int(os.environ.get("SLURM_NTASKS_PER_NODE", "0"))
        ranks = resolved.device.ranks or nodes * per_node or resolved.ranks()
        if ranks % nodes != 0:
            raise ValueError(f"{ranks} ranks do not divide over the {nodes} nodes of the allocation")
        return ranks
    names = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")  # the second may name a type: h200:8
    per_node = next((int(os.environ[name].rpartition(":")[2]) for name in names if os.environ.get(name)), 0)
    if per_node == 0:
        raise ValueError("the allocation has no GPUs: ask for them with sbatch --gpus-per-node")
    return nodes * per_node


def crossing_reason(resolved: "RunConfig", ranks: int) -> str | None:
    """Why an expert-parallel group of `ranks` ranks over this allocation would be on several nodes, or None."""
    from titan_mega_moe import hosts
    from titan_mega_moe.op import backends

    degree, per_node = resolved.parallelism.expert_parallel_degree, ranks // node_count()
    ours = resolved.mega_moe.backend not in backends.UPSTREAM and not resolved.mega_moe.across_hosts
    if not ours or per_node % degree == 0:
        return None
    nodes = f"{node_count()} nodes of {per_node} ranks ({os.environ['SLURM_JOB_NODELIST']})"
    return f"{degree} ranks of an expert-parallel group would be on several of {nodes}: {hosts.remedy(per_node)}"


def launch(command: list[str], ranks: int, log_dir: str | Path) -> int:
    """Run `python COMMAND...` as `ranks` tasks over all nodes, neighbouring ranks on one node.

    Rank 0's output is shown as it comes; every rank's goes to `log_dir`, one file a node. When a rank fails, its
    traceback is the first that is shown, and the others are stopped at once.

    Returns:
        0, or the exit code of the rank that failed first; stop.EXIT_CODE if a signal stopped the run in good order.
    """
    from torch.distributed import TCPStore

    nodes = node_count()
    per_node = ranks // nodes
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    # This process serves the ranks' rendezvous, as torchrun's does: the port is free, and stays so.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    rendezvous = {"MASTER_ADDR": host, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={ranks}", f"--ntasks-per-node={per_node}", "--distribution=block"]
    # _Log ends the ranks that are left when one fails: SLURM's own way of that takes its KillWait, 30 s.
    srun += ["--kill-on-bad-exit=0", "--label", "--input=none"]
    if cpus := int(os.environ.get("SLURM_CPUS_ON_NODE", "0")) // per_node:
        srun.append(f"--cpus-per-task={cpus}")  # srun's default is one
    if "SLURM_GPUS_ON_NODE" in os.environ:
        srun.append("--gpu-bind=none")  # each rank sees its peers' GPUs: the layer writes to their memory
    process = subprocess.Popen(
        [*srun, *os.environ.get(SRUN_ARGS, "").split(), sys.executable, *command],
        env={"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ, **rendezvous},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=local.end_with_parent,
    )
    with stop.handed_on(process.send_signal), _Log(Path(log_dir), per_node, process) as log:
        assert process.stdout is not None
        for line in process.stdout:
            log.take(line.rstrip("\n"))
        return log.end(process.wait())


class _Log:
    """What the ranks print, by node; what of it the job's own log shows; who failed first."""

    def __init__(self, folder: Path, per_node: int, srun: subprocess.Popen[str]) -> None:
        self._folder, self._per_node, self._srun = folder, per_node, srun
        self._files: dict[int, TextIO] = {}
        self._open = ExitStack()
        self._last: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=_TAIL))
        self._shown: int | None = 0  # the rank whose lines are shown
        self._traceback = False
        self._first: re.Match[str] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "_Log":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def take(self, line: str) -> None:
        if (labelled := _LINE.fullmatch(line)) is not None:
            self._take_of(int(labelled[1]), labelled[2])
        elif (ended := _ENDED.match(line)) is not None:
            if self._first is None:
                self._first = ended
                self._end_others()
        else:
            print(line, file=sys.stderr, flush=True)

    def _take_of(self, rank: int, text: str) -> None:
        node = rank // self._per_node
        if node not in self._files:
            self._files[node] = self._open.enter_context((self._folder / f"node_{node}.log").open("a", buffering=1))
        self._files[node].write(f"[{rank}] {text}\n")
        self._last[rank].append(text)
        if not self._traceback and _FAILED.match(text):
            self._traceback, self._shown = True, rank  # what others say from now on is of this
        if rank == self._shown:
            print(text, flush=True)

    def _end_others(self) -> None:
        """At once: they wait in vain for the rank that failed."""
        if self._code() == stop.EXIT_CODE:
            return  # each ends by itself
        # srun hands it to every rank. SIGTERM they take for a reason to save and stop; this one they do not know.
        self._srun.send_signal(signal.SIGUSR2)
        forced = threading.Timer(_FORCED, self._srun.terminate)
        forced.daemon = True
        forced.start()

    def _code(self) -> int | None:
        if self._first is None:
            return None
        exited = re.search(r"exit code (\d+)", self._first[3])
        return int(exited[1]) if exited else None

    def end(self, code: int) -> int:
        """Say who failed first; srun's exit code, or better that rank's."""
        if self._first is None or self._code() == stop.EXIT_CODE:
            return code
        rank = int(self._first[2])
        if rank != self._shown and not self._traceback:
            print("\n".join(self._last[rank]), file=sys.stderr)
        host, how = self._first[1], self._first[3].lower()
        where = self._folder / f"node_{rank // self._per_node}.log"
        print(f"rank {rank} on {host} ended first ({how}); its output is in {where}", file=sys.stderr, flush=True)
        return self._code() or code


def become_rank() -> bool:
    """In a task of a step of several: say to torch.distributed, in torchrun's variables, which rank this is.

    Returns whether this process is such a task.
    """
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if "RANK" in os.environ or "SLURM_STEP_ID" not in os.environ or tasks == 1:
        return False
    rank, job, step = (int(os.environ[name]) for name in ("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID"))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(tasks), "LOCAL_RANK": os.environ["SLURM_LOCALID"]}
    os.environ["LOCAL_WORLD_SIZE"] = os.environ.get("SLURM_NTASKS_PER_NODE", str(tasks))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MASTER_ADDR", first_host(os.environ["SLURM_STEP_NODELIST"]))
    # Jobs of one host have other ids: their steps meet at other ports.
    os.environ.setdefault("MASTER_PORT", str(_PORTS[(8 * job + step) % len(_PORTS)]))
    show = sys.excepthook

    def announce(*error: object) -> None:
        print(f"rank {rank} of {tasks} on {host_name()} failed:", file=sys.stderr)
        show(*error)  # type: ignore[arg-type]

    sys.excepthook = announce
    return True


def first_host(nodes: str) -> str:
    """The first of SLURM's list: "gpu[012-015,020]" -> "gpu012"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def host_name() -> str:
    """This host's, as SLURM calls it where it does."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
