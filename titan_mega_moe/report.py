"""What a comparison says: raw records in, tables and files out. It runs nothing and imports no torch.

Every number here is computed from the lines that the training processes wrote (metrics.py).
"""

import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

# The first steps compile, allocate and fill caches; a step time of theirs says nothing about training.
WARMUP_STEPS = 3


@dataclass(frozen=True)
class Step:
    """One optimizer step of one run. Loss and gradient norm are global; time and memory the worst rank's."""

    step: int
    loss: float
    grad_norm: float
    seconds: float
    tokens_per_second: float  # per device, mean over ranks
    memory_gib: float  # peak; on the CPU the resident set of a whole process


@dataclass
class Run:
    """One side of a comparison. `error` says why it ended early; its steps until then are kept."""

    name: str
    steps: list[Step] = field(default_factory=list)
    error: str | None = None

    def timed(self) -> list[Step]:
        """The steps whose times count: those after the warm-up, or all when there are no more."""
        return self.steps[WARMUP_STEPS:] or self.steps


def read_run(name: str, records: Path) -> Run:
    """The run whose ranks wrote `records`/rank_*.jsonl; no steps when there is none.

    A line cut short, as a killed process leaves it, is passed over.
    """
    ranks: list[dict[int, dict[str, Any]]] = []
    for file in sorted(records.glob("rank_*.jsonl"), key=lambda f: int(f.stem.removeprefix("rank_"))):
        lines: dict[int, dict[str, Any]] = {}
        for line in file.read_text().splitlines():
            try:
                metrics = json.loads(line)
            except json.JSONDecodeError:
                continue
            if "grad_norm" in metrics:  # validation logs a line of its own
                lines[metrics["step"]] = metrics
        ranks.append(lines)
    common = sorted(set.intersection(*map(set, ranks))) if ranks else []
    return Run(name, [_step(step, [lines[step] for lines in ranks]) for step in common])


def _step(step: int, ranks: list[dict[str, Any]]) -> Step:
    return Step(
        step=step,
        loss=ranks[0]["loss_metrics/global_avg_loss"],
        grad_norm=ranks[0]["grad_norm"],
        seconds=max(m["time_metrics/end_to_end(s)"] for m in ranks),
        tokens_per_second=statistics.fmean(m["throughput(tps)"] for m in ranks),
        memory_gib=max(m["memory/max_reserved(GiB)"] for m in ranks),
    )


@dataclass(frozen=True)
class Difference:
    """How far `ours` is from `other` at one step, as a share of the other's value."""

    step: int
    loss: float
    grad_norm: float


def differences(ours: Run, other: Run) -> list[Difference]:
    theirs = {step.step: step for step in other.steps}
    return [
        Difference(s.step, _relative(s.loss, theirs[s.step].loss), _relative(s.grad_norm, theirs[s.step].grad_norm))
        for s in ours.steps
        if s.step in theirs
    ]


def _relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b) if b else math.inf if a else 0.0


def first_beyond(ours: Run, other: Run, tolerance: float) -> Difference | None:
    """The first step whose losses differ by more than `tolerance`, relative to the other's."""
    return next((d for d in differences(ours, other) if not d.loss <= tolerance), None)


def summary(run: Run) -> dict[str, float]:
    """First and last loss; median and 95th percentile of the step time (s), tokens/s per device, peak GiB."""
    seconds = sorted(step.seconds for step in run.timed())
    return {
        "steps": len(run.steps),
        "first_loss": run.steps[0].loss,
        "last_loss": run.steps[-1].loss,
        "median_seconds": statistics.median(seconds),
        "p95_seconds": seconds[math.ceil(0.95 * len(seconds)) - 1],
        "tokens_per_second": statistics.median(step.tokens_per_second for step in run.timed()),
        "memory_gib": max(step.memory_gib for step in run.steps),
    }


def step_table(ours: Run, others: list[Run], rows: int = 32) -> Table:
    """Losses, their relative differences and step times; about `rows` steps, evenly, and the last."""
    table = Table(title="loss and seconds per step", title_justify="left")
    table.add_column("step", justify="right")
    for run in (ours, *others):
        table.add_column(f"{run.name}\nloss", justify="right")
    for other in others:
        table.add_column(f"rel. diff.\nto {other.name}", justify="right")
    for run in (ours, *others):
        table.add_column(f"{run.name}\nseconds", justify="right")
    every = max(1, math.ceil(len(ours.steps) / rows))
    for cells in _step_rows(ours, others):
        if (cells[0] - 1) % every == 0 or cells[0] == ours.steps[-1].step:
            table.add_row(*_formatted(cells, len(others)))
    return table


