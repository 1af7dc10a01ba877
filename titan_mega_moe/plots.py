"""The pictures of a comparison, as PNG files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_mega_moe import report
from titan_mega_moe.report import Run

_COLOURS = ["#1f6feb", "#d4691e", "#2f8f4e", "#8a4fbf", "#b3364a"]  # told apart by those who see red and green alike


def draw(folder: Path, runs: list[Run]) -> dict[str, Path]:
    """Title and file of each picture that there are numbers for, ours first in `runs`."""
    import matplotlib

    matplotlib.use("Agg")
    runs = [run for run in runs if run.steps]
    pictures: dict[str, tuple[str, Callable[[Any, list[Run]], None], bool]] = {
        "Loss": ("loss.png", _loss, bool(runs)),
        "Step time": ("step_time.png", _step_time, bool(runs)),
        "Where the time went": ("time_split.png", _time_split, any(run.time_split for run in runs)),
        "Expert load": ("expert_load.png", _load, any(s.expert_load for run in runs for s in run.steps)),
    }
    found = {}
    for title, (name, picture, there) in pictures.items():
        if there:
            found[title] = folder / name
            _save(folder / name, picture, runs)
    return found


def _save(file: Path, picture: Callable[[Any, list[Run]], None], runs: list[Run]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    picture(figure, runs)
    figure.savefig(file, dpi=130)


def _axes(figure: Any, place: int, columns: int, x: str, y: str) -> Any:
    axes = figure.add_subplot(1, columns, place)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _loss(figure: Any, runs: list[Run]) -> None:
    """All losses; beside them how far the others' are from ours."""
    ours, *others = runs
    axes = _axes(figure, 1, 2, "step", "loss")
    for i, run in enumerate(runs):
        style = "-" if i == 0 else "--"  # equal curves hide each other
        at = [s.step for s in run.steps], [s.loss for s in run.steps]
        axes.plot(*at, style, color=_COLOURS[i % 5], label=run.name)
    axes.legend(frameon=False)
    beside = _axes(figure, 2, 2, "step", "relative difference of the loss")
    for i, other in enumerate(others, 1):
        points = [(d.step, d.loss) for d in report.differences(ours, other) if d.loss > 0]
        if points:
            beside.semilogy(*zip(*points, strict=True), ".-", color=_COLOURS[i % 5], label=f"to {other.name}")
    if beside.lines:
        beside.legend(frameon=False)
    else:
        beside.text(0.5, 0.5, "none", ha="center", transform=beside.transAxes)


def _step_time(figure: Any, runs: list[Run]) -> None:
    axes = _axes(figure, 1, 1, "step", "seconds")
    for i, run in enumerate(runs):
        at = [s.step for s in run.steps], [s.seconds for s in run.steps]
        axes.plot(*at, ".-", color=_COLOURS[i % 5], label=run.name)
    timed = [s.seconds for run in runs for s in run.timed() or run.steps]
    axes.set_ylim(0, 1.25 * max(timed))  # the first steps compile, and may be far above
    axes.legend(frameon=False)


def _time_split(figure: Any, runs: list[Run]) -> None:
    """A bar a side, of its step's time."""
    axes = _axes(figure, 1, 1, "percent of the profiled step", "")
    runs = [run for run in runs if run.time_split]
    names = list(dict.fromkeys(name for run in runs for name in run.time_split or {}))
    colours = [*_COLOURS, "#5a9bd4", "#999999", "#e5e5e5"]
    left = dict.fromkeys((run.name for run in runs), 0.0)
    for i, name in enumerate(names):
        widths = [(run.time_split or {}).get(name, 0.0) for run in runs]
        bars = axes.barh(list(left), widths, left=list(left.values()), color=colours[i % len(colours)], label=name)
        axes.bar_label(bars, [f"{w:.0f}" if w > 4 else "" for w in widths], label_type="center", fontsize=8)
        left = {side: at + w for (side, at), w in zip(left.items(), widths, strict=True)}
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _load(figure: Any, runs: list[Run]) -> None:
    for place, (title, value) in enumerate(
        (("busiest expert", lambda s: s.expert_load), ("busiest rank", lambda s: s.rank_load)), 1
    ):
        axes = _axes(figure, place, 2, "step", f"{title}'s tokens over the mean")
        for i, run in enumerate(runs):
            points = [(s.step, value(s)) for s in run.steps if value(s)]
            if points:
                style = "-" if i == 0 else "--"
                axes.plot(*zip(*points, strict=True), style, color=_COLOURS[i % 5], label=run.name)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
