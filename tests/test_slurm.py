"""Jobs on a real SLURM of two nodes, through the scripts that users run."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests import ranks, slurm_cluster
from titan_mega_moe import config, hosts, slurm, stop

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts" / "slurm"
STEPS = 6
TOML = f"""
dump_folder = "run"
[device]
kind = "cpu"
[model]
name = "qwen3"
flavor = "debugmodel_moe"
layers = 1
[parallelism]
expert_parallel_degree = 2
spmd_backend = "partial_dtensor"
[training]
steps = {STEPS}
local_batch_size = 1
seq_len = 32
mixed_precision_param = "float32"
disable_cuda_graphs = true
[activation_checkpoint]
mode = "none"
[optimizer]
lr = 1e-3
[tokenizer]
type = "StdlibTokenizer"
[dataloader]
dataset = "stdlib"
[metrics]
log_freq = 1
[checkpoint]
interval = 1000
[debug]
seed = 0
"""
SITE = {"NODES": "2", "GPUS_PER_NODE": "0", "TASKS_PER_NODE": "2", "EXCLUSIVE": "", "TIME": "10", "VENV": sys.prefix}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if (reason := slurm_cluster.unavailable_reason()) is not None:
        pytest.skip(reason)
    with slurm_cluster.start(tmp_path_factory.mktemp("slurm")) as started:
        (started.folder / "tiny.toml").write_text(TOML)
        yield started


def submit(cluster, script: str, *args: str, **variables: str) -> tuple[str, Path]:
    """The job's id and its log."""
    said = cluster.run(str(SCRIPTS / script), *args, cwd=cluster.folder, **{**SITE, **variables})
    job = said.split()[-1]
    return job, cluster.folder / "logs" / f"{script.removesuffix('.sh')}-{job}.log"


def losses(run: Path) -> dict[int, float]:
    """By step, as rank 0 recorded them; the last record of a step counts."""
    file = run / "records" / "rank_0.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {r["step"]: r["loss_metrics/global_avg_loss"] for r in records if "grad_norm" in r}


