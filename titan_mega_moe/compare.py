"""`titan-mega-moe compare FILE`: train the same model from the same seed and data once with each layer.

Each side is a `train` command of its own, in turn, whose ranks write raw records; report.py makes tables
of them.
"""

import argparse
import copy
import itertools
import math
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from titan_mega_moe import config, launch, planner, report, stop, traces, train
from titan_mega_moe.config import ConfigError
from titan_mega_moe.version import __version__

TOLERANCE = 1e-2
GRADIENT_TOLERANCE = 0.1
_EPILOG = """Every other --section.key overrides that key of the file for all sides, as `train` takes it.
Exit code: 0 the losses agree, 1 they differ by more than the tolerance or a side failed, 2 bad input,
128 + a signal that stopped it, with a report of the steps until then."""
# Folders that a training writes to, below its dump_folder unless they are absolute, and what has it write there.
_FOLDERS = {
    "checkpoint.folder": "checkpoint.enable",
    "metrics.save_tb_folder": "metrics.enable_tensorboard",
    "profiler.save_traces_folder": "profiler.enable_profiling",
    "profiler.save_memory_snapshot_folder": "profiler.enable_memory_snapshot",
    "comm.save_traces_folder": "comm.trace_buf_size",
    "debug.save_config_file": "debug.save_config_file",
}


@dataclass(frozen=True)
class Side:
    """One layer under comparison: `name` in tables, `backend` the value of [mega_moe] backend."""

    name: str
    backend: str


def main(args: list[str]) -> int:
    """Compare. Returns the exit code. Raises ConfigError for input that no side could train from."""
    options, given = _parser().parse_known_args(args)
    overrides = [*given, "--metrics.log_freq", "1", "--metrics.gradient_steps", "1"]
    overrides += ["--metrics.enable_tensorboard", "True"]
    if options.steps is not None:
        overrides += ["--training.steps", str(options.steps)]
    if "RANK" in os.environ:
        raise ConfigError("titan-mega-moe compare starts its own ranks: run it without torchrun")
    train.prepare_device(options.file, overrides)
    ours, others, resolved = _sides(options, overrides)
    if resolved.debug.seed is None:
        overrides += ["--debug.seed", "0"]
        resolved.debug.seed = 0

    if options.profile:
        overrides += _profiled(resolved.training.steps, resolved.profiler)

    folder = _new_folder(options.out, Path(resolved.dump_folder) / "compare", ours.name)
    console = Console()
    steps = resolved.training.steps
    console.print(f"{len(others) + 1} runs of {steps} steps; everything goes to {folder}", soft_wrap=True)
    settings = _settings(resolved, options.file, given)
    if options.against is None:
        console.print(f"deep_gemm: {settings['deep_gemm']}", highlight=False)
    asked: list[signal.Signals] = []
    with ThreadPoolExecutor(1) as pool:
        planned = pool.submit(_planned, resolved, options.file, given)
        runs = [_train(side, options.file, overrides, folder, steps, console, asked) for side in (ours, *others)]
    settings["mega_moe planned GiB in use"] = planned.result()
    for run in runs:
        run.disturbed = traces.disturbed_steps(folder / run.name, resolved.profiler)
        if options.profile:
            run.time_split = traces.time_split(folder / run.name)
    runs[0].reference = settings["mega_moe backend"] == "reference"
    code = _report(runs, folder, options, settings, console)
    return 128 + asked[0] if asked else code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"titan-mega-moe compare: {message}; --help says more")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="titan-mega-moe compare", description=__doc__, epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", help="a TOML file, as `train` takes it")
    parser.add_argument(
        "--against",
        metavar="A,B",
        help="the other sides, values of [mega_moe] backend (default: upstream, and deep_gemm if it can run)",
    )
    parser.add_argument("--steps", type=_positive(int), metavar="N", help="optimizer steps of each side")
    parser.add_argument(
        "--tolerance",
        type=_positive(float),
        default=TOLERANCE,
        metavar="X",
        help=f"relative difference of losses allowed at every step (default: {TOLERANCE})",
    )
    parser.add_argument(
        "--gradient-tolerance",
        type=_positive(float),
        default=GRADIENT_TOLERANCE,
        metavar="X",
        help=f"difference, over the norm, allowed of every gradient of the first step (default: {GRADIENT_TOLERANCE})",
    )
    parser.add_argument(
        "--profile", action="store_true", help="profile one step of each side, and say where its time went"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="new or empty folder for runs and report")
    return parser