def summary_table(runs: list[Run]) -> Table:
    table = Table(title=f"in all; times after {WARMUP_STEPS} steps, tokens/s per device", title_justify="left")
    for column in _SUMMARY_COLUMNS:
        table.add_column(column, justify="left" if column == "layer" else "right")
    for run in runs:
        table.add_row(*_summary_cells(run))
    return table


_SUMMARY_COLUMNS = ("layer", "steps", "loss", "s/step", "p95", "tokens/s", "peak GiB")


def _summary_cells(run: Run) -> list[str]:
    if not run.steps:
        return [run.name, "0", *["-"] * 5]
    s = summary(run)
    return [
        run.name,
        str(s["steps"]),
        f"{s['first_loss']:.3f} -> {s['last_loss']:.3f}",
        f"{s['median_seconds']:.3f}",
        f"{s['p95_seconds']:.3f}",
        f"{s['tokens_per_second']:,.0f}",
        f"{s['memory_gib']:.2f}",
    ]


def _step_rows(ours: Run, others: list[Run]) -> list[list[Any]]:
    """step, each side's loss, each other's difference, each side's seconds; None where a side had ended."""
    sides = [{s.step: s for s in run.steps} for run in (ours, *others)]
    diffs = [{d.step: d.loss for d in differences(ours, other)} for other in others]
    rows: list[list[Any]] = []
    for step in sorted(set().union(*sides)):
        at = [side.get(step) for side in sides]
        rows.append([step, *(s and s.loss for s in at), *(d.get(step) for d in diffs), *(s and s.seconds for s in at)])
    return rows


def _formatted(cells: list[Any], others: int) -> list[str]:
    formats = ["d", *[".5f"] * (others + 1), *[".1e"] * others, *[".3f"] * (others + 1)]
    return ["-" if value is None else format(value, f) for value, f in zip(cells, formats, strict=True)]


def verdict(ours: Run, others: list[Run], tolerance: float) -> tuple[bool, list[str]]:
    """Whether every side ran and agrees, and one sentence a side."""
    good, lines = True, []
    for run in (ours, *others):
        if run.error is not None:
            good = False
            lines.append(f"{run.name} did not finish: {run.error}")
    for other in others:
        beyond = first_beyond(ours, other, tolerance)
        common = differences(ours, other)
        if beyond is not None:
            good = False
            lines.append(
                f"losses differ from {other.name}'s by a relative {beyond.loss:.1e} at step {beyond.step}, "
                f"more than the tolerance of {tolerance:.1e}"
            )
        elif common:
            worst = max(common, key=lambda d: d.loss)
            lines.append(
                f"losses equal {other.name}'s within a relative {worst.loss:.1e} (step {worst.step}) "
                f"over {len(common)} steps; the tolerance is {tolerance:.1e}"
            )
    return good, lines


def write(folder: Path, ours: Run, others: list[Run], tolerance: float, settings: dict[str, Any]) -> None:
    """`folder`/report.json and report.md: all steps, the summary, the verdict and what was run."""
    good, lines = verdict(ours, others, tolerance)
    runs = [ours, *others]
    (folder / "report.json").write_text(
        json.dumps(
            {
                "agrees": good,
                "verdict": lines,
                "tolerance": tolerance,
                "settings": settings,
                "runs": [{**asdict(run), "summary": summary(run) if run.steps else None} for run in runs],
                "differences": {other.name: [asdict(d) for d in differences(ours, other)] for other in others},
            },
            indent=1,
        )
        + "\n"
    )
    names = [run.name for run in runs]
    head = ["step", *(f"{n} loss" for n in names), *(f"relative difference to {n}" for n in names[1:])]
    head += [f"{n} s" for n in names]
    (folder / "report.md").write_text(
        "\n\n".join(
            [
                f"# {ours.name} beside {', '.join(names[1:])}",
                *lines,
                _markdown(_SUMMARY_COLUMNS, [_summary_cells(run) for run in runs]),
                _markdown(("setting", "value"), [[k, str(v)] for k, v in settings.items()]),
                _markdown(head, [_formatted(cells, len(others)) for cells in _step_rows(ours, others)]),
                "## Caveats",
                f"Times leave out the first {WARMUP_STEPS} steps. Sides ran one after another. On the CPU "
                "memory is the peak resident set of a whole process, Python and libraries included.",
            ]
        )
        + "\n"
    )


def _markdown(head: Any, rows: list[list[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
