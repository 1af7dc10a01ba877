"""What doctor prints, and its exit code."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tests.op import deep_gemm_double as double
from tests.op.test_automatic import machine
from titan_mega_moe import cli, config, doctor, launch, planner
from titan_mega_moe.config import ConfigError
from titan_mega_moe.op import backends, deep_gemm
from titan_mega_moe.op.fastest import Sizes, Timing

GIB = 2**30
ROOT = Path(__file__).parents[1]
PLAN = planner.Plan(
    world_size=16,
    mesh={"ep": 8, "efsdp": 2},
    device="cpu",
    asked="auto",
    backend="reference",
    max_tokens=8192,
    sizes=Sizes(8, 128, 8, 2048, 768),
    parameters=3 * GIB,
    gradients=GIB,
    optimizer=6 * GIB,
    activations=GIB // 4,
    buffers=GIB // 2,
    unplanned=None,
    refused=None,
)


def run(folder: Path, *args: str) -> tuple[int, str]:
    """Exit code and output of the command, with `folder` first on the path."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH"), str(Path.cwd())]))
    done = subprocess.run(
        [sys.executable, "-m", "titan_mega_moe", "doctor", *args],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": path},
    )
    return done.returncode, done.stdout + done.stderr


def line(output: str, mark: str, name: str) -> str:
    """The text of one line of the output."""
    found = re.findall(rf"^ +{mark} *{name} +(.*)$", output, re.MULTILINE)
    assert len(found) == 1, output
    return found[0]


def test_three_machines_three_true_lines_about_deep_gemm(tmp_path, monkeypatch, capsys):
    """Without the package, with that of the index, with a build that trains; none of them with a GPU."""
    if torch.cuda.is_available():
        pytest.skip("the lines say that there is no GPU")
    package = f"sgl-deep-gemm {metadata.version('sgl-deep-gemm')}"
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    absent = lines_about_deep_gemm(capsys)
    monkeypatch.delitem(sys.modules, "deep_gemm")
    index = lines_about_deep_gemm(capsys)
    (tmp_path / "deep_gemm.py").write_text(Path(double.__file__).read_text())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    stand_in = lines_about_deep_gemm(capsys)
    reason = 'it needs a Hopper or Blackwell GPU, the device is cpu; set backend = "reference"'
    stand_in_version = f"deep_gemm {double.__version__} at {tmp_path / 'deep_gemm.py'}"
    assert absent == ("not installed", reason)
    assert index == (package, reason)
    assert stand_in == (stand_in_version, reason)


def lines_about_deep_gemm(capsys) -> tuple[str, str]:
    deep_gemm.inspect_build.cache_clear()
    assert doctor.main([]) == 0  # the reference runs here
    output = capsys.readouterr().out
    assert line(output, "ok", "backend").startswith("reference (the fused backends need a GPU")
    return line(output, "", "deep_gemm"), line(output, "no", "deep_gemm")


