"""TOML -> Trainer.Config.

    config = load("train_configs/qwen3_30b_a3b.toml", ["--training.steps", "20"])

Sections and keys are those of torchtitan 0.3's Trainer.Config, and [model], [mega_moe], [device]. Files
written for torchtitan 0.1 and 0.2 load too (`legacy.py`). torchtitan is imported by the first `load`, not by
this package, because `titan_mega_moe.device.prepare` has to run before that.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from titan_mega_moe.config.source import ConfigError, device_kind

if TYPE_CHECKING:
    from titan_mega_moe.config.run_config import RunConfig

__all__ = ["ConfigError", "check_world", "device_kind", "load", "to_toml"]


def load(path: str | Path, overrides: list[str] | None = None) -> "RunConfig":
    """The configuration in the file at `path`, with its model spec, ready to build a Trainer of.

    Args:
        path: a TOML file.
        overrides: command line arguments, `--section.key value`, laid over the file.

    Raises:
        ConfigError: what is wrong with the file or the overrides: one sentence that names file and key.
    """
    from titan_mega_moe.config import loader

    return loader.load(path, overrides or [])


def to_toml(config: "RunConfig") -> str:
    """`config` as a TOML file that `load` reads back to an equal one."""
    from titan_mega_moe.config import loader

    return loader.to_toml(config)


def check_world(config: "RunConfig", world_size: int, path: str | Path) -> None:
    """Raise ConfigError, naming `path`, if `config` cannot run on `world_size` ranks or misses an asset."""
    from titan_mega_moe.config import loader

    loader.check_world(config, world_size, path)
