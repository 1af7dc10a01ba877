"""The command line: `titan-mega-moe COMMAND ...`, also `python -m titan_mega_moe` and under torchrun."""

import importlib
import os
import signal
import sys
import time

from titan_mega_moe import launch, slurm, stop
from titan_mega_moe.config.source import ConfigError
from titan_mega_moe.version import __version__

_SILENCE = 60  # seconds that a rank leaves rank 0 to refuse bad input

# name -> (module with main(args: list[str]) -> exit code, one line of help); imported when it is asked for.
COMMANDS = {
    "train": ("titan_mega_moe.train", "train the model that a TOML file describes"),
    "compare": ("titan_mega_moe.compare", "train it once with each layer, from the same seed, and compare"),
    "bench": ("titan_mega_moe.bench", "time the layer alone, against TorchTitan's, and check its results"),
    "doctor": ("titan_mega_moe.doctor", "say whether a run will work here, and what it takes per GPU"),
}


def main(args: list[str] | None = None) -> int:
    """Run one command. Returns its exit code; 2 is bad input, told in one line on stderr."""
    launch.die_with_launcher()
    task = slurm.become_rank()
    name, *rest = (sys.argv[1:] if args is None else args) or ["--help"]
    if name == "train" and "RANK" in os.environ:
        stop.listen(stop.SIGNALS if task else stop.SIGNALS[:1])  # before the seconds that importing torch takes
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        print(__version__)
        return 0
    if name not in COMMANDS:
        print(f"titan-mega-moe: unknown command {name!r}; known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(COMMANDS[name][0]).main(rest)
    except ConfigError as error:
        # Every rank of a node refuses the same input, and rank 0 says so: one that ended first would have
        # the others stopped before they speak.
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(_SILENCE)
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT


def _usage() -> str:
    commands = "\n".join(f"  {name:8} {text}" for name, (_, text) in COMMANDS.items())
    return f"usage: titan-mega-moe COMMAND ...\n\n{commands}\n\ntitan-mega-moe COMMAND --help says more."
