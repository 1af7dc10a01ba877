"""What every rank imports: done once, in the process that ranks are forked from (tests.ranks)."""

import torch

from titan_mega_moe import device

torch.set_num_threads(1)
# Before anything that imports torchtitan.
device.prepare("cpu")

import tests.training  # noqa: F401
