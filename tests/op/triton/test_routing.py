"""The routing kernels under Triton's interpreter, against tables made by plain Python (simulate_routing.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


# Measured, seconds of one core: 8 to 25.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ep", [1, 2, 8])
def test_tables_of_every_rank(ep):
    command = [sys.executable, "-m", "tests.op.triton.simulate_routing", str(ep), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
