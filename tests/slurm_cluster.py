"""A SLURM cluster of its own on this host: munged, slurmctld and one slurmd a node, all under one folder.

    with slurm_cluster.start(folder) as cluster:
        job = cluster.batch(["--nodes=2", "script.sh"], cwd=folder)
        assert cluster.wait(job, 60) == "COMPLETED"

Nothing of the host's own SLURM is read or written. Every daemon listens on the loopback alone, on ports that were free,
and ends with the context.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
INSTALL = ["apt-get", "-o", "DPkg::Lock::Timeout=120", "install", "-y", "--no-install-recommends", "slurm-wlm", "munge"]

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n.spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait={kill_wait}
SlurmdTimeout=10
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=test Nodes=ALL Default=YES MaxTime=30 GraceTime=60 PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=30 PriorityTier=2
"""
NODE = "NodeName=node{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} State=UNKNOWN"


def unavailable_reason() -> str | None:
    """Why no cluster can be started here, after an attempt to install what is missing; None if one can."""
    os.environ["PATH"] += ":/usr/sbin"  # where Debian keeps the daemons, and not everyone looks
    if missing() and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update"], capture_output=True)
        subprocess.run(INSTALL, capture_output=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
    return f"SLURM is not installed ({', '.join(missing())}): {' '.join(INSTALL)}" if missing() else None


def missing() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


@dataclass
class Cluster:
    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, timeout: float = 60, cwd: Path | None = None, **variables: str) -> str:
        """The output of a SLURM command; AssertionError with what it said if it fails."""
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env={**self.environment, **variables}
        )
        assert ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    def field(self, job: str, name: str) -> str:
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(name + "="))

    def wait(self, job: str, seconds: float, states: tuple[str, ...] = ()) -> str:
        """The state in which the job has ended, or the first of `states` that it reaches."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        deadline = time.monotonic() + seconds
        while (state := self.field(job, "JobState")) not in (states or ends):
            assert time.monotonic() < deadline, f"job {job} is {state} after {seconds} s\n{self.queue()}"
            time.sleep(0.2)
        return state

    def queue(self) -> str:
        return self.run("squeue", "--steps") + self.run("squeue") + self.run("sinfo")


@contextmanager
def start(folder: Path, nodes: int = 2, cpus: int = 8, kill_wait: int = 30) -> Iterator[Cluster]:
    """A cluster of `nodes` idle nodes, `cpus` CPUs each, whatever this host has. kill_wait: SLURM's, in seconds.

    A job in partition "urgent" takes the nodes of one in "test", which is sent SIGTERM and has a minute to end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host, ports = socket.gethostname().partition(".")[0], _free_ports(1 + nodes)
    lines = [NODE.format(i=i, host=host, port=ports[i], cpus=cpus) for i in range(1, nodes + 1)]
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(folder=folder, host=host, ports=ports, user=user, kill_wait=kill_wait, nodes="\n".join(lines))
    )
    # A job's environment is this one: nothing of a job that the tests may themselves run in.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
    environment = {**kept, "SLURM_CONF": str(config)}
    munged = ["munged", "--foreground", "--force", f"--key-file={key}"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    munged += [f"--socket={folder}/munge.socket", "--num-threads=2"]
    daemons = [munged, ["slurmctld", "-D", "-c"], *(["slurmd", "-D", "-N", f"node{i}"] for i in range(1, nodes + 1))]
    with ExitStack() as stack:
        cluster = Cluster(folder, environment)
        for command in daemons:
            log = stack.enter_context((folder / f"{command[0]}.out").open("a"))
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
            stack.callback(_end, process)
            if command is munged:
                _until(lambda: (folder / "munge.socket").exists(), 10, "munged")
        idle = f"idle {nodes}"
        _until(lambda: _states(cluster) == idle, 30, f"{idle}: see {folder}")
        yield cluster
        subprocess.run(["scancel", "--state=RUNNING", "--state=PENDING", f"--user={user}"], env=environment, timeout=20)


def _states(cluster: Cluster) -> str:
    command = ["sinfo", "-h", "-o", "%t %D"]
    return subprocess.run(command, capture_output=True, text=True, env=cluster.environment, timeout=60).stdout.strip()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _until(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not after {seconds} s: {what}"
        time.sleep(0.1)


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
