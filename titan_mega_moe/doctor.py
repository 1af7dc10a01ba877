"""`titan-mega-moe doctor [FILE]`: will a run work here, and what will it take?

It looks at the machine (versions, GPUs and the links between them, symmetric memory, each backend) and, given
a TOML file, plans the run for any number of ranks. Symmetric memory is tried between the ranks it was started on, else
between the GPUs here.
"""

import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from itertools import combinations
from pathlib import Path
from platform import python_version

import torch
from rich.console import Console
from rich.markup import escape

from titan_mega_moe import config, launch, peers, planner
from titan_mega_moe.config import ConfigError
from titan_mega_moe.op import backends, deep_gemm, fastest
from titan_mega_moe.op.fastest import Sizes
from titan_mega_moe.version import __version__

USAGE = """usage: titan-mega-moe doctor [FILE [--world-size N] [--section.key value ...]]

  FILE              a TOML file: say whether it can run here and what it takes per GPU
  --world-size N    plan for N ranks instead of as many as its degrees need; GPUs are not needed for that
  --section.key     any key of the file, e.g. --mega_moe.backend deep_gemm

Symmetric memory is tried between the GPUs here; under torchrun, between the ranks of each host.
Exit code: 0 the backend can run here, and so can FILE; 1 one of them cannot; 2 bad input."""

GIB = 2**30


@dataclass(frozen=True)
class Line:
    """One finding; ok None: neither good nor bad."""

    name: str
    text: str
    ok: bool | None = None


def main(args: list[str]) -> int:
    """Print the findings; returns the exit code. Raises ConfigError for bad input."""
    if args and args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    path, overrides, world_size = _parse(args)
    if path is not None:
        config.device_kind(path, overrides)  # a file that cannot be read is no reason to look at the machine
    if os.environ.get("RANK", "0") != "0":
        between_ranks()
        return 0
    console = Console(highlight=False)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    with _beside() as beside:
        planned = beside.submit(planner.make, path, overrides, world_size) if path is not None else None
        _print(console, "Versions", versions())
        _print(console, "GPUs", [*gpus(), *links(), *symmetric_memory()])
        _print(console, f"Backends on {device_type}", [backend_line(n, device_type) for n in backends.NAMES[1:]])
        with _busy(console, "trying symmetric memory between the GPUs", torch.cuda.device_count() > 1):
            shared = between_ranks()
        if path is None or planned is None:
            _, chosen = chosen_backend("auto", device_type)
            _print(console, "Here", [chosen, *timed_lines(device_type), *shared])
            return 0 if all(line.ok for line in (chosen, *shared)) else 1
        with _busy(console, "planning the run, which takes a minute for a model of many layers"):
            plan = planned.result()
    name, chosen = chosen_backend(plan.asked, plan.device, plan.sizes)
    if name is not None and name != plan.backend:  # what "auto" is here may need other memory
        plan = planner.make(path, [*overrides, "--mega_moe.backend", name], world_size)
    findings = [chosen, start_line(plan), *shared]
    memory = "GPU" if plan.device == "cuda" else "process"
    _print(console, f"Memory per {memory} at the peak of a step, {plan.world_size} ranks", plan_lines(plan))
    _print(console, path, findings)
    return 0 if all(line.ok for line in findings) else 1


@contextmanager
def _beside() -> Iterator[ThreadPoolExecutor]:
    """A thread for the plan, whose process ends when this one is interrupted."""
    with ThreadPoolExecutor(1) as beside:
        try:
            yield beside
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _parse(args: list[str]) -> tuple[str | None, list[str], int | None]:
    """FILE, overrides, ranks."""
    ranks = None
    rest = [part for word in args for part in (word.split("=", 1) if word.startswith("--world-size=") else [word])]
    if "--world-size" in rest:
        at = rest.index("--world-size")
        word = "".join(rest[at + 1 : at + 2])
        if not re.fullmatch(r"[1-9]\d{0,4}", word, re.ASCII):
            raise ConfigError(f"titan-mega-moe doctor: --world-size needs a number from 1 to 99999, got {word!r}")
        ranks = int(word)
        del rest[at : at + 2]
    for word in rest:
        if word.partition("=")[0] in ("--ranks", "--nodes", "--hosts", "--world-size"):
            raise ConfigError(f"titan-mega-moe doctor: {word} is no option of it: give --world-size N, once")
    if rest and not rest[0].startswith("-"):
        return rest[0], rest[1:], ranks
    if rest or ranks is not None:
        wrong = rest[0] if rest else "--world-size"
        raise ConfigError(f"titan-mega-moe doctor: the TOML file comes first, got {wrong!r}")
    return None, [], None