def _positive(kind: type) -> Any:
    def parse(text: str) -> Any:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is no finite number above 0")
        return value

    parse.__name__ = "whole number" if kind is int else "number"
    return parse


def _profiled(steps: int, profiler: Any) -> list[str]:
    """Overrides with which TorchTitan's profiler leaves the trace of one step; ConfigError if there are too few."""
    needed = profiler.profiler_warmup + profiler.profiler_active
    if steps < needed:
        raise ConfigError(f"--profile: {steps} steps are too few, the profiler takes {needed}: give --steps {needed}")
    every = max(needed, min(steps, 10))
    return [
        *("--profiler.enable_profiling", "True", "--profiler.profile_freq", str(every)),
        *("--profiler.profiler_repeat", "1"),
    ]


def _sides(options: argparse.Namespace, overrides: list[str]) -> tuple[Side, list[Side], Any]:
    """Our side, the others, our configuration; every side's is loaded, so that bad input ends here."""
    from torchtitan.tools.logging import logger

    from titan_mega_moe.op import backends

    logger.setLevel("ERROR")  # each side's own warnings are in its train.log
    resolved = config.load(options.file, overrides)
    backend = resolved.mega_moe.backend
    try:
        backends.require(backend, resolved.device.kind)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{options.file}: [mega_moe] backend: {error}") from None
    ours = Side("mega_moe", backend)
    against = options.against
    if against is None:
        against = "upstream" if _no_deep_gemm(resolved) else "upstream,deep_gemm"
    others = [Side(name, name) for name in dict.fromkeys(against.split(",")) if name]
    for side in others:
        if side.backend == backend:
            raise ConfigError(f"--against {side.name}: {options.file} trains that layer itself: name another")
        config.load(options.file, _of(side, overrides))
        if side.backend in backends.NAMES:
            try:
                backends.require(side.backend, resolved.device.kind)
            except RuntimeError as error:
                raise ConfigError(f"--against {side.name}: {error}") from None
    if not others:
        raise ConfigError(f"--against {options.against!r} names no layer: write for instance --against upstream")
    resolved.profiler.enable_profiling |= options.profile
    _check_folders(resolved, options.file)
    ranks = train.rank_count(resolved, options.file)
    # A side begins in a new folder: what a run left in dump_folder is nothing that it would go on from.
    fresh = copy.copy(resolved)
    fresh.dump_folder = str((options.out or Path(resolved.dump_folder) / "compare") / ours.name)
    config.check_world(fresh, ranks, options.file)
    return ours, others, resolved


def _no_deep_gemm(resolved: Any) -> str | None:
    """Why deep_gemm is no side of the comparison by default, or None."""
    from titan_mega_moe.op import backends, deep_gemm
    from titan_mega_moe.routed_experts import layer_sizes

    kind, sizes = resolved.device.kind, layer_sizes(resolved.model_spec, 1)
    if _backend(resolved)[0] == "deep_gemm":
        return "mega_moe is deep_gemm here"
    return backends.unavailable_reason("deep_gemm", kind) or deep_gemm.shape_reason(sizes.dim, sizes.hidden_dim)


def _backend(resolved: Any) -> tuple[str, str]:
    """What our side's setting means here, and why."""
    from titan_mega_moe.op import backends
    from titan_mega_moe.routed_experts import layer_sizes

    asked = resolved.mega_moe.backend
    if asked != "auto":
        return asked, "it is what the file asks for"
    sizes = layer_sizes(resolved.model_spec, resolved.parallelism.expert_parallel_degree)
    return backends.automatic(resolved.device.kind, sizes)


def _of(side: Side, overrides: list[str]) -> list[str]:
    return [*overrides, "--mega_moe.backend", side.backend]


def _check_folders(resolved: Any, file: str) -> None:
    """Raise ConfigError for a folder outside dump_folder that all sides would write to."""
    from torchtitan.tools import filesystem

    for key, used in _FOLDERS.items():
        folder = operator.attrgetter(key)(resolved)
        if not operator.attrgetter(used)(resolved):
            continue
        if filesystem.is_remote(folder) or os.path.isabs(folder) or os.path.normpath(folder).startswith(".."):
            section, name = key.split(".")
            raise ConfigError(
                f"{file}: [{section}] {name}: all sides would write to {folder!r}: give a folder below dump_folder"
            )


