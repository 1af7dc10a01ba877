"""Which fused backend was faster here, by layer sizes: `bench` writes it, backend "auto" goes by it.

One small JSON file per GPU model, versions and sizes, in the cache folder of the kernels.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from titan_mega_moe.version import __version__


@dataclass(frozen=True)
class Sizes:
    """What tells one kind of layer from another and is equal on every rank of its group, unlike T."""

    ep_size: int
    num_experts: int
    top_k: int
    dim: int
    hidden_dim: int

    def __str__(self) -> str:
        return f"EP={self.ep_size} E={self.num_experts} K={self.top_k} D={self.dim} F={self.hidden_dim}"


@dataclass(frozen=True)
class Timing:
    """Mean milliseconds of forward and backward by backend; None where its results were wrong."""

    gpu: str
    deep_gemm: str
    """Package and version of the deep_gemm build."""

    sizes: Sizes
    ms: dict[str, float | None]
    titan_mega_moe: str = __version__

    @property
    def backend(self) -> str:
        """The fastest of those that were right; "triton", if none was."""
        right = {name: ms for name, ms in self.ms.items() if ms is not None}
        return min(right, key=lambda name: right[name], default="triton")

    @property
    def reason(self) -> str:
        times = ", ".join(
            f"{name} {'gave wrong results' if ms is None else f'{ms:.2f} ms'}" for name, ms in self.ms.items()
        )
        return f"bench timed forward and backward on this GPU model: {times}"

    def save(self) -> Path:
        """Write the file that `recall` finds, at once or not at all. Raises OSError."""
        path = _path(self.gpu, self.deep_gemm, self.sizes)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(asdict(self), file, indent=1)
        os.replace(file.name, path)
        return path


def here() -> tuple[str, str]:
    """The GPU model and the deep_gemm build of this process, where there are both."""
    from titan_mega_moe.op import deep_gemm  # not at the top: it imports backends, and that this

    build = deep_gemm.find_build()
    assert not isinstance(build, str), build
    return torch.cuda.get_device_name(), build.package


def recall(gpu: str, deep_gemm: str, sizes: Sizes) -> Timing | None:
    """What bench found for these, or None. Raises ValueError for a file that it did not write."""
    path = _path(gpu, deep_gemm, sizes)
    return _read(path) if path.exists() else None


def recall_all(gpu: str, deep_gemm: str) -> Iterator[Timing]:
    """What bench found on this GPU model with these versions, for any sizes."""
    for path in sorted(_folder().glob("fastest-*.json")):
        timing = _read(path)
        if (timing.gpu, timing.deep_gemm, timing.titan_mega_moe) == (gpu, deep_gemm, __version__):
            yield timing


def _folder() -> Path:
    from titan_mega_moe.op.triton.cuda import cache_dir  # not at the top: it imports triton

    return cache_dir()


def _path(gpu: str, deep_gemm: str, sizes: Sizes) -> Path:
    key = json.dumps([gpu, __version__, deep_gemm, asdict(sizes)])
    return _folder() / f"fastest-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> Timing:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return Timing(**found | {"sizes": Sizes(**found["sizes"]), "ms": dict(found["ms"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it and run bench again") from None