def versions() -> list[Line]:
    """Of everything whose version decides whether a run works."""
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return [
        Line("titan_mega_moe", __version__),
        Line("python", python_version()),
        Line("torch", f"{torch.__version__}, {cuda}"),
        *(_distribution(name) for name in ("torchtitan", "triton")),
        Line("deep_gemm", _deep_gemm()),
        Line("nvrtc", _nvrtc()),
        Line("nvcc", shutil.which("nvcc") or "not on the path (only deep_gemm may want it)"),
    ]


def _distribution(name: str) -> Line:
    try:
        return Line(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Line(name, f"not installed: pip install {name}", False)


def _deep_gemm() -> str:
    module = deep_gemm.import_module()
    if not isinstance(module, str):
        return deep_gemm.package_of(module)
    return module.partition(";")[0].removeprefix("deep_gemm is ")


def _nvrtc() -> str:
    if importlib.util.find_spec("cuda.bindings") is None:
        return "no Python bindings: pip install cuda-bindings"
    from cuda.bindings import nvrtc

    try:
        error, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as missing:  # the bindings find no library to bind
        return f"not found ({missing})"
    return f"{major}.{minor}" if error == nvrtc.nvrtcResult.NVRTC_SUCCESS else f"fails with {error}"


def gpus() -> list[Line]:
    """Each visible GPU."""
    if not torch.cuda.is_available():
        return [Line("visible", "none")]
    return [_gpu(i) for i in range(torch.cuda.device_count())]


def _gpu(index: int) -> Line:
    p = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    memory = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    return Line(f"cuda:{index}", f"{p.name}, {memory}, {p.multi_processor_count} SMs, compute {p.major}.{p.minor}")


def links() -> list[Line]:
    """NVLinks and peer access between the visible GPUs; pairs alike share a line."""
    count = torch.cuda.device_count()
    if count < 2:
        return []
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

    nvlinks = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
    kinds: dict[tuple[int, bool], list[str]] = {}
    for i, j in combinations(range(count), 2):
        reach = torch.cuda.can_device_access_peer(i, j) and torch.cuda.can_device_access_peer(j, i)
        kinds.setdefault((nvlinks[i][j], reach), []).append(f"{i}-{j}")
    return [
        Line(
            f"{len(pairs)} pair{'s' * (len(pairs) > 1)}",
            f"{n} NVLinks, {'peer access' if reach else 'no peer access: no fused backend between them'}"
            + (f" ({', '.join(pairs)})" if len(kinds) > 1 else ""),
            reach,
        )
        for (n, reach), pairs in kinds.items()
    ]


def symmetric_memory() -> list[Line]:
    """Whether this GPU can allocate memory that peers can map."""
    if not torch.cuda.is_available():
        return [Line("symmetric memory", "needs a GPU")]
    import torch.distributed._symmetric_memory as symm_mem

    try:
        symm_mem.empty(1024, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
    except RuntimeError as error:
        return [Line("symmetric memory", f"cannot be allocated: {error}", False)]
    return [Line("symmetric memory", "can be allocated", True)]


def between_ranks() -> list[Line]:
    """Whether ranks reach each other's memory: those that torchrun started, else one for each GPU here."""
    if "RANK" in os.environ:
        size = int(os.environ["WORLD_SIZE"])
        if size == 1:
            return []
        if not torch.cuda.is_available():
            return [Line("between ranks", "symmetric memory needs GPUs, this is a CPU: gloo is used", True)]
        found = peers.between_ranks()
        return [] if found is None else list(peer_lines(found, size))
    size = torch.cuda.device_count()
    if size < 2:
        return []
    with tempfile.TemporaryDirectory(prefix="titan-mega-moe-doctor-") as folder:
        file = Path(folder) / "found.json"
        code = launch.launch(["-m", "titan_mega_moe.peers", str(file)], size, Path(folder) / "ranks")
        if code != 0 or not file.is_file():
            return [Line("between GPUs", f"trying symmetric memory ended with exit code {code}, see above", False)]
        stored = json.loads(file.read_text())
    stored["failed"] = {int(rank): reason for rank, reason in stored["failed"].items()}
    return list(peer_lines(peers.Found(**stored), size))


def peer_lines(found: peers.Found, size: int) -> Iterator[Line]:
    """One line if every pair of a host's ranks is good, else one for each rank, bad pair and rank that failed."""
    if not found.bad and not found.failed:
        text = f"each of {size} ranks wrote to and read the memory of every peer on its host"
        yield Line("between ranks", f"{text} ({len(found.good)} pairs)", True)
        return
    good: dict[int, list[int]] = {}
    for writer, owner in sorted(tuple(map(int, pair.split())) for pair in found.good):
        good.setdefault(writer, []).append(owner)
    for writer, owners in good.items():
        yield Line("between ranks", f"rank {writer} reaches {', '.join(map(str, owners))}", True)
    for pair, reason in sorted(found.bad.items()):
        yield Line("between ranks", f"rank {pair.replace(' ', ' to rank ')}: {reason}", False)
    for rank, reason in sorted(found.failed.items()):
        yield Line("between ranks", f"rank {rank} {reason}", False)


def backend_line(name: str, device_type: str) -> Line:
    """One backend: available, or the reason why not."""
    reason = backends.unavailable_reason(name, device_type)
    return Line(name, "available" if reason is None else reason, reason is None)


def chosen_backend(asked: str, device_type: str, sizes: Sizes | None = None) -> tuple[str | None, Line]:
    """What the setting `backend` means here for layers of these sizes; None where that cannot run."""
    if asked in backends.UPSTREAM:
        return asked, Line("backend", f"TorchTitan's own layer, {backends.UPSTREAM[asked]} dispatcher", True)
    try:
        name, why = backends.automatic(device_type, sizes) if asked == "auto" else (asked, "asked for")
    except RuntimeError as error:
        return None, Line("backend", str(error), False)
    reason = backends.unavailable_reason(name, device_type)
    if reason is not None:
        return None, Line("backend", f"{name}: {reason}", False)
    return name, Line("backend", f"{name} ({why})", True)


def timed_lines(device_type: str) -> Iterator[Line]:
    """For which sizes bench has timed deep_gemm beside our kernels on a GPU like this one."""
    if device_type != "cuda" or any(backends.unavailable_reason(name, device_type) for name in backends.FUSED):
        return
    try:
        for timing in fastest.recall_all(*fastest.here()):
            yield Line("backend", f"{timing.backend} for {timing.sizes} ({timing.reason})")
    except ValueError as error:
        yield Line("backend", str(error), False)


def start_line(plan: planner.Plan) -> Line:
    """Whether `train` would start."""
    return Line("start", plan.refused or "nothing is refused", plan.refused is None)


def plan_lines(plan: planner.Plan) -> Iterator[Line]:
    """The mesh and the memory of a plan."""
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    yield Line("mesh", mesh or "one rank")
    if plan.max_tokens:
        yield Line("tokens", f"at most {plan.max_tokens:,} a rank and forward")
    yield Line("parameters", _gib(plan.parameters))
    yield Line("gradients", _gib(plan.gradients))
    yield Line("optimizer", _gib(plan.optimizer))
    if plan.activations is None:
        yield Line("activations", f"not planned with {plan.unplanned}")
    else:
        text = f"{_gib(plan.activations)} (with gathered parameters and temporaries)"
        yield Line("activations", text)
    buffers = "known only to the deep_gemm build" if plan.buffers is None else _gib(plan.buffers)
    yield Line("buffers", f"{buffers} (of backend {plan.backend})")
    missing = "at least " if plan.activations is None or plan.buffers is None else ""
    beside = "the CUDA context and NCCL's buffers" if plan.device == "cuda" else "Python with its libraries"
    yield Line("total", f"{missing}{_gib(plan.total)}, and {beside}")


def _busy(console: Console, text: str, busy: bool = True) -> AbstractContextManager[object]:
    """Says what is being waited for: turning on a terminal, else as a line on stderr."""
    if not busy:
        return nullcontext()
    if console.is_terminal:
        return console.status(text)
    print(f"{text} ...", file=sys.stderr, flush=True)
    return nullcontext()


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"


def _print(console: Console, title: str, lines: Iterable[Line]) -> None:
    console.print(f"[bold]{escape(title)}[/]", soft_wrap=True)
    marks = {True: "[green]ok[/] ", False: "[red]no[/] ", None: "   "}
    for line in lines:
        console.print(f"  {marks[line.ok]}{line.name:17} {escape(line.text)}", soft_wrap=True)
