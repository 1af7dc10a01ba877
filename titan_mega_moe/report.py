"""What a comparison says: raw records in, tables and files out. It runs nothing and imports no torch.

Every number here is computed from the lines that the training processes wrote (metrics.py).
"""

import base64
import json
import math
import random
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

# The first steps compile, allocate and fill caches; a step time of theirs says nothing about training.
WARMUP_STEPS = 3
# A median of fewer is moved by any one of them, and resampling them gives an interval that is too narrow.
TIMED_STEPS = 5


@dataclass(frozen=True)
class Step:
    """One optimizer step of one run. Loss and gradient norm are global; time and memory the worst rank's."""

    step: int
    loss: float
    grad_norm: float
    seconds: float
    tokens_per_second: float  # per device, mean over ranks
    memory_gib: float  # peak, taken from the device; on the CPU the resident set of a whole process
    in_use_gib: float  # peak, what tensors held of that
    mfu: float = 0.0  # percent, mean over ranks; 0 where the device's peak is not known
    expert_load: float | None = None  # the busiest expert's tokens over the mean, of the worst layer
    rank_load: float | None = None  # the same of ranks


@dataclass
class Run:
    """One side of a comparison. `error` says why it ended early; its steps until then are kept."""

    name: str
    steps: list[Step] = field(default_factory=list)
    error: str | None = None
    # By step and parameter: norm of the gradient, its sums over even and over odd elements.
    gradients: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    # Percent of a step's time by what it went to, if it was profiled.
    time_split: dict[str, float] | None = None
    # Steps whose times the profiler is in.
    disturbed: list[int] = field(default_factory=list)
    # Whether it is our layer's reference implementation, whose speed is not that of a fused one.
    reference: bool = False

    def timed(self) -> list[Step]:
        """The steps whose times count: those after the warm-up, without a profiler."""
        return [step for step in self.steps[WARMUP_STEPS:] if step.step not in self.disturbed]


def read_run(name: str, records: Path) -> Run:
    """The run whose ranks wrote `records`/rank_*.jsonl; no steps when there is none.

    A line cut short, as a killed process leaves it, is passed over.
    """
    ranks: list[dict[int, dict[str, Any]]] = []
    gradients: dict[int, dict[str, list[float]]] = {}
    for file in sorted(records.glob("rank_*.jsonl"), key=lambda f: int(f.stem.removeprefix("rank_"))):
        lines: dict[int, dict[str, Any]] = {}
        for line in file.read_text().splitlines():
            try:
                metrics = json.loads(line)
            except json.JSONDecodeError:
                continue
            if "grad_norm" in metrics:  # validation logs a line of its own
                lines[metrics["step"]] = metrics
            elif "gradients" in metrics:
                gradients.setdefault(metrics["step"], {}).update(metrics["gradients"])
        ranks.append(lines)
    common = sorted(set.intersection(*map(set, ranks))) if ranks else []
    return Run(name, [_step(step, [lines[step] for lines in ranks]) for step in common], gradients=gradients)


def _step(step: int, ranks: list[dict[str, Any]]) -> Step:
    return Step(
        step=step,
        # Of a pipeline only the last stage knows it; the others' ranks record a negative number.
        loss=max(m["loss_metrics/global_avg_loss"] for m in ranks),
        grad_norm=ranks[0]["grad_norm"],
        seconds=max(m["time_metrics/end_to_end(s)"] for m in ranks),
        tokens_per_second=statistics.fmean(m["throughput(tps)"] for m in ranks),
        memory_gib=max(m["memory/max_reserved(GiB)"] for m in ranks),
        in_use_gib=max(m["memory/max_active(GiB)"] for m in ranks),
        mfu=statistics.fmean(m.get("mfu(%)", 0.0) for m in ranks),
        expert_load=_most(m.get("moe/expert_load(max/mean)") for m in ranks),
        rank_load=_most(m.get("moe/rank_load(max/mean)") for m in ranks),
    )


