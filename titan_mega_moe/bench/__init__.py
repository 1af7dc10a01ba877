"""`titan-mega-moe bench [FILE]`: times the layer alone, each backend and TorchTitan's, and checks results.

It starts one rank per GPU (two on a CPU) unless torchrun has; EP is the number of ranks.

    routing.py  which experts tokens go to        layers.py     the layers that are compared
    measure.py  times, memory, errors, ceilings   breakdown.py  where a layer's time goes
    suite.py    what is run                       report.py     what is said
"""

import argparse
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from rich.console import Console

from titan_mega_moe import device
from titan_mega_moe.bench import report, routing, suite
from titan_mega_moe.bench.layers import DISPATCHERS, Shape
from titan_mega_moe.bench.measure import Protocol, Ranks
from titan_mega_moe.config import ConfigError
from titan_mega_moe.launch import launch
from titan_mega_moe.op import backends, deep_gemm
from titan_mega_moe.version import __version__

SHAPES = {"cuda": "16384x2048x768,8192x4096x1536,4096x2048x768", "cpu": "256x64x128"}
LAYERS = {"cuda": "triton,deep_gemm,alltoall,minimal_async_ep,deepep", "cpu": "reference,alltoall"}
EXPERTS, TOP_K = 128, 8
CHECKS = 40
_EPILOG = f"""Routings: {", ".join(routing.KINDS)}, skewed:RATIO (rank 0's experts get RATIO times the rows of
any other rank's), file:PATH (ids saved by torch.save, int64, (tokens, K) or (ranks, tokens, K);
`train FILE --metrics.routing_step N` leaves such a file of its step N).
Layers: {", ".join(backends.NAMES[1:])} (the op; add :inputs for keep = "inputs"), {", ".join(DISPATCHERS)}.
Every other --section.key overrides that key of FILE, as `train` takes it.
Exit code: 0 all is well, 1 an error is beyond its limit, bits differ or nothing ran, 2 bad input."""
_PROTOCOL = ("warmups", "timed", "bursts", "sustained")
_MOST = 2**31 - 1  # seeds are made of such a number times a million


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"titan-mega-moe bench: {message}")


def main(args: list[str]) -> int:
    """Run the benchmark. Returns the exit code. Raises ConfigError for bad input, before any rank starts."""
    options, overrides = _parser().parse_known_args(args)
    for word in overrides:
        if options.file is None or (word.startswith("-") and "." not in word):
            raise ConfigError(f"titan-mega-moe bench: {word!r} is not an option of it, see --help")
        if word.startswith(("--device.", "--mega_moe.")):
            raise ConfigError(f"{word}: it changes nothing here: --device says where and --layers what is timed")
    under_torchrun = "RANK" in os.environ
    if under_torchrun and options.ranks not in (None, int(os.environ["WORLD_SIZE"])):
        raise ConfigError(f"--ranks {options.ranks}: torchrun has started {os.environ['WORLD_SIZE']}: leave it out")
    if options.save is not None and os.environ.get("RANK", "0") == "0":
        _check_save(options.save)
    kind = _device_kind(options)
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun else options.ranks or _default_ranks(kind)
    plan = _plan(options, overrides, kind, ranks)
    if options.share_gpus:
        _check_shared(plan, kind)
    elif kind == "cuda" and not under_torchrun and ranks > torch.cuda.device_count():
        visible = torch.cuda.device_count()
        raise ConfigError(
            f"--ranks {ranks} needs as many GPUs and {visible} are visible: give fewer, "
            "or --share-gpus for checks alone"
        )
    baseline = _read_baseline(options.baseline, plan) if options.baseline is not None else None
    if under_torchrun:
        result = _measure(plan, kind, ranks, options.share_gpus)
        if os.environ["RANK"] != "0":
            return 0
        if options.raw is not None:
            options.raw.write_text(json.dumps(result))
            return 0
    else:
        result_or_code = _launched(args, ranks)
        if isinstance(result_or_code, int):
            return result_or_code
        result = result_or_code
    result |= {"command": " ".join(args), "format": report.FORMAT}
    return _present(result, options, baseline)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="titan-mega-moe bench",
        description=str(__doc__).split("\n\n")[0],
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "file",
        nargs="?",
        metavar="FILE",
        help="a TOML file, as `train` takes it: its model's layer",
    )
    add(
        "--shapes",
        metavar="TxDxF,...",
        help=f"tokens of a rank x D x F ({SHAPES['cuda']})",
    )
    add("--experts", type=_at_least(1), metavar="E", help=f"experts of all ranks ({EXPERTS})")
    add("--top-k", type=_at_least(1), metavar="K", help=f"experts per token ({TOP_K})")
    add("--routing", metavar="A,B", help="which experts tokens go to, see below (random)")
    add("--layers", metavar="A,B", help=f"what to compare, see below ({LAYERS['cuda']})")
    add("--ranks", type=_at_least(1), metavar="N", help="ranks to start (one per GPU; 2 on a CPU)")
    add("--device", choices=("cuda", "cpu"), help="(cuda where there is a GPU)")
    add(
        "--share-gpus", action="store_true",
        help="more ranks than GPUs, by turns: for --checks and --repeat-bits at sizes of a group that is not at hand",
    )  # fmt: skip
    add(
        "--checks", type=_at_least(1), nargs="?", const=CHECKS, default=0, metavar="N",
        help=f"errors of N ({CHECKS}) small shapes and routings; without --shapes or FILE nothing is timed",
    )  # fmt: skip
    add(
        "--repeat-bits", type=_at_least(1), default=0, metavar="N",
        help="run one input N times and compare bits; without --shapes or FILE nothing is timed",
    )  # fmt: skip
    add("--breakdown", action="store_true", help="also what each kernel (on a CPU: phase) of our layers takes and does")
    add("--seed", type=_at_least(0), default=0, help="of all inputs (0)")
    add("--save", type=Path, metavar="FILE.json", help="write the line of JSON there, and FILE.md beside it")
    add("--baseline", type=Path, metavar="FILE.json", help="saved results to compare with")
    for name in _PROTOCOL:
        add(f"--{name}", type=_at_least(1), metavar="N", help=f"({getattr(Protocol, name)})")
    add("--raw", type=Path, help=argparse.SUPPRESS)
    return parser


