"""The fused kernels themselves, on the GPUs they are for: `bench` checks them against float64 and upstream's layer."""

import subprocess
import sys

import pytest
import torch

from titan_mega_moe.op import backends

REASON = backends.unavailable_reason("triton", "cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_errors_and_bits(ranks: int) -> None:
    """40 shapes and routings within upstream's own error, and 200 repetitions of one input with the same bits.

    Groups larger than the GPUs at hand take turns on them.
    """
    few = ["--share-gpus"] if ranks > torch.cuda.device_count() else []
    command = [sys.executable, "-m", "titan_mega_moe", "bench", "--ranks", str(ranks), *few]
    checks = ["--layers", "triton,triton:inputs", "--checks", "40", "--repeat-bits", "200"]
    run = subprocess.run([*command, *checks], timeout=900, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