def _most(values: Iterable[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)


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


@dataclass(frozen=True)
class GradientDifference:
    """How far one tensor's gradient is from the other side's, as a share of the other's norm."""

    step: int
    tensor: str
    relative: float


def gradient_differences(ours: Run, other: Run) -> list[GradientDifference]:
    """Of every tensor at the first step that both recorded, where both still have the same weights; largest first.

    Of the norm and of the two sums the one that differs most; a sum of n numbers of random sign is as large as
    their norm.
    """
    common = sorted(ours.gradients.keys() & other.gradients.keys())
    if not common:
        return []
    a, b = ours.gradients[common[0]], other.gradients[common[0]]
    found = []
    for name in a.keys() & b.keys():
        furthest = max(abs(x - y) for x, y in zip(a[name], b[name], strict=True))
        found.append(GradientDifference(common[0], name, furthest / (b[name][0] or 1e-30)))
    return sorted(found, key=lambda d: (-d.relative if d.relative == d.relative else -math.inf, d.tensor))


@dataclass(frozen=True)
class Speed:
    """How many times as fast one side's steps are as the other's: of medians, with a 90% interval."""

    ratio: float
    low: float
    high: float
    steps: int  # timed, of the side with fewer


def speed(ours: Run, other: Run) -> Speed | None:
    """None with fewer than TIMED_STEPS. The interval is that of 1000 bootstrap samples, drawn from a fixed seed."""
    a, b = ([s.seconds for s in run.timed()] for run in (ours, other))
    if min(len(a), len(b)) < TIMED_STEPS:
        return None
    pick = random.Random(0)
    ratios = sorted(
        statistics.median(pick.choices(b, k=len(b))) / statistics.median(pick.choices(a, k=len(a))) for _ in range(1000)
    )
    return Speed(statistics.median(b) / statistics.median(a), ratios[50], ratios[949], min(len(a), len(b)))


def summary(run: Run) -> dict[str, float | None]:
    """First and last loss; median and 95th percentile of the step time (s), tokens/s per device and MFU (%), medians;
    peak GiB, and of them in use; the most of the busiest expert and rank over the mean. None where nothing was timed
    or counted.
    """
    seconds = sorted(step.seconds for step in run.timed())
    return {
        "steps": len(run.steps),
        "first_loss": run.steps[0].loss,
        "last_loss": run.steps[-1].loss,
        "median_seconds": _median(seconds),
        "p95_seconds": seconds[math.ceil(0.95 * len(seconds)) - 1] if seconds else None,
        "tokens_per_second": _median([step.tokens_per_second for step in run.timed()]),
        "mfu": _median([step.mfu for step in run.timed()]),
        "memory_gib": max(step.memory_gib for step in run.steps),
        "in_use_gib": max(step.in_use_gib for step in run.steps),
        "expert_load": _most(step.expert_load for step in run.steps),
        "rank_load": _most(step.rank_load for step in run.steps),
    }


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


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
    table = Table(title=f"in all; times {_untimed(runs)}, tokens/s per device", title_justify="left")
    for column in _SUMMARY_COLUMNS:
        table.add_column(column, justify="left" if column == "layer" else "right")
    for run in runs:
        table.add_row(*_summary_cells(run))
    return table


def split_table(runs: list[Run]) -> Table:
    """Percent of the profiled step by what it went to."""
    table = Table(title="percent of the profiled step", title_justify="left")
    head, rows = _split_rows(runs)
    for column in head:
        table.add_column(column, justify="left" if column == "layer" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _split_rows(runs: list[Run]) -> tuple[list[str], list[list[str]]]:
    names = list(dict.fromkeys(name for run in runs for name in run.time_split or {}))
    splits = [(run.name, run.time_split or {}) for run in runs]
    rows = [[run, *(f"{split[name]:.1f}" if name in split else "-" for name in names)] for run, split in splits]
    return ["layer", *names], rows


def _untimed(runs: list[Run]) -> str:
    profiled = any(run.disturbed for run in runs)
    return f"without the first {WARMUP_STEPS} steps" + " and those of the profiler" * profiled


_SUMMARY_COLUMNS = (
    "layer", "steps", "loss", "s/step", "p95", "tokens/s", "MFU %", "peak GiB", "in use",
    "busiest expert", "busiest rank",
)  # fmt: skip


def _summary_cells(run: Run) -> list[str]:
    if not run.steps:
        return [run.name, "0", *["-"] * (len(_SUMMARY_COLUMNS) - 2)]
    s = summary(run)

    def cell(name: str, form: str = "{:.2f}") -> str:
        return "-" if s[name] is None else form.format(s[name])

    return [
        run.name,
        cell("steps", "{}"),
        f"{s['first_loss']:.3f} -> {s['last_loss']:.3f}",
        cell("median_seconds", "{:.3f}"),
        cell("p95_seconds", "{:.3f}"),
        cell("tokens_per_second", "{:,.0f}"),
        cell("mfu") if s["mfu"] else "-",
        cell("memory_gib"),
        cell("in_use_gib"),
        *(cell(name, "{:.2f} x mean") for name in ("expert_load", "rank_load")),
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


def verdict(
    ours: Run, others: list[Run], tolerance: float, gradient_tolerance: float = math.inf
) -> tuple[bool, list[str]]:
    """Whether every side ran and agrees in losses and first gradients, and sentences on each side."""
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
        elif ours.error is None and other.error is None:
            good = False
            lines.append(f"there is no step that both sides, {ours.name} and {other.name}, have a loss of")
        if gradients := gradient_differences(ours, other):
            wrong = [d for d in gradients if not d.relative <= gradient_tolerance]
            first = gradients[0]
            good = good and not wrong
            lines.append(
                f"the gradient of {first.tensor} differs from {other.name}'s by a relative {first.relative:.1e} "
                f"at step {first.step}, more than the tolerance of {gradient_tolerance:.1e}; so do "
                f"{len(wrong) - 1} others of {len(gradients)} tensors"
                if wrong
                else f"gradients equal {other.name}'s within a relative {first.relative:.1e} ({first.tensor}) in all "
                f"{len(gradients)} tensors at step {first.step}"
            )
        if (fast := speed(ours, other)) is not None:
            lines.append(
                f"{ours.name} is {fast.ratio:.2f} times as fast as {other.name} a step (90% interval "
                f"{fast.low:.2f} to {fast.high:.2f}, from {fast.steps} steps)"
                + "; that is its reference implementation and says nothing of the fused one"
                * ours.reference
            )
        elif ours.error is None and other.error is None:
            timed = min(len(run.timed()) for run in (ours, other))
            lines.append(
                f"step times are not compared with {other.name}'s: {timed} were taken, {_untimed([ours, other])}, "
                f"and it takes {TIMED_STEPS}: give --steps {_enough([ours, other])}"
            )
    return good, lines


def _enough(runs: list[Run]) -> int:
    """Steps of which TIMED_STEPS would be timed."""
    return TIMED_STEPS + max(WARMUP_STEPS + sum(step > WARMUP_STEPS for step in run.disturbed) for run in runs)


def write(
    folder: Path,
    ours: Run,
    others: list[Run],
    tolerance: float,
    settings: dict[str, Any],
    gradient_tolerance: float = math.inf,
) -> None:
    """`folder`/report.json, .md and .html, and the pictures: all steps, the summary, the verdict and what was run."""
    good, lines = verdict(ours, others, tolerance, gradient_tolerance)
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
                "gradient_tolerance": gradient_tolerance if math.isfinite(gradient_tolerance) else None,
                "gradient_differences": {
                    other.name: [asdict(d) for d in gradient_differences(ours, other)] for other in others
                },
                "speed": {other.name: asdict(s) if (s := speed(ours, other)) else None for other in others},
            },
            indent=1,
        )
        + "\n"
    )
    from titan_mega_moe import plots  # which draws what is defined here

    pictures = plots.draw(folder, runs)
    tables = {
        "summary": (_SUMMARY_COLUMNS, [_summary_cells(run) for run in runs]),
        "split": _split_rows(runs),
        "gradients": _gradient_rows(ours, others),
        "settings": (("setting", "value"), [[k, str(v)] for k, v in settings.items()]),
        "steps": (_step_head(runs), [_formatted(cells, len(others)) for cells in _step_rows(ours, others)]),
    }
    title = f"{ours.name} beside {', '.join(run.name for run in others)}"
    page = _template().render(
        title=title,
        good=good,
        lines=lines,
        pictures={name: base64.b64encode(file.read_bytes()).decode() for name, file in pictures.items()},
        caveats=caveats(runs),
        **tables,
    )
    (folder / "report.html").write_text(page)
    (folder / "report.md").write_text(
        "\n\n".join(
            [
                f"# {title}",
                *lines,
                _markdown(*tables["summary"]),
                *(f"![{name}]({file.name})" for name, file in pictures.items()),
                *([_markdown(*tables["split"])] if len(tables["split"][0]) > 1 else []),
                *([_markdown(*tables["gradients"])] if tables["gradients"][1] else []),
                _markdown(*tables["settings"]),
                _markdown(*tables["steps"]),
                "## Caveats",
                caveats(runs),
            ]
        )
        + "\n"
    )