def _new_folder(out: Path | None, default: Path, first: str) -> Path:
    """`out`, or a folder below `default` that is named by the time, with the first side's folder in it."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (default / (f"{stamp}-{i}" if i > 1 else stamp) for i in itertools.count(1))
    for folder in [out] if out else names:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not any(folder.iterdir()):
                (folder / first).mkdir()  # another comparison, begun at the same time, cannot
                return folder
        except FileExistsError:
            pass
        except OSError as error:
            raise ConfigError(f"--out {folder}: cannot be written: {error.strerror}") from None
    raise ConfigError(f"--out {out}: is no folder or is not empty: give another one, or empty it")


def _train(
    side: Side,
    file: str,
    overrides: list[str],
    folder: Path,
    steps: int,
    console: Console,
    asked: list[signal.Signals],
) -> report.Run:
    """Train one side in fresh processes. Its run, with the error where it failed.

    Signals that ask this process to stop go to those, and into `asked`; after one no side is started.
    """
    if asked:
        return report.Run(side.name, error=f"not started after {asked[0].name}")
    dump = folder / side.name
    dump.mkdir(exist_ok=True)
    command = ["train", file, *_of(side, overrides), "--dump_folder", str(dump)]
    done = threading.Event()
    with (
        (dump / "train.log").open("w") as log,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            console=console,
        ) as progress,
    ):
        task = progress.add_task(side.name, total=steps, loss="")

        def follow() -> None:
            last = False
            while not last:
                last = done.wait(0.5)
                if run := report.read_run(side.name, dump / "records").steps:
                    progress.update(task, completed=len(run), loss=f"loss {run[-1].loss:.3f}")

        follower = threading.Thread(target=follow)
        follower.start()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "titan_mega_moe", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=launch.child_environment(),
                start_new_session=True,  # Ctrl-C in a terminal reaches it once, from here
            )

            def tell(number: signal.Signals) -> None:
                asked.append(number)
                process.send_signal(number)

            with stop.handed_on(tell):
                code = process.wait()
        finally:
            done.set()
            follower.join()
    run = report.read_run(side.name, dump / "records")
    if code != 0:
        run.error = f"stopped by {asked[0].name}" if asked else _last_words(dump / "train.log", code)
        console.print(f"[red]{side.name} failed[/red]: {run.error}")
    return run


def _last_words(log: Path, code: int) -> str:
    """The end of a failed command's output, on one line: the exception and what the launcher says."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{' | '.join(lines[-2:]) or f'exit code {code}'} (all of it in {log})"


def _settings(resolved: Any, file: str, overrides: list[str]) -> dict[str, Any]:
    training = resolved.training
    layers = resolved.model.layers
    backend, why = _backend(resolved)
    return {
        "file": file,
        "command line": " ".join(overrides) or "-",
        "model": f"{resolved.model.name} {resolved.model.flavor}" + (f", first {layers} layers" if layers else ""),
        "device": f"{resolved.device.kind}, {train.rank_count(resolved, file)} ranks",
        "mega_moe backend": backend,
        "chosen because": why,
        "deep_gemm": _no_deep_gemm(resolved) or "can run here",
        "expert parallel degree": resolved.parallelism.expert_parallel_degree,
        "tokens a rank and step": training.local_batch_size * training.seq_len,
        "steps": training.steps,
        "seed": resolved.debug.seed,
        "titan_mega_moe": __version__,
        **{name: version(name) for name in ("torchtitan", "torch")},
    }


def _planned(resolved: Any, file: str, overrides: list[str]) -> str:
    """What `doctor` says that our side takes, to hold against what it took."""
    if resolved.device.kind != "cuda":
        return "- (it plans GPUs)"
    try:
        plan = planner.make(file, overrides, train.rank_count(resolved, file))
    except ConfigError as error:
        return f"- ({error})"
    return f"{plan.total / 2**30:.2f}" if plan.unplanned is None else f"- ({plan.unplanned})"


def _report(
    runs: list[report.Run], folder: Path, options: argparse.Namespace, settings: dict[str, Any], console: Console
) -> int:
    ours, *others = runs
    tolerances = options.tolerance, options.gradient_tolerance
    console = Console(width=max(console.width, 200))  # a table of three sides is cut short at 80 columns
    report.write(folder, ours, others, tolerances[0], settings, tolerances[1])
    if ours.steps:
        console.print(report.step_table(ours, others))
    console.print(report.summary_table(runs))
    if options.profile:
        console.print(report.split_table(runs))
    good, lines = report.verdict(ours, others, *tolerances)
    for line in lines:
        console.print(line, style="green" if good else "red", highlight=False, soft_wrap=True)
    files = ", ".join(str(folder / f"report.{kind}") for kind in ("html", "md", "json"))
    console.print(f"report: {files}; tensorboard --logdir {folder}", soft_wrap=True)
    return 0 if good else 1
