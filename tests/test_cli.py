"""The command line: what it prints, its exit codes; bad input ends it before a process group starts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from titan_mega_moe import cli, config, launch, stop, train
from titan_mega_moe.trainer import SaveFailed

DEBUG = Path(__file__).parents[1] / "train_configs" / "debug_cpu.toml"


@pytest.fixture
def no_ranks(monkeypatch):
    """Starting ranks or a process group fails the test."""

    def refuse(*args, **kwargs):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(train, "launch", refuse)
    monkeypatch.setattr(train, "train", refuse)
    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_usage_and_version(capsys):
    assert cli.main(["--help"]) == 0
    assert "train" in capsys.readouterr().out
    assert cli.main([]) == 0
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip()[-1].isdigit()
    assert cli.main(["train", "--help"]) == 0
    assert "--section.key" in capsys.readouterr().out


def test_every_command_is_a_module_with_main():
    import importlib

    for module, text in cli.COMMANDS.values():
        assert callable(importlib.import_module(module).main) and text


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["trian", "x.toml"], "unknown command 'trian'"),
        (["train"], "usage: "),
        (["train", "--training.steps", "3"], "the TOML file comes first, got '--training.steps'"),
        (["train", "/nowhere.toml"], "/nowhere.toml: no such file"),
        (
            ["train", str(DEBUG), "--training.stepz", "3"],
            "[training] stepz (from the command line): unknown key",
        ),
        (["train", str(DEBUG), "--device.kind", "tpu"], "[device] kind: expected 'cuda' or 'cpu', got 'tpu'"),
        (
            ["train", str(DEBUG), "--device.ranks", "3"],
            "[parallelism] expert_parallel_degree: 2 does not divide",
        ),
        (
            ["train", str(DEBUG), "--training.global_batch_size", "3"],
            "[training] global_batch_size: 3 is no multiple",
        ),
        (["train", str(DEBUG), "--device.ranks", "100000"], "[device] ranks: 100000 are too many for this machine"),
        (["train", str(DEBUG), "--comm.mode", "fake_backend"], "[comm] mode: 'fake_backend' plays one rank"),
        (["train", str(DEBUG), "--training.disable_cuda_graphs", "false"], "[training] disable_cuda_graphs"),
        (
            ["train", str(DEBUG), "--dump_folder", "/dev/null/x"],
            "dump_folder: '/dev/null/x' cannot be written",
        ),
        (["train", str(DEBUG), "--training.steps", "x", "--print-config"], "[training] steps"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, expected, no_ranks, capsys):
    assert cli.main(arguments) == 2
    told = capsys.readouterr()
    assert expected in told.err and not told.out
    assert arguments == ["train"] or len(told.err.strip().splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
def test_a_missing_gpu_is_told_after_what_is_wrong_with_the_file(no_ranks, capsys):
    assert cli.main(["train", str(DEBUG), "--device.kind", "cuda", "--training.stepz", "3"]) == 2
    assert "[training] stepz" in capsys.readouterr().err
    assert cli.main(["train", str(DEBUG), "--device.kind", "cuda"]) == 2
    assert "[device] kind: " in capsys.readouterr().err


def test_under_torchrun_bad_input_is_said_once_with_exit_code_2():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "titan_mega_moe", "train", "/nowhere.toml"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert ended.returncode != 0
    assert ended.stderr.count("/nowhere.toml: no such file") == 1
    assert "exitcode  : 2" in ended.stderr


def test_print_config_prints_what_loads_again(no_ranks, capsys, tmp_path):
    assert cli.main(["train", str(DEBUG), "--print-config", "--training.steps", "7"]) == 0
    path = tmp_path / "printed.toml"
    path.write_text(capsys.readouterr().out)
    assert config.to_toml(config.load(path)) == config.to_toml(config.load(DEBUG, ["--training.steps", "7"]))


def test_train_saves_the_resolved_configuration_and_starts_ranks_from_it(monkeypatch, tmp_path, no_ranks):
    started = []
    monkeypatch.setattr(train, "launch", lambda *args: started.append(args) or 7)
    assert cli.main(["train", str(DEBUG), "--dump_folder", str(tmp_path / "run"), "--training.steps", "7"]) == 7
    saved = tmp_path / "run" / "config.toml"
    assert started == [(["-m", "titan_mega_moe", "train", str(saved)], 2, tmp_path / "run" / "ranks")]
    assert config.load(saved).training.steps == 7
    assert [p.name for p in saved.parent.iterdir()] == ["config.toml"]


def test_under_torchrun_the_process_is_one_rank(monkeypatch, tmp_path, no_ranks):
    trained = []
    monkeypatch.setattr(train, "train", lambda resolved: trained.append(resolved) or 0)
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert cli.main(["train", str(DEBUG), "--dump_folder", str(tmp_path)]) == 0
        assert (tmp_path / "config.toml").exists() is (rank == "0")
    assert len(trained) == 2


class Full:
    """A trainer whose disk is full."""

    def __init__(self, resolved):
        pass

    def train(self):
        raise SaveFailed("checkpoint: no room")

    def close(self):
        print("closed", file=sys.stderr)


def test_a_checkpoint_that_cannot_be_written_is_one_sentence_and_exit_code_74(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("titan_mega_moe.trainer.StoppableTrainer", Full)
    assert train.train(config.load(DEBUG, ["--dump_folder", str(tmp_path)])) == stop.SAVE_FAILED == 74
    assert capsys.readouterr().err.splitlines() == ["checkpoint: no room", "closed"]


# The launcher, with small programs in the place of training.

FAIL = """
import os, sys, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        raise KeyError("the fault of rank one")
    time.sleep(300)
