"""Reports say what the records hold: every number is computed again here, by hand or from the lines."""

import io
import json

import pytest
from rich.console import Console

from titan_mega_moe import report
from titan_mega_moe.report import Run, Step


def line(step, loss, seconds, norm=1.0, memory=2.0, tps=100.0):
    return json.dumps(
        {
            "step": step,
            "loss_metrics/global_avg_loss": loss,
            "grad_norm": norm,
            "time_metrics/end_to_end(s)": seconds,
            "throughput(tps)": tps,
            "memory/max_reserved(GiB)": memory,
            "memory/max_active(GiB)": memory / 2,
        }
    )


def write(folder, ranks):
    folder.mkdir(parents=True, exist_ok=True)
    for rank, lines in enumerate(ranks):
        (folder / f"rank_{rank}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def run(name, losses, seconds=1.0):
    return Run(name, [Step(i + 1, loss, 2.0 * loss, seconds, 10.0, 1.0, 0.5) for i, loss in enumerate(losses)])


def text(table, width=200):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_a_run_has_the_global_loss_and_the_worst_ranks_time_and_memory(tmp_path):
    folder = write(
        tmp_path,
        [
            [line(1, 7.5, 3.0, memory=1.5, tps=10), line(2, 7.0, 0.5, norm=2.5)],
            [line(1, 7.5, 4.0, memory=1.0, tps=30), line(2, 7.0, 0.25, norm=2.5)],
        ],
    )
    assert report.read_run("a", folder).steps == [
        Step(1, 7.5, 1.0, 4.0, 20.0, 1.5, 0.75),
        Step(2, 7.0, 2.5, 0.5, 100.0, 2.0, 1.0),
    ]


def test_more_than_ten_ranks_keep_rank_0_first(tmp_path):
    folder = write(tmp_path, [[line(1, 5.0, 1.0, norm=float(rank))] for rank in range(12)])
    assert report.read_run("a", folder).steps[0].grad_norm == 0.0


def test_lines_cut_short_validation_and_steps_that_not_all_ranks_reached_are_left_out(tmp_path):
    cut = line(3, 1.0, 1.0)[:-7]
    validation = json.dumps({"step": 2, "validation_metrics/loss": 9.0})
    folder = write(
        tmp_path,
        [[line(1, 3.0, 1.0), line(2, 2.0, 1.0), validation, cut], [line(1, 3.0, 1.0), line(2, 2.0, 1.0)]],
    )
    assert [(s.step, s.loss) for s in report.read_run("a", folder).steps] == [(1, 3.0), (2, 2.0)]
    with (folder / "rank_0.jsonl").open("a") as file:
        file.write("\n" + line(3, 1.0, 1.0) + "\n")
    assert len(report.read_run("a", folder).steps) == 2


def test_the_last_line_of_a_step_counts_when_a_run_was_resumed(tmp_path):
    folder = write(tmp_path, [[line(1, 3.0, 1.0), line(2, 2.0, 1.0), line(2, 2.5, 1.0)]])
    assert [s.loss for s in report.read_run("a", folder).steps] == [3.0, 2.5]


def test_no_records_are_no_steps(tmp_path):
    assert report.read_run("a", tmp_path / "records").steps == []


def test_summary_leaves_the_warm_up_out_of_times_only():
    seconds = [9.0, 8.0, 7.0, *[float(i) for i in range(1, 21)]]
    slow = Run("a", [Step(i + 1, 10.0 - i, 1.0, s, 100 / s, 1 + i / 10, 0.5 + i / 20) for i, s in enumerate(seconds)])
    assert report.summary(slow) == {
        "steps": 23,
        "first_loss": 10.0,
        "last_loss": -12.0,
        "median_seconds": 10.5,
        "p95_seconds": 19.0,
        "tokens_per_second": pytest.approx((100 / 10 + 100 / 11) / 2),
        "mfu": 0.0,
        "memory_gib": pytest.approx(3.2),
        "in_use_gib": pytest.approx(1.6),
        "expert_load": None,
        "rank_load": None,
    }
    few = Run("a", slow.steps[:3])
    assert [report.summary(few)[name] for name in ("median_seconds", "p95_seconds", "mfu")] == [None] * 3


def test_differences_are_relative_to_the_other_side_and_where_both_have_the_step():
    ours, other = run("ours", [4.0, 3.0, 2.0]), run("other", [4.0, 2.0])
    assert [(d.step, d.loss, d.grad_norm) for d in report.differences(ours, other)] == [
        (1, 0, 0),
        (2, 0.5, 0.5),
    ]


@pytest.mark.parametrize(
    ("losses", "step"), [([5.0, 4.0], None), ([5.0, 4.04], None), ([5.0, 4.05], 2), ([float("nan"), 4.0], 1)]
)
def test_the_first_step_beyond_the_tolerance_is_named(losses, step):
    beyond = report.first_beyond(run("ours", losses), run("other", [5.0, 4.0]), 1.1e-2)
    assert (beyond and beyond.step) == step


def test_a_disagreement_is_told_with_its_step_and_a_dead_side_with_its_error():
    ours, other = run("mega_moe", [5.0, 4.4]), run("upstream", [5.0, 4.0])
    dead = Run("deepep", error="no such GPU")
    good, lines = report.verdict(ours, [other, dead], 1e-2)
    assert not good
    assert lines == [
        "deepep did not finish: no such GPU",
        "losses differ from upstream's by a relative 1.0e-01 at step 2, more than the tolerance of 1.0e-02",
        "step times are not compared with upstream's: 0 were taken, without the first 3 steps, and it takes 5: give "
        "--steps 8",
    ]
    good, lines = report.verdict(ours, [other], 0.2)
    assert good and lines[:1] == [
        "losses equal upstream's within a relative 1.0e-01 (step 2) over 2 steps; the tolerance is 2.0e-01"
    ]


@pytest.mark.parametrize("losses", [[], [float("nan")], [float("inf")]])
def test_sides_without_a_finite_loss_in_common_do_not_agree(losses):
    """TorchTitan ends a training whose loss is not finite; had it not, or had nothing been recorded, it is no match."""
    for ours, other in ((losses, losses), (losses, [5.0]), ([5.0], losses)):
        assert not report.verdict(run("mega_moe", ours), [run("upstream", other)], 1e-2)[0]


def test_the_tensor_whose_gradient_is_furthest_off_is_named_with_its_step():
    ours, other = run("mega_moe", [5.0]), run("upstream", [5.0])
    other.gradients = {1: {"w1": [2.0, 1.0, -1.0], "w2": [4.0, 3.0, 0.5], "gate": [0.0, 0.0, 0.0]}}
    ours.gradients = {1: {"w1": [2.0, 1.02, -1.0], "w2": [4.0, -3.0, 0.5], "gate": [0.0, 0.0, 0.0]}}  # w2: same norm
    found = report.gradient_differences(ours, other)
    assert [(d.step, d.tensor, pytest.approx(d.relative)) for d in found] == [
        (1, "w2", 1.5),
        (1, "w1", 0.01),
        (1, "gate", 0.0),
    ]
    good, lines = report.verdict(ours, [other], 1e-2, 0.1)
    assert not good and (
        "the gradient of w2 differs from upstream's by a relative 1.5e+00 at step 1, more than the tolerance of "
        "1.0e-01; so do 0 others of 3 tensors" in lines
    )
    good, lines = report.verdict(ours, [other], 1e-2, 2.0)
    assert good and "gradients equal upstream's within a relative 1.5e+00 (w2) in all 3 tensors at step 1" in lines
    ours.gradients[1]["gate"] = [float("nan")] * 3
    assert report.gradient_differences(ours, other)[0].tensor == "gate"
    assert not report.verdict(ours, [other], 1e-2, 2.0)[0]


def test_speed_is_a_ratio_of_medians_with_an_interval_around_it():
    ours, other = run("mega_moe", [5.0] * 23, 0.5), run("upstream", [5.0] * 23, 1.0)
    assert report.speed(ours, other) == report.Speed(2.0, 2.0, 2.0, 20)
    uneven = Run("upstream", [Step(i, 5.0, 1.0, 1.0 + i % 5, 1.0, 1.0, 0.5) for i in range(1, 24)])
    fast = report.speed(ours, uneven)
    assert fast.ratio == 6.0 and 4.0 <= fast.low < 6.0 < fast.high <= 8.0
    assert report.speed(ours, Run("dead")) is None


def test_steps_of_the_profiler_are_not_timed_and_few_steps_give_no_ratio():
    """Ten times as long where the profiler was in it."""
    ours, other = (
        Run(name, [Step(i, 5.0, 1.0, s * (10 if 7 <= i <= 11 else 1), 1.0, 1.0, 0.5) for i in range(1, 14)])
        for name, s in (("mega_moe", 0.5), ("upstream", 1.0))
    )
    for run in (ours, other):
        run.disturbed = [*range(7, 12)]
    assert [s.step for s in ours.timed()] == [4, 5, 6, 12, 13]
    assert report.speed(ours, other) == report.Speed(2.0, 2.0, 2.0, 5)
    assert report.summary(ours)["p95_seconds"] == 0.5
    assert "mega_moe is 2.00 times as fast" in report.verdict(ours, [other], 1e-2)[1][-1]
    assert "without the first 3 steps and those of the profiler" in report.caveats([ours, other])
    other.steps = other.steps[:-1]
    assert report.speed(ours, other) is None
    assert report.verdict(ours, [other], 1e-2)[1][-1] == (
        "step times are not compared with upstream's: 4 were taken, without the first 3 steps and those of the "
        "profiler, and it takes 5: give --steps 13"
    )


def test_what_a_time_says_nothing_about_is_said(tmp_path):
    ours, other = run("mega_moe", [5.0] * 23), run("upstream", [5.0] * 23)
    assert "reference" not in report.verdict(ours, [other], 1e-2)[1][-1] + report.caveats([ours, other])
    ours.reference = True
    assert report.verdict(ours, [other], 1e-2)[1][-1].endswith("and says nothing of the fused one")
    assert "no time here says anything about the fused one" in report.caveats([ours, other])
    assert "all-to-all" not in report.caveats([ours, other])
    ours.time_split, other.time_split = {"dispatch": 40.0, "combine": 60.0}, {"dispatch": 70.0, "other": 30.0}
    report.write(tmp_path, ours, [other], 1e-2, {})
    page = (tmp_path / "report.md").read_text()
    assert "| upstream | 70.0 | - | 30.0 |" in page and "every all-to-all as dispatch, also the combine's" in page


def test_a_pipelines_loss_is_its_last_stages(tmp_path):
    folder = write(tmp_path, [[line(1, -2.0, 1.0)], [line(1, 7.0, 1.0)]])
    assert report.read_run("a", folder).steps[0].loss == 7.0


def test_the_step_table_has_every_sides_numbers_and_a_dash_where_one_ended():
    ours, other = run("mega_moe", [5.0, 4.0, 3.5], 0.25), run("upstream", [5.0, 4.1], 0.5)
    shown = [r for r in text(report.step_table(ours, [other])).splitlines() if r.startswith("│")]
    rows = [[cell.strip() for cell in r.strip("│").split("│")] for r in shown]
    assert rows == [
        ["1", "5.00000", "5.00000", "0.0e+00", "0.250", "0.500"],
        ["2", "4.00000", "4.10000", "2.4e-02", "0.250", "0.500"],
        ["3", "3.50000", "-", "-", "0.250", "-"],
    ]


def test_a_long_step_table_shows_steps_evenly_and_the_last():
    ours = run("mega_moe", [5.0] * 1000)
    shown = [r for r in text(report.step_table(ours, [ours])).splitlines() if r.startswith("│")]
    steps = [int(r.split("│")[1]) for r in shown]
    assert steps == [*range(1, 1000, 32), 1000]


def test_the_files_hold_all_steps(tmp_path):
    ours, other = run("mega_moe", [5.0 - i / 100 for i in range(80)]), run("upstream", [5.0] * 80)
    report.write(tmp_path, ours, [other], 1e-2, {"model": "qwen3"})
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved["agrees"] is False and saved["settings"] == {"model": "qwen3"}
    assert [s["loss"] for s in saved["runs"][0]["steps"]] == [s.loss for s in ours.steps]
    assert saved["runs"][0]["summary"] == report.summary(ours)
    assert saved["differences"]["upstream"][10]["loss"] == pytest.approx(0.02)
    page = (tmp_path / "report.md").read_text()
    assert page.startswith("# mega_moe beside upstream\n") and "## Caveats" in page
    assert "| relative difference to upstream |" in page
    assert "rel. diff." in text(report.step_table(ours, [other]))
    assert "| 80 | 4.21000 | 5.00000 | 1.6e-01 | 1.000 | 1.000 |" in page
    assert "losses differ from upstream's by a relative 1.2e-02 at step 7, more than" in page


def test_a_side_without_steps_has_a_row_of_dashes(tmp_path):
    ours, dead = run("mega_moe", [5.0]), Run("upstream", error="died")
    report.write(tmp_path, ours, [dead], 1e-2, {})
    assert "| upstream | 0 | - | - | - | - | - | - | - | - |" in (tmp_path / "report.md").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["runs"][1]["error"] == "died"
