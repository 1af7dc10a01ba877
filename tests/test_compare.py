"""The README's first command as a user runs it, and what `compare` does with input that cannot work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_mega_moe import cli

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


def losses(folder):
    return [m["loss_metrics/global_avg_loss"] for m in records(folder, 0)]


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
    ours, theirs = ([records(out / side, rank) for rank in range(2)] for side in SIDES)
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
    memory = max(m["memory/max_reserved(GiB)"] for rank in range(2) for m in records(out / "mega_moe", rank))
    assert report["runs"][0]["summary"]["memory_gib"] == memory
    assert (out / "report.md").read_text().startswith("# mega_moe beside upstream")


SMALL = ("--model.layers", "1", "--training.local_batch_size", "1", "--training.seq_len", "32")


@pytest.mark.timeout(600)
def test_losses_further_apart_than_the_tolerance_end_with_1(tmp_path):
    narrow = {"COLUMNS": "60"}
    done = compare(CONFIG, "--steps", 2, "--tolerance", "1e-15", "--out", tmp_path, *SMALL, env=narrow)
    assert done.returncode == 1, done.stdout + done.stderr
    # Numbers, sentences and paths are in one piece however narrow the terminal is.
    assert "…" not in done.stdout and rows(done.stdout)[-1][1] == f"{losses(tmp_path / 'mega_moe')[-1]:.5f}"
    assert f"report: {tmp_path / 'report.md'}, {tmp_path / 'report.json'}\n" in done.stdout
    assert "losses differ from upstream's by" in done.stdout
    assert "more than the tolerance of 1.0e-15" in done.stdout


@pytest.mark.timeout(600)
def test_a_side_that_dies_is_reported_and_the_others_results_are_kept(tmp_path):
    """Ranks that import the file below end the third step of upstream's side with an error."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'upstream' in ' '.join(sys.argv):\n"
        "    from titan_mega_moe import device; device.prepare('cpu')\n"
        "    from torchtitan.trainer import Trainer\n"
        "    step = Trainer.train_step\n"
        "    def fail(self, batches):\n"
        "        if self.step == 2: raise ValueError('lost a wheel')\n"
        "        return step(self, batches)\n"
        "    Trainer.train_step = fail\n"
    )
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = compare(CONFIG, "--steps", 3, "--out", tmp_path / "out", *SMALL, env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "upstream did not finish:" in done.stdout and "lost a wheel" in done.stdout
    runs = json.loads((tmp_path / "out" / "report.json").read_text())["runs"]
    assert [len(run["steps"]) for run in runs] == [3, 1]


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
        ([CONFIG, "--steps", "0"], "0 is not above 0"),
        ([CONFIG, "--tolerance", "-1"], "is not above 0"),
        ([CONFIG, "--out", "titan_mega_moe"], "is not empty"),
        ([], "FILE"),
    ],
)
def test_bad_input_ends_with_2_before_anything_runs(args, said, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    try:
        code = cli.main(["compare", *args])
    except SystemExit as stopped:  # argparse's own way
        code = stopped.code
    shown = capsys.readouterr()
    assert code == 2 and said in shown.err and "everything goes to" not in shown.out


def test_under_torchrun_it_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert cli.main(["compare", CONFIG]) == 2
    assert "run it without torchrun" in capsys.readouterr().err
