"""Which installed deep_gemm and which GPU will do, and the reason for each that does not."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tests.op import deep_gemm_double as double
from titan_mega_moe.op import backends, deep_gemm

REMEDY = 'install a DeepGEMM build with a trainable Mega MoE, or set backend = "triton"'


@pytest.fixture
def hopper(monkeypatch):
    """A machine whose torch and GPU are those of an H200, as far as torch is asked."""
    gpu(monkeypatch, "NVIDIA H200", (9, 0), "13.0")


def gpu(monkeypatch, name: str, capability: tuple[int, int], cuda: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch.version, "cuda", cuda)


def reason() -> str | None:
    return backends.unavailable_reason("deep_gemm", "cuda")


def test_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    assert reason() == f"deep_gemm is not installed; {REMEDY}"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("raise OSError('undefined symbol: _ZN2at4_ops')", "undefined symbol: _ZN2at4_ops"),
        ("raise AssertionError('no CUDA home')", "no CUDA home"),
    ],
)
def test_installed_but_it_does_not_import(tmp_path, monkeypatch, source, error):
    (tmp_path / "deep_gemm.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    assert reason() == (f"deep_gemm is installed but does not import beside torch {torch.__version__} ({error})")


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (
            {"without": ("bf16_mega_moe_backward",)},
            "has no bf16_mega_moe_backward, so it cannot train; " + REMEDY,
        ),
        (
            {"without": ("bf16_mega_moe", "bf16_mega_moe_backward")},
            "has no bf16_mega_moe and no bf16_mega_moe_backward, so it cannot train; " + REMEDY,
        ),
        ({"dw_natural": False}, "does not take dw_natural_layout; " + REMEDY),
    ],
)
def test_a_build_that_lacks_something(monkeypatch, hopper, build, expected):
    monkeypatch.setitem(sys.modules, "deep_gemm", double.variant(**build))
    assert reason().endswith(expected)
    assert f"deep_gemm {double.__version__} at {double.__file__}" in reason()


@pytest.mark.parametrize("natural", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_build_that_trains_and_what_it_accepts(monkeypatch, hopper, natural, deterministic):
    monkeypatch.setitem(sys.modules, "deep_gemm", double.variant(natural=natural, deterministic=deterministic))
    assert reason() is None
    build = deep_gemm.find_build()
    assert build.natural_l1 is (natural or deterministic) and build.deterministic is deterministic


@pytest.mark.parametrize(
    ("name", "capability", "cuda", "expected"),
    [
        ("NVIDIA H200", (9, 0), "12.3", None),
        ("NVIDIA B200", (10, 0), "12.9", None),
        ("NVIDIA B300", (10, 3), "13.0", None),
        ("NVIDIA H200", (9, 0), "12.1", "needs CUDA 12.3 or newer on Hopper, torch .* was built for 12.1"),
        (
            "NVIDIA B200",
            (10, 0),
            "12.8",
            "needs CUDA 12.9 or newer on Blackwell, torch .* was built for 12.8",
        ),
        ("NVIDIA A100", (8, 0), "13.0", r"Hopper or Blackwell GPU .*, NVIDIA A100 has 8\.0"),
        ("NVIDIA RTX 5090", (12, 0), "13.0", r"NVIDIA RTX 5090 has 12\.0"),
        ("AMD Instinct MI300X", (9, 4), None, "finds no CUDA GPU here"),
    ],
)
def test_gpus(monkeypatch, name, capability, cuda, expected):
    monkeypatch.setitem(sys.modules, "deep_gemm", double.variant())
    gpu(monkeypatch, name, capability, cuda)
    if expected is None:
        assert reason() is None
    else:
        assert re.search(expected, reason())


def test_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", double.variant())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no CUDA GPU here" in reason()
    assert "the device is cpu" in backends.unavailable_reason("deep_gemm", "cpu")
    monkeypatch.setitem(sys.modules, "deep_gemm", None)  # nor would installing a build help there
    assert "the device is cpu" in backends.unavailable_reason("deep_gemm", "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pack_casts_and_places_rows(dtype):
    """Experts of F=16, gate rows 0..15 and up rows 100..115, two columns: worked by hand."""
    gate = torch.arange(16.0).view(1, 16, 1).expand(1, 16, 2).to(dtype)
    natural = [*range(16), *range(100, 116)]
    interleaved = [*range(8), *range(100, 108), *range(8, 16), *range(108, 116)]
    for is_natural, rows in ((True, natural), (False, interleaved)):
        packed = deep_gemm.pack(gate, gate + 100, is_natural)
        assert packed.dtype == torch.bfloat16 and packed.is_contiguous()
        assert packed[0, :, 0].tolist() == packed[0, :, 1].tolist() == rows


def script(source: str, **env: str) -> str:
    """Output of a fresh interpreter: a compiled deep_gemm, once imported, stays in its process."""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=120, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


REASON = "from titan_mega_moe.op import backends; print(backends.unavailable_reason('deep_gemm', 'cuda'))"


def test_the_package_of_the_index_is_refused_by_name_and_version():
    version = metadata.version("sgl-deep-gemm")
    assert script(REASON) == (f"sgl-deep-gemm {version} has no bf16_mega_moe_backward, so it cannot train; {REMEDY}")


def test_a_module_of_that_name_on_the_path_is_not_taken_for_the_installed_package(tmp_path):
    shutil.copy(double.__file__, tmp_path / "deep_gemm.py")
    answer = script(REASON, PYTHONPATH=f"{tmp_path}:{Path.cwd()}")
    assert answer == f"torch {torch.__version__} finds no CUDA GPU here"
    answer = script(
        "import deep_gemm as m; from titan_mega_moe.op import deep_gemm; print(deep_gemm.package_of(m))",
        PYTHONPATH=f"{tmp_path}:{Path.cwd()}",
    )
    assert answer == f"deep_gemm {double.__version__} at {tmp_path / 'deep_gemm.py'}"


def test_the_package_of_the_index_agrees_on_layout_and_keywords():
    """What it shares with a build that trains: the interleaved l1 and how buffer and forward are called."""
    assert script("""
import inspect, torch, deep_gemm
from titan_mega_moe.op.deep_gemm import pack
w1, w3 = torch.randn(2, 3, 128, 256)
l1, l2 = deep_gemm.transform_weights_for_mega_moe(torch.cat((w1, w3), dim=1).bfloat16(), None)
assert l2 is None and torch.equal(pack(w1, w3, natural=False), l1)
inspect.signature(deep_gemm.bf16_mega_moe).bind(1, 2, 3, 4, activation_clamp=None)
inspect.signature(deep_gemm.get_symm_buffer_for_mega_moe).bind(1, 2, 3, 4, 5, 6, mma_type="bf16xbf16")
print("agreed")
""").endswith("agreed")