def until_step(run: Path, step: int, log: Path, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while step not in losses(run):
        assert time.monotonic() < deadline, f"no step {step} in {run}\n{log.read_text() if log.exists() else ''}"
        time.sleep(0.1)


def process_of(job: str, rank: int) -> int:
    """The process id of a job's rank."""
    wanted = {f"SLURM_JOB_ID={job}", f"SLURM_PROCID={rank}"}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = set((entry / "environ").read_text().split("\0"))
            command = (entry / "cmdline").read_text()
        except OSError:
            continue
        if wanted < variables and any(v.startswith("SLURM_STEP_ID=") for v in variables) and "train" in command:
            return int(entry.name)
    raise AssertionError(f"no process of rank {rank}")


@pytest.fixture(scope="module")
def two_jobs(cluster):
    """The same run twice at once, over both nodes; a rank of the second is killed after its second step."""
    first, first_log = submit(cluster, "train.sh", "tiny.toml", "--dump_folder", "first")
    second, second_log = submit(cluster, "train.sh", "tiny.toml", "--dump_folder", "second")
    until_step(cluster.folder / "second", 2, second_log)
    start = time.monotonic()
    os.kill(process_of(second, 3), signal.SIGKILL)
    states = [cluster.wait(second, 60)]
    took = time.monotonic() - start
    states.insert(0, cluster.wait(first, 240))
    return states, took, first_log.read_text(), second_log.read_text()


def test_a_job_trains_on_two_nodes_beside_another(cluster, two_jobs):
    states, _, log, _ = two_jobs
    assert states[0] == "COMPLETED", log
    first, second = losses(cluster.folder / "first"), losses(cluster.folder / "second")
    assert list(first) == list(range(1, STEPS + 1)) and first[STEPS] < first[1]
    assert {step: first[step] for step in second} == second  # neither saw the other's
    assert "ep=2" in log and "dp_shard=4" in log
    for node in range(2):  # neighbouring ranks on one node, each with its own log
        text = (cluster.folder / "first" / "ranks" / f"node_{node}.log").read_text()
        assert {line[:3] for line in text.splitlines()} == {f"[{2 * node}]", f"[{2 * node + 1}]"}
    assert log.count("step:  3") == 1  # rank 0's alone


def test_a_killed_rank_ends_its_job_at_once_and_the_log_says_which(two_jobs):
    states, took, _, log = two_jobs
    assert states[1] == "FAILED"
    assert took < 15  # SLURM's KillWait is 30
    assert "rank 3 on node2 ended first (killed); its output is in second/ranks/node_1.log" in log.splitlines()[-1]


PROGRAM = """
import os, sys, time
from titan_mega_moe import slurm, stop
slurm.become_rank()
stop.listen(stop.SIGNALS)
rank = int(os.environ["RANK"])
print("hello from", rank, flush=True)
time.sleep(1)
if rank == 2:
    {fault}
time.sleep(100)
"""


@pytest.mark.parametrize(
    "fault, code, told",
    [("raise KeyError('of rank two')", 1, "KeyError: 'of rank two'"), ("print('the end'); sys.exit(3)", 3, "the end")],
)
def test_the_log_begins_with_the_traceback_of_the_rank_that_failed(fault, code, told, cluster):
    start = f"slurm.launch(['-c', {PROGRAM.format(fault=fault)!r}], 4, 'logs')"
    (cluster.folder / "start.py").write_text(f"import sys; from titan_mega_moe import slurm; sys.exit({start})")
    script = cluster.folder / "start.sh"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} start.py")
    begin = time.monotonic()
    log = f"start-{code}.log"
    options = ["--nodes=2", "--ntasks-per-node=2", f"--output={log}", f"--chdir={cluster.folder}"]
    job = cluster.run("sbatch", "--parsable", *options, str(script)).strip()
    assert cluster.wait(job, 60) == "FAILED"
    assert cluster.field(job, "ExitCode") == f"{code}:0"
    assert time.monotonic() - begin < 25  # the others have SIGTERM caught and wait on
    lines = (cluster.folder / log).read_text().splitlines()
    assert lines[0] == "hello from 0" and "hello from 1" not in lines
    shown = [line for line in lines if line.endswith(told)]
    assert len(shown) == 1 and "rank 2 on node2 ended first (exited with exit code" in lines[-1]
    if code == 1:
        tracebacks = [line for line in lines if "Traceback" in line]
        assert len(tracebacks) == 1 and lines.index(tracebacks[0]) == 2 and "rank 2 of 4 on node2 failed:" in lines[1]


def test_a_preempted_job_saves_requeues_and_goes_on_where_it_was(cluster, two_jobs):
    job, log = submit(cluster, "requeue.sh", "tiny.toml", "--dump_folder", "preempted")
    run = cluster.folder / "preempted"
    until_step(run, 2, log)
    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    cluster.run("sbatch", *urgent)
    assert cluster.wait(job, 40, ("PENDING",)) == "PENDING", log.read_text()
    saved = max(losses(run))
    assert 2 <= saved < STEPS and [p.name for p in (run / "checkpoint").iterdir()] == [f"step-{saved}"]
    assert cluster.wait(job, 180) == "COMPLETED", log.read_text()
    assert cluster.field(job, "Restarts") == "1"
    text = log.read_text()
    assert f"Stopped by a signal after step {saved}, saved" in text and "goes back into the queue" in text
    assert f"Training starts at step {saved + 1}" in text and text.count("Training starts at step") == 2
    assert losses(run) == pytest.approx(losses(cluster.folder / "first"), rel=1e-6)


def test_a_bad_toml_ends_the_job_before_any_rank_starts(cluster):
    job, log = submit(cluster, "train.sh", "tiny.toml", "--training.stepz", "3", "--dump_folder", "bad")
    assert cluster.wait(job, 60) == "FAILED"
    assert cluster.field(job, "ExitCode") == "2:0"
    (line,) = log.read_text().splitlines()
    assert line.startswith("tiny.toml: [training] stepz (from the command line): unknown key")
    assert not (cluster.folder / "bad").exists()