def _step_head(runs: list[Run]) -> list[str]:
    names = [run.name for run in runs]
    losses, differences = [f"{n} loss" for n in names], [f"relative difference to {n}" for n in names[1:]]
    return ["step", *losses, *differences, *(f"{n} s" for n in names)]


def _gradient_rows(ours: Run, others: list[Run], most: int = 12) -> tuple[list[str], list[list[str]]]:
    """The tensors that are furthest apart, with their differences to each side that recorded them."""
    sides = {other.name: {d.tensor: d.relative for d in gradient_differences(ours, other)} for other in others}
    sides = {name: found for name, found in sides.items() if found}
    tensors = set().union(*sides.values())
    worst = {name: max(found[name] for found in sides.values() if name in found) for name in tensors}
    rows = [
        [tensor, *(f"{found[tensor]:.1e}" if tensor in found else "-" for found in sides.values())]
        for tensor in sorted(worst, key=lambda tensor: (-worst[tensor], tensor))[:most]
    ]
    return ["tensor", *(f"relative difference to {name}" for name in sides)], rows


def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("titan_mega_moe", ".")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("report.html.j2")


def caveats(runs: list[Run]) -> str:
    text = (
        f"Here are times {_untimed(runs)}. Sides ran one after another. Tokens of the busiest expert and rank are over "
        "the mean, of the worst layer and step. Peak GiB are what the allocator took from the device, in use is what "
        "tensors held of them at the most. On the CPU memory is the peak resident set of a whole process, Python "
        "and libraries included, and no MFU is known."
    )
    if any(run.reference for run in runs):
        text += " The layer ran its reference implementation: no time here says anything about the fused one."
    if any(run.time_split for run in runs):
        text += (
            " Of the profiled step, mega_moe names its phases. TorchTitan's layers do not, so their kernels and "
            "operators count by their own names: every all-to-all as dispatch, also the combine's; grouped products as "
            "experts; what permutes, activates, weighs and sums rows as other. Compare these four in sum."
        )
    return text


def _markdown(head: Any, rows: list[list[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