def _at_least(low: int) -> Any:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= _MOST:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {_MOST}")
        return value

    parse.__name__ = "whole number"
    return parse


def _device_kind(options: argparse.Namespace) -> str:
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device.prepare(kind)
    except RuntimeError as error:
        raise ConfigError(f"--device {kind}: {error}") from None
    return kind


def _default_ranks(kind: str) -> int:
    return torch.cuda.device_count() if kind == "cuda" else 2


def _plan(options: argparse.Namespace, overrides: list[str], kind: str, ranks: int) -> suite.Plan:
    """What the command line asks for; ConfigError if it cannot be run on so many ranks."""
    default = "triton" if options.share_gpus else LAYERS[kind]
    layers = _layers(default if options.layers is None else options.layers)
    _refuse_idle(options, layers)
    routings = routing.parse("random" if options.routing is None else options.routing)
    if options.file is not None:
        shapes = [_shape_of(options.file, [*overrides, "--device.kind", kind])]
    elif options.shapes is None and (options.checks or options.repeat_bits):
        shapes = []
    else:
        words = dict.fromkeys((SHAPES[kind] if options.shapes is None else options.shapes).split(","))
        shapes = [_shape(word, options.experts or EXPERTS, options.top_k or TOP_K) for word in words]
    for shape in shapes:
        if shape.E % ranks and options.file is not None:
            raise ConfigError(f"--ranks {ranks} does not divide {options.file}'s {shape.E} experts: give a divisor")
        if shape.E % ranks:
            raise ConfigError(f"--experts {shape.E} does not divide over {ranks} ranks: give a multiple")
        if shape.K > shape.E:
            raise ConfigError(f"--top-k {shape.K} is more than the {shape.E} of --experts")
    routed = shapes or suite.repeated_shapes(options.repeat_bits, options.seed, ranks, kind == "cuda")
    for shape, r in itertools.product(routed, routings):
        if (reason := r.refusal(shape.T, shape.E, shape.K, ranks)) is not None:
            raise ConfigError(f"--routing {r}: {reason}")
    given = {name: value for name in _PROTOCOL if (value := getattr(options, name)) is not None}
    return suite.Plan(
        shapes,
        routings,
        layers,
        options.checks,
        options.repeat_bits,
        options.seed,
        Protocol(**given),
        options.breakdown,
    )