def test_an_expert_parallel_group_on_two_hosts_is_refused(cluster):
    args = ["tiny.toml", "--parallelism.expert_parallel_degree", "4", "--dump_folder", "crossing"]
    job, log = submit(cluster, "train.sh", *args)
    assert cluster.wait(job, 60) == "FAILED"
    (line,) = log.read_text().splitlines()
    assert "4 ranks of an expert-parallel group would be on several of 2 nodes of 2 ranks (node[1-2])" in line
    assert "a divisor of 2" in line and "mega_moe.across_hosts = true" in line
    assert not (cluster.folder / "crossing").exists()


def test_compare_runs_its_sides_on_both_nodes(cluster):
    # One rank a node, so that the expert-parallel group spans them.
    options = ["--steps", "2", "--out", "compared", "--mega_moe.across_hosts"]
    job, log = submit(cluster, "compare.sh", "tiny.toml", *options, TASKS_PER_NODE="1")
    assert cluster.wait(job, 240) == "COMPLETED", log.read_text()
    report = json.loads((cluster.folder / "compared" / "report.json").read_text())
    assert report["settings"]["device"] == "cpu, 2 ranks"
    for side in ("mega_moe", "upstream"):
        assert len(losses(cluster.folder / "compared" / side)) == 2
        assert (cluster.folder / "compared" / side / "ranks" / "node_1.log").exists()


# Without a cluster.


