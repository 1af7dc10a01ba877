"""Reading a TOML file and the command line's overrides into nested dicts: no torch, no torchtitan.

The device is asked for here because it has to be known before torchtitan is first imported.
"""

import difflib
import re
from pathlib import Path
from typing import Any

import tomli

Table = dict[str, Any]
Key = tuple[str | int, ...]


class ConfigError(ValueError):
    """One sentence that begins with the file and the [section] key it is about."""


class KeyProblem(Exception):
    """What is wrong at one key; `load` adds the file and raises ConfigError."""

    def __init__(self, key: Key, text: str) -> None:
        super().__init__(text)
        self.key, self.text = key, text


def spell(key: Key) -> str:
    """("training", "steps") -> "[training] steps"; a top-level key stands alone, odd names are quoted."""
    *section, name = (part if re.fullmatch(r"[\w-]+", part) else repr(part) for part in map(str, key))
    return f"[{'.'.join(section)}] {name}" if section else name


def nearest(name: str, names: list[str]) -> str:
    """ "; did you mean 'steps'?", or nothing where no known name is near."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def read(path: str | Path) -> Table:
    """The tables of the TOML file at `path`.

    Raises:
        ConfigError: no such file, not a file, not UTF-8, or malformed TOML (with line and column).
    """
    try:
        return tomli.loads(Path(path).read_text(encoding="utf-8-sig"))  # some editors begin with a mark
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a TOML file: byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except tomli.TOMLDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{path}: {where}: malformed TOML: {error.msg}") from None
    except (RecursionError, ValueError) as error:  # nested too deep, a number too long
        raise ConfigError(f"{path}: malformed TOML: {error}") from None


def split_overrides(args: list[str]) -> dict[tuple[str, ...], list[str]]:
    """["--training.steps", "20", "--debug.x"] -> {("training", "steps"): ["20"], ("debug", "x"): []}.

    `--key=value` is understood too, and a dash in a key is an underscore, as in torchtitan. The last one
    of a key wins.

    Raises:
        ConfigError: an argument that belongs to no --key.
    """
    overrides: dict[tuple[str, ...], list[str]] = {}
    values: list[str] | None = None
    for arg in args:
        if arg.startswith("--") and len(arg) > 2:
            name, has_value, value = arg[2:].partition("=")
            values = [value] if has_value else []
            overrides[tuple(name.replace("-", "_").split("."))] = values
        elif values is None:
            raise ConfigError(f"command line: {arg!r} is no option; write --section.key value")
        else:
            values.append(arg)
    return overrides


def device_kind(path: str | Path, args: list[str]) -> str:
    """The device that the file and the overrides ask for, "cuda" where neither says.

    Raises:
        ConfigError: as `read`, or a device that is neither "cuda" nor "cpu".
    """
    device = read(path).get("device", {})
    given = split_overrides(args).get(("device", "kind"))
    kind = given[0] if given else device.get("kind", "cuda") if isinstance(device, dict) else "cuda"
    if kind not in ("cuda", "cpu"):
        raise ConfigError(f"{path}: [device] kind: expected 'cuda' or 'cpu', got {kind!r}")
    return kind