def _layers(text: str) -> list[str]:
    """Names separated by commas, each once; ConfigError for one that is not known."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        backend, colon, keep = name.partition(":")
        ours = backend in backends.NAMES[1:] and (not colon or keep in backends.KEEP)
        if name not in DISPATCHERS and not ours:
            known = ", ".join([*backends.NAMES[1:], *DISPATCHERS])
            raise ConfigError(f"--layers {name}: not a layer; known: {known}")
    return names


def _refuse_idle(options: argparse.Namespace, layers: list[str]) -> None:
    """ConfigError for an option that would change nothing beside the others."""
    checked = options.checks or options.repeat_bits
    timed = options.file is not None or options.shapes is not None or not checked
    idle = [
        (options.file is not None, ("shapes", "experts", "top_k"), f"{options.file} gives the layer's sizes"),
        (not timed, ("experts", "top_k"), "what is checked has sizes of its own without --shapes or FILE"),
        (not timed, ("breakdown", "baseline", *_PROTOCOL), "nothing is timed without --shapes or FILE"),
        (not timed and not options.repeat_bits, ("routing",), "--checks takes every kind of routing in turn"),
        (
            all(name in DISPATCHERS for name in layers),
            ("checks", "repeat_bits", "breakdown"),
            f"it is of the op's own layers, and --layers names none of {', '.join(backends.NAMES[1:])}",
        ),
    ]
    for nothing, names, why in idle:
        for name in names:
            if nothing and getattr(options, name) not in (None, False):
                raise ConfigError(f"--{name.replace('_', '-')}: {why}: leave it out")


def _check_shared(plan: suite.Plan, kind: str) -> None:
    if kind != "cuda":
        raise ConfigError("--share-gpus: ranks on a CPU share it anyway: leave it out")
    if plan.shapes:
        raise ConfigError(
            "--share-gpus: times of ranks that take turns on a GPU mean nothing: give only --checks or --repeat-bits"
        )
    if others := [name for name in plan.layers if name in DISPATCHERS]:
        raise ConfigError(f"--share-gpus: {others[0]} needs a GPU for each rank: give --layers triton")


def _shape(word: str, E: int, K: int) -> Shape:
    if not re.fullmatch(r"[1-9]\d{0,8}(x[1-9]\d{0,8}){2}", word):
        raise ConfigError(f"--shapes {word}: write tokens x D x F, such as 16384x2048x768")
    T, D, F = map(int, word.split("x"))
    if D % 8 or F % 8:
        raise ConfigError(f"--shapes {word}: D and F must be multiples of 8, as grouped matmuls want")
    return Shape(T, D, F, E, K)


def _shape_of(file: str, overrides: list[str]) -> Shape:
    """That of the first layer with experts in the file's model, with the tokens a rank routes there."""
    from torchtitan.tools.logging import logger

    from titan_mega_moe import config
    from titan_mega_moe.parallelize import tokens_per_rank
    from titan_mega_moe.routed_experts import layer_sizes

    logger.setLevel("ERROR")
    resolved = config.load(file, overrides)
    p = resolved.parallelism
    dims: Any = SimpleNamespace(
        pp_enabled=p.pipeline_parallel_degree > 1,
        cp=p.context_parallel_degree,
        tp=p.tensor_parallel_degree,
        ep_enabled=True,
    )
    assert resolved.model_spec is not None
    sizes = layer_sizes(resolved.model_spec, p.expert_parallel_degree)
    try:
        T = tokens_per_rank(resolved.training, p, dims)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None
    return Shape(T, sizes.dim, sizes.hidden_dim, sizes.num_experts, sizes.top_k)


def _check_save(path: Path) -> None:
    """ConfigError if the results could not be written in the end."""
    if path.suffix != ".json":
        raise ConfigError(f"--save {path}: give a name that ends in .json; the tables go beside it, in one with .md")
    try:
        with suppress(FileExistsError):  # no folder: what opening a file says is clearer
            path.parent.mkdir(parents=True, exist_ok=True)
        for file in report.files(path):
            new = not file.exists()
            file.open("a").close()
            if new:
                file.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--save {path}: cannot be written: {error.strerror}") from None


