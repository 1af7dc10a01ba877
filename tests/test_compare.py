"""The README's first command as a user runs it, and what `compare` does with input that cannot work."""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.test_traces import ranges_of
from titan_mega_moe import cli, config, report
from titan_mega_moe import compare as comparison

ROOT = Path(__file__).parents[1]
SIDES = ("mega_moe", "upstream")
CONFIG = str(ROOT / "train_configs" / "debug_cpu.toml")


def compare(*args, timeout=600, env=None):
    return subprocess.run(
        [sys.executable, "-m", "titan_mega_moe", "compare", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "160", **(env or {})},
    )


def records(folder, rank):
    lines = (folder / "records" / f"rank_{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def steps(folder, rank):
    return [m for m in records(folder, rank) if "grad_norm" in m]


def losses(folder):
    return [m["loss_metrics/global_avg_loss"] for m in steps(folder, 0)]


def rows(output):
    """Cells of the step table's body: step, our loss, upstream's, difference, our seconds, upstream's."""
    table = [line for line in output.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in table]
    return [row for row in cells if len(row) == 6 and row[0].isdigit()]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The shipped configuration as it is: two sides of 30 steps with two ranks."""
    out = tmp_path_factory.mktemp("compare") / "new"
    return compare(CONFIG, "--out", out), out


@pytest.mark.timeout(900)
def test_the_shipped_configuration_learns_and_agrees_with_upstream(shipped):
    done, out = shipped
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = (losses(out / side) for side in SIDES)
    assert len(ours) == len(theirs) >= 30
    assert ours[0] - ours[-1] >= 1.0
    # Measured: 9e-4 at most.
    assert max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True)) < 1e-2


@pytest.mark.timeout(900)
def test_the_printed_table_is_what_the_training_processes_recorded(shipped):
    done, out = shipped
    ours, theirs = ([steps(out / side, rank) for rank in range(2)] for side in SIDES)
    printed = rows(done.stdout)
    assert len(printed) == len(ours[0])
    for i, (step, our_loss, their_loss, difference, our_seconds, their_seconds) in enumerate(printed):
        a, b = (side[0][i]["loss_metrics/global_avg_loss"] for side in (ours, theirs))
        assert int(step) == ours[0][i]["step"] == i + 1
        assert our_loss == f"{a:.5f}" and their_loss == f"{b:.5f}"
        assert difference == f"{abs(a - b) / b:.1e}"
        for seconds, side in ((our_seconds, ours), (their_seconds, theirs)):
            assert seconds == f"{max(rank[i]['time_metrics/end_to_end(s)'] for rank in side):.3f}"


@pytest.mark.timeout(900)
def test_the_report_names_what_was_run(shipped):
    _, out = shipped
    report = json.loads((out / "report.json").read_text())
    assert report["agrees"] and [run["name"] for run in report["runs"]] == list(SIDES)
    assert report["settings"]["mega_moe backend"] == "reference"
    assert report["settings"]["device"] == "cpu, 2 ranks"
    assert report["settings"]["command line"] == "-"  # what was typed, not what compare adds
    assert "MoE layers with backend 'reference'" in (out / "mega_moe" / "train.log").read_text()
    memory = max(m["memory/max_reserved(GiB)"] for rank in range(2) for m in steps(out / "mega_moe", rank))
    assert report["runs"][0]["summary"]["memory_gib"] == memory
    assert (out / "report.md").read_text().startswith("# mega_moe beside upstream")


SMALL = ("--model.layers", "1", "--training.local_batch_size", "1", "--training.seq_len", "32")


@pytest.mark.timeout(900)
def test_the_files_of_the_report_hold_what_the_training_processes_recorded(shipped):
    _, out = shipped
    report = json.loads((out / "report.json").read_text())
    for run, side in zip(report["runs"], SIDES, strict=True):
        ranks = [steps(out / side, rank) for rank in range(2)]
        assert [s["loss"] for s in run["steps"]] == losses(out / side)
        assert run["summary"]["expert_load"] == max(m["moe/expert_load(max/mean)"] for m in ranks[0])
        seconds = [max(m["time_metrics/end_to_end(s)"] for m in both) for both in zip(*ranks, strict=True)]
        assert run["summary"]["median_seconds"] == statistics.median(seconds[3:])
    # Both sides' gradients of the first step, of every parameter.
    ours_1, theirs_1 = (next(m["gradients"] for m in records(out / side, 0) if "gradients" in m) for side in SIDES)
    assert ours_1.keys() == theirs_1.keys() and any("w2_EDF" in name for name in ours_1)
    differences = {d["tensor"]: d["relative"] for d in report["gradient_differences"]["upstream"]}
    for name, (norm, even, odd) in ours_1.items():
        right = theirs_1[name]
        furthest = max(abs(norm - right[0]), abs(even - right[1]), abs(odd - right[2])) / right[0]
        assert differences[name] == pytest.approx(furthest)
    # Measured: 2.3e-2 at most.
    assert max(differences.values()) < 0.1
    page = (out / "report.html").read_text()
    # Nothing of other places; what encodes a picture may hold any letters, but no colon.
    assert page.count("data:image/png;base64,") == 3 and "://" not in page.replace("http://www.w3.org", "")
    for name in ("loss", "step_time", "expert_load"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for side in SIDES:
        assert list((out / side / "tb").rglob("events.out.tfevents.*"))


@pytest.mark.timeout(600)
def test_wrong_gradients_and_a_side_that_dies_end_with_1_and_are_named(tmp_path):
    """Ranks that import the file below get a reference backend whose gradient of w2 is 1.5 times too large, and those
    of upstream's side lose one in the second step; what they did before is kept.
    """
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'train' in sys.argv or any('ranks' in a for a in sys.argv) or '-m' in sys.orig_argv:\n"
        "    from titan_mega_moe.op import reference\n"
        "    backward = reference.BACKEND.__class__.backward\n"
        "    def wrong(self, *args):\n"
        "        dx, dscores, dw1, dw2, dw3 = backward(self, *args)\n"
        "        return dx, dscores, dw1, 1.5 * dw2, dw3\n"
        "    reference.BACKEND.__class__.backward = wrong\n"
        "if 'upstream' in ' '.join(sys.argv):\n"
        "    from titan_mega_moe import device; device.prepare('cpu')\n"
        "    from torchtitan.trainer import Trainer\n"
        "    step = Trainer.train_step\n"
        "    def fail(self, batches):\n"
        "        if self.step == 2 and os.environ['RANK'] == '1':\n"
        "            print('lost a wheel', file=sys.stderr, flush=True)\n"
        "            os.kill(os.getpid(), 9)\n"
        "        return step(self, batches)\n"
        "    Trainer.train_step = fail\n"
    )
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    env["COLUMNS"] = "60"
    out, settings = tmp_path / "out", ("--tolerance", "1e-15", "--profiler.profiler_warmup", 1)
    done = compare(CONFIG, "--steps", 3, "--profile", *settings, "--out", out, *SMALL, env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    # Numbers, sentences and paths are in one piece however narrow the terminal is.
    assert "…" not in done.stdout and rows(done.stdout)[0][1] == f"{losses(out / 'mega_moe')[0]:.5f}"
    assert f"report: {out / 'report.html'}, {out / 'report.md'}, {out / 'report.json'};" in done.stdout
    assert "losses differ from upstream's by" in done.stdout and "more than the tolerance of 1.0e-15" in done.stdout
    said = re.search(r"the gradient of (\S+) differs from upstream's by a relative (\S+) at step (\d)", done.stdout)
    # Half of the norm, or of a sum if that is larger.
    assert said and said[1].endswith("w2_EDF") and float(said[2]) >= 0.48 and said[3] == "1"
    assert "upstream did not finish:" in done.stdout and "lost a wheel | rank 1 was ended by SIGKILL" in done.stdout
    runs = json.loads((out / "report.json").read_text())["runs"]
    assert [len(run["steps"]) for run in runs] == [3, 1]
    split, none = (run["time_split"] for run in runs)
    assert none is None and sum(split.values()) == pytest.approx(100) and split["optimizer"] > 0
    assert "percent of the profiled step" in done.stdout and (out / "time_split.png").is_file()
    # Of our layer the phases are those that it named while it trained, forward and backward.
    (trace,) = (out / "mega_moe").glob("**/rank0_trace.json*")
    durations, length = ranges_of(trace)
    assert {name: len(d) for name, d in durations.items()} == dict.fromkeys(("forward", "backward"), 1) | dict.fromkeys(
        ("dispatch", "experts", "combine"), 2
    )
    layer = sum(split[name] for name in ("dispatch", "experts", "combine"))
    shares = [m for m in records(out / "mega_moe", 0) if "moe/share_of_step(%)" in m]
    assert shares == [{"step": 3, "moe/share_of_step(%)": pytest.approx(layer)}]
    for name in ("dispatch", "combine"):
        assert split[name] == pytest.approx(100 * sum(durations[name]) / length, rel=0.05)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["no_such.toml"], "no_such.toml: no such file"),
        ([CONFIG, "--against", "upstraem"], "[mega_moe] backend"),
        ([CONFIG, "--against", "auto"], "trains that layer itself"),
        ([CONFIG, "--against", "upstream,minimal_async_ep"], "MinimalAsyncEPTokenDispatcher needs a GPU"),
        ([CONFIG, "--against", ","], "names no layer"),
        ([CONFIG, "--mega_moe.backend", "triton"], "cannot run on cpu"),
        ([CONFIG, "--trainning.steps", "3"], "training"),
        ([CONFIG, "--steps", "many"], "invalid whole number value: 'many'"),
        ([CONFIG, "--steps", "0"], "0 is no finite number above 0"),
        *(
            ([CONFIG, name, value], f"{value} is no finite number above 0")
            for name in ("--tolerance", "--gradient-tolerance")
            for value in ("-1", "0", "nan", "inf")
        ),
        *(
            ([CONFIG, *args, value], f"[{args[-1][2:].replace('.', '] ')}: all sides would write to '{value}'")
            for args, value in (
                (["--checkpoint.enable", "--checkpoint.folder"], "/tmp/shared"),
                (["--checkpoint.enable", "--checkpoint.folder"], "runs/../../shared"),
                (["--checkpoint.enable", "--checkpoint.folder"], "gs://bucket/run"),
                (["--metrics.save_tb_folder"], "/tmp/shared"),
                (["--profile", "--profiler.save_traces_folder"], "../shared"),
                (["--debug.save_config_file"], "/tmp/config.json"),
            )
        ),
        ([CONFIG, "--comm.mode", "fake_backend"], "trains nothing"),
        ([CONFIG, "--profile", "--steps", "3"], "3 steps are too few, the profiler takes 4"),
        ([CONFIG, "--out", "titan_mega_moe"], "is not empty"),
        ([CONFIG, "--out", "README.md"], "is no folder"),
        ([], "FILE"),
    ],
)
def test_bad_input_ends_with_2_before_anything_runs(args, said, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["compare", *args]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and "everything goes to" not in shown.out


def test_comparisons_that_begin_at_once_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison.time, "strftime", lambda form: "now")
    found = [comparison._new_folder(None, tmp_path / "compare", "mega_moe") for _ in range(3)]
    assert [folder.name for folder in found] == ["now", "now-2", "now-3"]
    out = tmp_path / "out"
    out.mkdir()
    # Another one takes the folder between the look and the claim.
    monkeypatch.setattr(comparison.Path, "iterdir", lambda folder: (folder / "mega_moe").mkdir() or iter(()))
    with pytest.raises(config.ConfigError, match=f"--out {out}: is no folder or is not empty"):
        comparison._new_folder(out, tmp_path, "mega_moe")


def test_what_a_run_left_in_the_folder_is_nothing_that_a_side_goes_on_from(tmp_path, monkeypatch):
    """A finished run's last checkpoint holds the model alone, and would be refused by `train`."""
    saved = tmp_path / "checkpoint" / "step-3"
    dcp.save({"w": torch.ones(1)}, checkpoint_id=saved, no_dist=True)
    began = []
    monkeypatch.setattr(comparison, "_train", lambda *args: began.append(args[0]) or report.Run("x", error="died"))
    monkeypatch.chdir(ROOT)
    assert cli.main(["compare", CONFIG, "--checkpoint.enable", "--dump_folder", str(tmp_path)]) == 1
    assert [side.name for side in began] == list(SIDES)


def until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def processes(of):
    """Ids of the processes with the folder `of` on their command line."""
    commands = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            commands[int(entry.name)] = (entry / "cmdline").read_text()  # empty of one that has ended
    return [pid for pid, command in commands.items() if str(of) in command]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timeout(300)
def test_a_signal_ends_a_comparison_with_a_report_of_what_there_is(tmp_path):
    """The ranks save what they have, if the file says so, as those of `train`."""
    out = tmp_path / "out"
    long = ("--steps", "1000", "--checkpoint.enable", "--checkpoint.interval", "1000")
    command = [sys.executable, "-m", "titan_mega_moe", "compare", CONFIG, "--out", str(out), *long, *SMALL]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as started:
        until(lambda: len(report.read_run("", out / "mega_moe" / "records").steps) >= 2)
        assert len(processes(out)) >= 4  # compare, train and its ranks
        started.send_signal(signal.SIGTERM)
        said = started.communicate(timeout=120)[0]
    assert started.returncode == 143 and not processes(out)
    stopped, never = json.loads((out / "report.json").read_text())["runs"]
    assert (stopped["error"], never["error"]) == ("stopped by SIGTERM", "not started after SIGTERM")
    assert "mega_moe did not finish: stopped by SIGTERM" in said and not (out / "upstream").exists()
    saved = [folder.name for folder in (out / "mega_moe" / "checkpoint").iterdir()]
    assert saved == [f"step-{stopped['steps'][-1]['step']}"]


def test_under_torchrun_it_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert cli.main(["compare", CONFIG]) == 2
    assert "run it without torchrun" in capsys.readouterr().err