@pytest.mark.parametrize(
    "script, variables, expected",
    [
        ("train.sh", {"NODES": "16", "PARTITION": "h", "ACCOUNT": "a"}, ["--nodes=16", "--partition=h", "--account=a"]),
        ("train.sh", {}, ["--gpus-per-node=8", "--ntasks-per-node=8", "--exclusive"]),
        ("train.sh", {"GPU_REQUEST": "--gres=gpu:4", "GPUS_PER_NODE": "4"}, ["--gres=gpu:4", "--ntasks-per-node=4"]),
        ("requeue.sh", {"STOP_BEFORE": "90"}, ["--requeue", "--signal=USR1@90", "--open-mode=append"]),
        ("compare.sh", {"SBATCH_ARGS": "--mem=0 --reservation=r"}, ["--mem=0", "--reservation=r"]),
    ],
)
def test_dry_run_prints_what_would_be_submitted(script, variables, expected, tmp_path):
    command = [str(SCRIPTS / script), "--dry-run", "a b.toml", "--training.steps", "3"]
    environment = {"PATH": os.environ["PATH"], **variables}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
    assert ended.returncode == 0, ended.stderr
    words = shlex.split(ended.stdout)
    assert words[0] == "sbatch" and set(expected) <= set(words)
    assert words[-4:] == [str(SCRIPTS / script), "a b.toml", "--training.steps", "3"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("gpu7", "gpu7"),
        ("gpu[012-015,020]", "gpu012"),
        ("a1,gpu[2-3]", "a1"),
        ("r[1-2]n[04-05]-ib,x", "r1n04-ib"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert slurm.first_host(nodes) == first


@pytest.fixture
def allocation(monkeypatch):
    """Four nodes, as a batch script sees them."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("RANK", raising=False)
    for name, value in {"JOB_ID": "40007", "JOB_NUM_NODES": "4", "JOB_NODELIST": "gpu[1-4]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return lambda **variables: [monkeypatch.setenv(f"SLURM_{name}", value) for name, value in variables.items()]


@pytest.mark.parametrize(
    "variables, overrides, expected",
    [
        ({"GPUS_ON_NODE": "8", "NTASKS_PER_NODE": "1"}, ["--device.kind", "cuda"], 32),
        ({"GPUS_PER_NODE": "h200:4"}, ["--device.kind", "cuda"], 16),
        ({"GPUS_ON_NODE": "8"}, ["--device.kind", "cuda", "--device.ranks", "16"], 16),
        ({}, ["--device.kind", "cuda"], "the allocation has no GPUs"),
        ({"GPUS_ON_NODE": "8"}, ["--device.kind", "cuda", "--device.ranks", "6"], "6 ranks do not divide over the 4"),
        ({"NTASKS_PER_NODE": "2"}, [], 8),
        ({}, ["--parallelism.expert_parallel_degree", "4"], 4),
    ],
)
def test_ranks_of_an_allocation(variables, overrides, expected, allocation, tmp_path):
    allocation(**variables)
    assert slurm.allocated()
    (tmp_path / "x.toml").write_text(TOML)
    if isinstance(expected, int):
        assert slurm.rank_count(config.load(tmp_path / "x.toml", overrides)) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            slurm.rank_count(config.load(tmp_path / "x.toml", overrides))


@pytest.mark.parametrize(
    "overrides, crosses",
    [
        (["--parallelism.expert_parallel_degree", "8"], False),
        (["--parallelism.expert_parallel_degree", "16"], True),
        (["--parallelism.expert_parallel_degree", "16", "--mega_moe.across_hosts"], False),
        (["--parallelism.expert_parallel_degree", "16", "--mega_moe.backend", "upstream"], False),
    ],
)
def test_groups_that_do_not_fit_a_node_are_seen_before_ranks_start(overrides, crosses, allocation, tmp_path):
    (tmp_path / "x.toml").write_text(TOML)
    reason = slurm.crossing_reason(config.load(tmp_path / "x.toml", overrides), 32)
    assert (reason is not None) is crosses
    assert reason is None or "4 nodes of 8 ranks (gpu[1-4])" in reason


def hosts_of_two(names):
    os.environ["SLURMD_NODENAME"] = names[torch.distributed.get_rank()]
    return hosts.crossing_reason(torch.distributed.group.WORLD)


def test_ranks_tell_each_other_their_hosts():
    assert ranks.run(2, hosts_of_two, ["a", "a"]) == [None, None]
    told = "an expert-parallel group is on 2 hosts: a (ranks 0), b (ranks 1)"
    assert ranks.run(2, hosts_of_two, ["a", "b"]) == [told, told]


def test_a_task_of_a_step_becomes_a_rank_and_a_lone_one_does_not(allocation, monkeypatch):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    for name in names:
        monkeypatch.setenv(name, "")  # undone after the test, whatever becomes of it in it
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    task = {"STEP_ID": "3", "PROCID": "9", "LOCALID": "1", "NTASKS_PER_NODE": "8", "STEP_NODELIST": "gpu[1-4]"}
    allocation(**task, STEP_NUM_TASKS="1")
    assert not slurm.become_rank() and not slurm.allocated() and "RANK" not in os.environ
    allocation(STEP_NUM_TASKS="32")
    assert slurm.become_rank()
    assert [os.environ[name] for name in names[:5]] == ["9", "32", "1", "8", "gpu1"]
    port = os.environ["MASTER_PORT"]
    assert not slurm.become_rank()  # torchrun's or ours: what is set stays
    for name in ("RANK", "MASTER_PORT"):
        monkeypatch.delenv(name)
    allocation(JOB_ID="40008")
    assert slurm.become_rank() and os.environ["MASTER_PORT"] != port


def test_ranks_stop_after_the_same_step_whoever_hears_the_signal_first(monkeypatch):
    """Rank 1 is ahead of rank 0, or behind: both stop after the step that follows the one of rank 0's decision."""
    for order in ([0, 1], [1, 0]):
        store = torch.distributed.HashStore()
        agreements = {rank: stop.Agreement(store, rank) for rank in order}
        stopped = {}
        for step in range(4, 9):
            for rank in order:
                if rank not in stopped and agreements[rank].reached(step):
                    stopped[rank] = step
                if (rank, step) == (order[0], 5):
                    monkeypatch.setattr(stop, "_received", signal.SIGUSR1)
        assert len(stopped) == 2 and stopped[0] == stopped[1] in (6, 7)
        monkeypatch.setattr(stop, "_received", None)
