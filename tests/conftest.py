"""One thread a process, because tests spawn ranks; and the device, before anything imports torchtitan."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

from tests import ranks
from titan_mega_moe import device

torch.set_num_threads(1)
device.prepare("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module", autouse=True)
def _stop_ranks():
    """Rank processes serve one file's tests: trainings leave gigabytes behind in them."""
    yield
    ranks.stop()