def _read_baseline(path: Path, plan: suite.Plan) -> dict[str, Any]:
    """What --save wrote; ConfigError if it is something else or has nothing to compare this plan's results with."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--baseline {path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"--baseline {path}: is not JSON that --save wrote") from None
    try:  # all that will be read of it
        known = {(row[0], row[1]) for row in report.moved(found, found)}
        good = report.origin(found) and found["format"] == report.FORMAT
    except (KeyError, TypeError, ValueError, AttributeError):
        good = False
    if not good:
        raise ConfigError(f"--baseline {path}: is not what this version's --save writes: save one anew")
    wanted = {(f"{shape} {r}", name) for shape in plan.shapes for r in plan.routings for name in plan.layers}
    if not known & wanted:
        cases = "; ".join(sorted(f"{name} at {case}" for case, name in known)) or "nothing that was timed"
        raise ConfigError(f"--baseline {path}: nothing of this run is in it: it has {cases}")
    return found


def _launched(args: list[str], ranks: int) -> dict[str, Any] | int:
    """The result of this command on ranks of its own, or the exit code where one failed."""
    folder = Path(tempfile.mkdtemp(prefix="titan-mega-moe-bench-"))
    raw = folder / "result.json"
    code = launch(["-m", "titan_mega_moe", "bench", *args, "--raw", str(raw)], ranks, folder / "ranks")
    if code != 0:
        return code
    result = json.loads(raw.read_text())
    shutil.rmtree(folder)
    return result


def _measure(plan: suite.Plan, kind: str, size: int, shared: bool) -> dict[str, Any]:
    """On every rank: make the process group, run the plan."""
    here, backend = torch.device("cpu"), "gloo"
    if kind == "cuda":
        here = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(here)
        if shared:  # NCCL takes one rank a GPU, and symmetric memory more only when told
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        else:
            backend = "cpu:gloo,cuda:nccl"
    bound = here if "nccl" in backend else None
    dist.init_process_group(backend, timeout=timedelta(minutes=5), device_id=bound)
    # As torchtitan does when it makes the group: recomputation in a backward reads thread-local state.
    torch.autograd.set_multithreading_enabled(False)
    start = time.perf_counter()
    try:
        result = suite.run(plan, Ranks(here, dist.group.WORLD if size > 1 else None))
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        sys.exit(f"bench: rank {dist.get_rank()} is out of memory, give smaller --shapes: {str(error).splitlines()[0]}")
    result["seconds"] = time.perf_counter() - start
    result["date"] = time.strftime("%Y-%m-%d %H:%M:%S %z")
    result["machine"] = _machine(here, size)
    result["protocol"] = vars(plan.protocol)
    result["seed"] = plan.seed
    dist.destroy_process_group()
    return result


def _machine(here: torch.device, size: int) -> dict[str, Any]:
    cuda = here.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(here) if cuda else "CPU",
        "ranks": size,
        "ranks per GPU": -(-size // torch.cuda.device_count()) if cuda else None,
        "titan_mega_moe": __version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "torchtitan": _version("torchtitan"),
        "deep_gemm": _deep_gemm(),
        "CUDA": torch.version.cuda if cuda else None,
        "driver": _driver() if cuda else None,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _deep_gemm() -> str | None:
    """Package and version of a build that can train."""
    build = deep_gemm.find_build()
    return None if isinstance(build, str) else build.package


def _driver() -> str | None:
    """The NVIDIA kernel module's version, where it can be read."""
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+(\.\d+)?", file.read_text()) if file.is_file() else None
    return found[0] if found else None


def _record(result: dict[str, Any]) -> list[list[str]]:
    """Leave what backend "auto" goes by on this machine: sizes, backend and reason of each record."""
    rows = []
    for timing in report.fused_timings(result):
        try:
            timing.save()
        except OSError as error:
            print(f'backend "auto" will not know: {error.filename}: {error.strerror}', file=sys.stderr)
            continue
        rows.append([str(timing.sizes), timing.backend, timing.reason])
    return rows


def _present(result: dict[str, Any], options: argparse.Namespace, baseline: dict[str, Any] | None) -> int:
    """Tables, and the line of JSON: last, or in the file to save."""
    report.derive(result)
    result["chosen"] = _record(result)
    result["moved"] = report.moved(result, baseline) if baseline is not None else []
    result["baseline"] = report.origin(baseline) if baseline is not None else None
    # Tables are wide; where the output is no terminal nothing says how wide it may be.
    report.show(result, Console(width=None if sys.stdout.isatty() else 200, highlight=False))
    if baseline is not None and not result["moved"]:
        print(f"--baseline {options.baseline}: of what it has nothing ran", file=sys.stderr)
    sys.stdout.flush()
    if options.save is None:
        print(report.json_line(result), flush=True)
        return 0 if report.good(result) else 1
    try:
        report.save(result, options.save)
    except OSError as error:
        print(report.json_line(result), flush=True)  # or hours of measurement would be lost
        raise ConfigError(f"--save {options.save}: cannot be written: {error.strerror}") from None
    print("saved:", *report.files(options.save), flush=True)
    return 0 if report.good(result) else 1
