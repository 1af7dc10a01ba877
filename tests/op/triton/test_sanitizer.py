"""The kernels read and write within their tensors: compute-sanitizer's memcheck, on two small shapes, both settings."""

import shutil
import subprocess
import sys

import pytest

from titan_mega_moe.op import backends

REASON = backends.unavailable_reason("triton", "cuda")
if REASON is None and shutil.which("compute-sanitizer") is None:
    REASON = "compute-sanitizer, of the CUDA toolkit, is not on the PATH"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

STEP = """
import torch
from titan_mega_moe.op import mega_moe

T, D, F, E, K, keep = {case}
x = torch.randn(T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
ids = torch.rand(T, E, device="cuda").topk(K, 1).indices
scores = torch.rand(T, K, device="cuda", requires_grad=True)
w1, w2, w3 = (torch.randn(E, *s, device="cuda", requires_grad=True) for s in ((F, D), (D, F), (F, D)))
mega_moe(x, ids, scores, w1, w2, w3, num_experts=E, group=None, backend="triton", keep=keep).sum().backward()
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [(300, 256, 192, 8, 2, "activations"), (129, 128, 64, 4, 3, "inputs")])
def test_memcheck(case):
    # What a library asks the driver for and does not get, torch itself among them, is no fault of the kernels.
    sanitizer = ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    run = subprocess.run(
        [*sanitizer, sys.executable, "-c", STEP.format(case=case)], timeout=250, capture_output=True, text=True
    )
    assert run.returncode == 0 and "done" in run.stdout, run.stdout[-4000:] + run.stderr[-4000:]
    assert "ERROR SUMMARY: 0 errors" in run.stdout, run.stdout[-4000:]
