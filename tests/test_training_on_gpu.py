"""Whole trainings with the fused layer beside TorchTitan's own, on the GPUs at hand, which ranks may share.

Gloo carries FSDP's collectives and TorchTitan's all-to-all, since NCCL takes no two ranks on a GPU; the layer's own
tokens go through symmetric memory, as ever.
"""

import os
from dataclasses import replace

import pytest
import torch
from torchtitan.distributed import fsdp
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import attention

from tests import ranks
from tests.test_parity import PARTIAL, both, distance
from tests.training import Run, train
from titan_mega_moe import device
from titan_mega_moe.op import backends

REASON = backends.unavailable_reason("triton", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(600),
]
EP2 = {"expert_parallel_degree": 2} | PARTIAL
RUN = Run(
    backend="triton",
    precision="bfloat16",
    params="float32",  # the experts alone round, so that nothing else hides their error
    steps=6,
    training={"seq_len": 128, "local_batch_size": 2},
)
CASES = {
    "ep1": (1, RUN),
    "ep2": (2, replace(RUN, parallelism=EP2)),
    "ep2_full_ac": (2, replace(RUN, parallelism=EP2, ac=FullAC.Config())),
    "ep2_selective_ac": (2, replace(RUN, parallelism=EP2, ac=SelectiveAC.Config())),
    # The experts of each rank of the group are sharded over two ranks more.
    "ep2_fsdp_keep_inputs": (4, replace(RUN, parallelism=EP2, options={"keep": "inputs"})),
    "ep4": (4, replace(RUN, parallelism=EP2 | {"expert_parallel_degree": 4})),
}


def check(run: Run) -> tuple[float, float]:
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % torch.cuda.device_count())
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    fsdp.disable_fsdp_gradient_division = device._sum_gradients  # gloo has no pre-multiplied sum
    dist_utils.set_pg_timeouts = device._set_pg_timeouts  # nor barriers that name a device
    # Attention as on a CPU: FlexAttention would take a minute to compile, in each rank.
    attention._compiled_create_block_mask = attention.create_block_mask
    attention.FlexAttention.compiled_flex_attn = staticmethod(device._dense_attention)
    ours, theirs = both(run)
    for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True), 1):
        assert abs(a - b) / b < 2e-3, (step, a, b)
    one = replace(run, backend="reference", precision="float32", steps=1, ac=None)
    # Of the first layer: behind it the router may decide a near tie otherwise, and one token that goes elsewhere
    # outweighs all rounding.
    exact = {name: grad.cpu() for name, grad in train(one).grads.items() if name.startswith("layers.0.moe.")}
    return tuple(distance({n: r.grads[n].cpu() for n in exact}, exact) for r in (ours, theirs))


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients(case):
    world, run = CASES[case]
    for ours, theirs in ranks.run(world, check, run, timeout=500):
        assert ours <= theirs
