"""The fused kernels themselves, on the GPUs they are for: `bench` checks them against float64 and upstream's layer."""

import subprocess
import sys

import pytest
import torch

from titan_mega_moe.op import backends

REASON = backends.unavailable_reason("triton", "cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.mark.parametrize("layers", ["triton", "triton:inputs"])
def test_errors_and_bits_on_gpus(layers: str) -> None:
    """40 shapes and routings within upstream's own error, and 200 repetitions of one input with the same bits."""
    ranks = min(2, torch.cuda.device_count())
    command = [sys.executable, "-m", "titan_mega_moe", "bench", "--ranks", str(ranks), "--layers", layers]
    run = subprocess.run(
        [*command, "--checks", "40", "--repeat-bits", "200"], timeout=900, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