def test_a_build_that_trains_is_available_on_hopper(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", double.variant())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert doctor.backend_line("deep_gemm", "cuda") == doctor.Line("deep_gemm", "available", True)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--world-size", "8"], "the TOML file comes first, got '--world-size'"),
        (["--training.steps", "8", "x.toml"], "the TOML file comes first, got '--training.steps'"),
        (["x.toml", "--world-size"], "--world-size needs a number from 1 to 99999, got ''"),
        (["x.toml", "--world-size", "0"], "--world-size needs a number from 1 to 99999, got '0'"),
        (["x.toml", "--world-size", "100000"], "--world-size needs a number from 1 to 99999, got '100000'"),
        (["x.toml", "--world-size", "many"], "--world-size needs a number from 1 to 99999, got 'many'"),
        (["x.toml", "--ranks", "4"], "--ranks is no option of it: give --world-size N, once"),
        (["x.toml", "--world-size=2", "--world-size=4"], "--world-size is no option of it: give --world-size N, once"),
    ],
)
def test_bad_arguments(args, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        doctor.main(args)


def test_the_number_of_ranks_may_follow_an_equals_sign():
    assert doctor._parse(["run.toml", "--world-size=4", "--model.layers=2"]) == ("run.toml", ["--model.layers=2"], 4)
    assert doctor._parse(["run.toml", "--world-size", "4"]) == ("run.toml", [], 4)


def test_bad_file_is_exit_code_2(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "bad.toml").write_text("[training]\nstepz = 3\n")
    assert cli.main(["doctor", str(tmp_path / "bad.toml")]) == 2
    shown = capsys.readouterr()
    assert "unknown key" in shown.err.splitlines()[-1] and "Traceback" not in shown.out + shown.err
    # What can be said at once is said before the machine is looked at.
    (tmp_path / "cut.toml").write_text("[training")
    for args, said in (
        ([str(tmp_path / "cut.toml")], "cut.toml: line 1, column 10: malformed TOML: "),
        ([str(tmp_path / "none.toml")], "none.toml: no such file"),
        ([str(tmp_path)], "cannot be read: Is a directory"),
        ([str(tmp_path / "bad.toml"), "again.toml"], "command line: 'again.toml' is no option"),
    ):
        assert cli.main(["doctor", *args]) == 2
        shown = capsys.readouterr()
        assert said in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_an_interrupted_doctor_leaves_no_plan_running():
    with pytest.raises(KeyboardInterrupt), doctor._beside():
        process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        process.start()
        raise KeyboardInterrupt
    process.join(60)
    assert process.exitcode == -signal.SIGTERM


def planned(monkeypatch, capsys, **changes) -> tuple[int, str]:
    monkeypatch.setattr(config, "device_kind", lambda *args: "cpu")  # there is no run.toml
    monkeypatch.setattr(planner, "make", lambda *args: planner.Plan(**(vars(PLAN) | changes)))
    code = doctor.main(["run.toml", "--world-size", "16"])
    return code, capsys.readouterr().out


def test_the_plan_is_printed(monkeypatch, capsys):
    code, output = planned(monkeypatch, capsys)
    assert code == 0
    assert line(output, "", "mesh") == "ep 8, efsdp 2"
    assert line(output, "", "tokens") == "at most 8,192 a rank and forward"
    for name, gib in (("parameters", "3.00"), ("gradients", "1.00"), ("optimizer", "6.00")):
        assert line(output, "", name) == f"{gib} GiB"
    assert line(output, "", "activations").startswith("0.25 GiB")
    assert line(output, "", "buffers") == "0.50 GiB (of backend reference)"
    assert line(output, "", "total").startswith("10.75 GiB, and")
    assert line(output, "ok", "start") == "nothing is refused"


@pytest.mark.parametrize(
    ("device", "title", "beside"),
    [
        ("cuda", "Memory per GPU at the peak of a step, 16 ranks", "the CUDA context and NCCL's buffers"),
        ("cpu", "Memory per process at the peak of a step, 16 ranks", "Python with its libraries"),
    ],
)
def test_memory_is_said_of_the_device_that_the_file_names(monkeypatch, capsys, device, title, beside):
    _, output = planned(monkeypatch, capsys, device=device, asked="upstream", backend="upstream")
    assert title in output.splitlines()
    assert line(output, "", "total").endswith(f", and {beside}")


def test_between_the_findings_stands_nothing_else():
    code, output = run(ROOT, str(ROOT / "train_configs" / "debug_cpu.toml"))
    assert code == 0
    titles = ("Versions", "GPUs", "Backends on", "Memory per", str(ROOT / "train_configs"), "planning the run")
    assert [text for text in output.splitlines() if not text.startswith(("  ", *titles))] == []


def test_what_is_not_known_is_said(monkeypatch, capsys):
    changes = {"activations": None, "unplanned": "pipeline parallelism", "buffers": None}
    _, output = planned(monkeypatch, capsys, **changes)
    assert line(output, "", "activations") == "not planned with pipeline parallelism"
    assert line(output, "", "buffers").startswith("known only to the deep_gemm build")
    assert line(output, "", "total").startswith("at least 10.00 GiB")


@pytest.mark.parametrize(
    ("changes", "name", "expected"),
    [
        ({"refused": "run.toml: no tokenizer"}, "start", "run.toml: no tokenizer"),
        ({"asked": "deep_gemm", "device": "cuda"}, "backend", "deep_gemm: deep_gemm is not installed"),
        ({"asked": "auto", "device": "cuda"}, "backend", "mega_moe: no fused backend runs on this GPU"),
    ],
)
def test_what_cannot_run_here_is_exit_code_1(monkeypatch, capsys, changes, name, expected):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    monkeypatch.setattr(backends, "_MODULES", {k: f"titan_mega_moe.op.{k}" for k in ("deep_gemm", "reference")})
    monkeypatch.setattr(backends, "NAMES", ("auto", "deep_gemm", "reference"))
    if changes.get("asked") == "auto":
        monkeypatch.setitem(backends._MODULES, "triton", "no_such_module")
    code, output = planned(monkeypatch, capsys, **changes)
    assert code == 1
    assert line(output, "no", name).startswith(expected)


def test_what_bench_found_is_shown_with_its_reason_and_planned_for(monkeypatch, capsys, tmp_path):
    build = f"deep_gemm {double.__version__} at {double.__file__}"
    asked = []

    def make(path, overrides, world_size):
        asked.append(overrides)
        changes = {"device": "cuda", "backend": "deep_gemm" if overrides else "triton"}
        return planner.Plan(**(vars(PLAN) | changes))

    monkeypatch.setattr(config, "device_kind", lambda *args: "cuda")
    monkeypatch.setattr(planner, "make", make)
    monkeypatch.setattr(doctor, "gpus", list)
    monkeypatch.setattr(doctor, "links", list)
    monkeypatch.setattr(doctor, "symmetric_memory", list)
    with machine(tmp_path):
        assert doctor.main(["run.toml"]) == 0 and asked == [[]]
        default = capsys.readouterr().out
        Timing("NVIDIA H200", build, PLAN.sizes, {"triton": 3.0, "deep_gemm": 2.5}).save()
        assert doctor.main(["run.toml"]) == 0
        found = capsys.readouterr().out
        assert doctor.main([]) == 0
        here = capsys.readouterr().out
    reason = "bench timed forward and backward on this GPU model: triton 3.00 ms, deep_gemm 2.50 ms"
    assert line(default, "ok", "backend").startswith("triton (the default: bench has not timed it beside")
    assert line(found, "ok", "backend") == f"deep_gemm ({reason})"
    assert asked[1:] == [[], ["--mega_moe.backend", "deep_gemm"]] and "(of backend deep_gemm)" in found
    assert line(here, "ok", "backend").startswith("triton (the default")
    assert f"deep_gemm for EP=8 E=128 K=8 D=2048 F=768 ({reason})" in here


def test_upstream_can_always_run(monkeypatch, capsys):
    code, output = planned(monkeypatch, capsys, asked="upstream", backend="upstream")
    assert code == 0 and line(output, "ok", "backend") == "TorchTitan's own layer, standard dispatcher"


def test_ranks_say_that_symmetric_memory_needs_gpus(monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("tries the GPUs here")
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert doctor.main([]) == 0 and capsys.readouterr().out == ""  # rank 0 speaks for all
    monkeypatch.setenv("RANK", "0")
    assert doctor.main([]) == 0
    assert line(capsys.readouterr().out, "ok", "between ranks").startswith("symmetric memory needs GPUs")


def test_gpus_without_ranks_get_some_that_try_their_memory(monkeypatch):
    """With several GPUs; what the ranks write is theirs, here a stand-in's."""
    written = {"good": ["0 1"], "bad": {"1 0": "what rank 1 wrote did not arrive"}, "failed": {}}
    started = []

    def start(command, ranks, folder):
        started.append(ranks)
        Path(command[-1]).write_text(json.dumps(written))
        return 0

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(launch, "launch", start)
    monkeypatch.delenv("RANK", raising=False)
    assert doctor.between_ranks() == [
        doctor.Line("between ranks", "rank 0 reaches 1", True),
        doctor.Line("between ranks", "rank 1 to rank 0: what rank 1 wrote did not arrive", False),
    ]
    monkeypatch.setattr(launch, "launch", lambda *_: 134)
    (failed,) = doctor.between_ranks()
    assert failed.ok is False and "exit code 134" in failed.text and started == [2]