main()
"""


@pytest.mark.parametrize(
    "program, code, last",
    [
        ("print('hello from', __import__('os').environ['RANK'])", 0, None),
        (FAIL, 1, "KeyError: 'the fault of rank one'"),
        (
            "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('it ends'); time.sleep(300)",
            1,
            "it ends",
        ),
        ("import os, time; os.environ['RANK'] == '1' and undefined; time.sleep(300)", 1, "NameError"),
        (
            "import os, sys, time; os.environ['RANK'] == '1' and sys.exit(3); time.sleep(300)",
            3,
            "exit code 3",
        ),
        (
            "import os, sys, time; os.environ['RANK'] == '1' and (print('checkpoint: no room', file=sys.stderr), "
            "print('a warning', file=sys.stderr), sys.exit(74)); time.sleep(300)",
            74,
            "checkpoint: no room",
        ),
        (
            "import os, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(300)",
            137,
            "SIGKILL",
        ),
    ],
)
def test_launch_returns_the_failed_ranks_exit_code_and_says_why_last(program, code, last, tmp_path, capfd):
    start = time.monotonic()
    assert launch.launch(["-c", program], 2, tmp_path) == code
    assert time.monotonic() - start < 120
    told = capfd.readouterr()
    if last is None:
        assert "hello from 0" in told.out and "hello from 1" not in told.out
        assert len(list(tmp_path.glob("*/*/*/stdout.log"))) == 2
    else:
        assert last in "\n".join(told.err.strip().splitlines()[-3:])
        assert "rank 1 " in told.err.strip().splitlines()[-1]


CHILD = (
    "import os, time; from titan_mega_moe import launch; launch.die_with_launcher(); "
    "open(os.path.join({folder!r}, os.environ['RANK']), 'w').write(str(os.getpid())); time.sleep(300)"
)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


LISTENING = (
    "import os, sys, time; from titan_mega_moe import stop; stop.listen(stop.SIGNALS[:1])\n"
    "open(os.path.join({folder!r}, os.environ['RANK']), 'w').write(str(os.getpid()))\n"
    "while stop.received() is None or {deaf}: time.sleep(0.1)\n"
    "time.sleep(int(os.environ['RANK'])); sys.exit({code})"
)


@pytest.mark.parametrize(
    "numbers, deaf, ends, code",
    [
        ([signal.SIGUSR1], False, "75", 75),
        ([signal.SIGTERM], False, "128 + stop.received()", 143),  # as without checkpoints
        ([signal.SIGINT, signal.SIGINT], True, "0", 130),
    ],
)
def test_a_signal_reaches_the_ranks_and_the_exit_code_is_what_they_made_of_it(numbers, deaf, ends, code, tmp_path):
    arguments = (["-c", LISTENING.format(folder=str(tmp_path), deaf=deaf, code=ends)], 2, str(tmp_path / "logs"))
    body = f"import sys; from titan_mega_moe.launch import launch; sys.exit(launch(*{arguments!r}))"
    launcher = subprocess.Popen([sys.executable, "-c", body], stderr=subprocess.PIPE, text=True)
    assert until(lambda: all((tmp_path / rank).exists() for rank in "01"), 120)
    for number in numbers:
        time.sleep(0.5)
        os.kill(launcher.pid, number)
    name = numbers[0].name
    said = [f"{name}: stopping after this step; Ctrl-C twice stops at once", f"stopped by {name}"]
    assert launcher.communicate(timeout=60)[1].splitlines() == said and launcher.returncode == code


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_rank_outlives_the_launcher(number, code, tmp_path):
    program = CHILD.format(folder=str(tmp_path))
    arguments = (["-c", program], 2, str(tmp_path / "logs"))
    body = f"import sys; from titan_mega_moe.launch import launch; sys.exit(launch(*{arguments!r}))"
    launcher = subprocess.Popen([sys.executable, "-c", body], stderr=subprocess.DEVNULL)
    files = [tmp_path / "0", tmp_path / "1"]
    assert until(lambda: all(f.exists() and f.read_text() for f in files), 120)
    pids = [int(f.read_text()) for f in files]
    assert all(map(alive, pids))
    os.kill(launcher.pid, number)
    assert launcher.wait(60) == code
    assert until(lambda: not any(map(alive, pids)), 30)


@pytest.mark.parametrize("asked, visible, ranks", [(None, 8, 8), (4, 8, 4), (8, 8, 8), (9, 8, None)])
def test_one_rank_per_visible_gpu_or_as_many_as_asked_for(asked, visible, ranks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    overrides = ["--device.kind", "cuda", "--device.ranks", str(asked)]
    resolved = config.load(DEBUG, overrides)
    if ranks is None:
        with pytest.raises(config.ConfigError, match="9 ranks need as many GPUs and 8 are visible"):
            train.rank_count(resolved, DEBUG)
    else:
        assert train.rank_count(resolved, DEBUG) == ranks
