"""Train Mixture-of-Experts models with TorchTitan through one fused expert-parallel layer.

Importing the package touches no GPU and starts nothing. `mega_moe` is looked up on first use, so that
commands which need no torch (`--help`, a refused TOML) start at once.
"""

from typing import TYPE_CHECKING, Any

from titan_mega_moe.version import __version__

if TYPE_CHECKING:
    from titan_mega_moe.op import mega_moe

__all__ = ["__version__", "mega_moe"]


def __getattr__(name: str) -> Any:
    if name == "mega_moe":
        from titan_mega_moe.op import mega_moe

        return mega_moe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
