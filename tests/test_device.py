"""CPU training: what TorchTitan's seams do after prepare("cpu"), and what is refused."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests import ranks
from titan_mega_moe import device

if torch.cuda.is_available():
    pytest.skip("this process is prepared for a GPU", allow_module_level=True)

from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask, flex_attention
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import CommConfig, CompileConfig, DebugConfig
from torchtitan.models.common.attention import (
    FlexAttention,
    create_attention_mask,
    get_causal_mask_mod,
    get_document_mask_mod,
)
from torchtitan.models.qwen3 import model_registry
from torchtitan.tools import utils
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer


def config(**fields):
    return Trainer.Config(**{"training": TrainingConfig(disable_cuda_graphs=True), **fields})


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_what_a_cpu_can_do_is_not_refused():
    assert device.refusal_reason(config(model_spec=model_registry("debugmodel_moe"))) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"training": TrainingConfig()},
            "CUDA graphs needs a GPU .* set training.disable_cuda_graphs = true",
        ),
        (
            {"training": TrainingConfig(disable_cuda_graphs=True, enable_cpu_offload=True)},
            "CPU offload .* training.enable_cpu_offload = false",
        ),
        ({"parallelism": ParallelismConfig(context_parallel_degree=2)}, r"context parallelism \(degree 2\)"),
        (
            {"compile": CompileConfig(enable=True, enable_async_tensor_parallel=True)},
            "asynchronous tensor parallelism",
        ),
        ({"profiler": Profiler.Config(enable_memory_snapshot=True)}, "memory snapshots"),
        ({"comm": CommConfig(mode="torchcomms")}, "comm.mode 'torchcomms'"),
        (
            {"checkpoint": CheckpointManager.Config(async_mode="async_with_pinned_mem")},
            'checkpoint.async_mode \'async_with_pinned_mem\' .* use "async" or "disabled"',
        ),
        (
            {"model_spec": model_registry("debugmodel_moe", attn_backend="varlen")},
            "attention backend 'varlen' .* use \"flex\"",
        ),
        (
            {"model_spec": model_registry("debugmodel_moe", moe_comm_backend="minimal_async_ep")},
            "token dispatcher MinimalAsyncEPTokenDispatcher",
        ),
    ],
)
def test_a_setting_that_needs_a_gpu_is_refused_in_one_sentence(fields, reason):
    said = device.refusal_reason(config(**fields))
    assert said is not None and "\n" not in said
    assert " needs a GPU and the device is 'cpu': " in said
    assert re.search(reason, said), said


def test_settings_that_torchtitan_refuses_itself_when_built_are_refused_here_too():
    """They raise in their own constructor on a machine without a GPU, so they are set afterwards."""
    batch, fsdp = config(), config()
    batch.debug = DebugConfig(batch_invariant=True)
    fsdp.parallelism = replace(fsdp.parallelism)
    fsdp.parallelism.enable_fsdp_symm_mem = True
    assert "batch-invariant mode needs a GPU" in device.refusal_reason(batch)
    assert "symmetric memory needs a GPU" in device.refusal_reason(fsdp)


def test_prepare_comes_first_and_once():
    device.prepare("cpu")
    assert device.prepared() == "cpu"
    with pytest.raises(RuntimeError, match="already trains on 'cpu'"):
        device.prepare("cuda")
    with pytest.raises(ValueError, match="device 'tpu' is not known: use 'cuda' or 'cpu'"):
        device.prepare("tpu")


def test_prepare_after_torchtitan_has_bound_its_device_is_refused():
    said = python("import torchtitan.distributed.utils; from titan_mega_moe import device; device.prepare('cpu')")
    assert said.returncode != 0
    assert "has to run before torchtitan is imported, and torchtitan.distributed.utils already is" in said.stderr


def test_cuda_without_a_gpu_is_refused():
    said = python("from titan_mega_moe import device; device.prepare('cuda')")
    assert "device 'cuda' needs a GPU and none is visible" in said.stderr


def test_importing_device_imports_no_torchtitan():
    said = python("import sys, titan_mega_moe.device; print('torchtitan' in sys.modules)")
    assert said.stdout.strip() == "False", said.stderr


def test_metrics_have_no_false_mfu_and_a_real_memory():
    assert utils.device_type == "cpu"
    assert utils.get_peak_flops("CPU") == float("inf")
    assert utils.device_module.memory_stats()["reserved_bytes.all.peak"] > 100 * 2**20
    assert utils.get_local_device() == torch.device("cpu")


def attention_inputs(B=2, N=4, kv=2, L=48, H=16):
    q = torch.randn(B, L, N, H, requires_grad=True)
    k, v = (torch.randn(B, L, kv, H, requires_grad=True) for _ in range(2))
    positions = torch.cat([torch.arange(20), torch.arange(L - 20)]).expand(B, L)
    return q, k, v, positions


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_equals_flex_attention_and_has_gradients(scale):
    torch.manual_seed(0)
    q, k, v, positions = attention_inputs()
    L = q.shape[1]
    mask_mod = and_masks(get_causal_mask_mod(), get_document_mask_mod(positions))
    mask = create_attention_mask(mask_mod, q.shape[0], None, L, L, device="cpu")
    layer = FlexAttention.Config().build()
    assert not list(layer.parameters())
    out = layer(q, k, v, attention_masks=mask, scale=scale, enable_gqa=True)
    expected = flex_attention(
        *(t.detach().transpose(1, 2) for t in (q, k, v)),
        block_mask=create_block_mask(mask_mod, q.shape[0], None, L, L, device="cpu"),
        scale=scale,
        enable_gqa=True,
    ).transpose(1, 2)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    # A later document must not see an earlier one, nor a token what comes after it.
    out[:, 30].sum().backward()
    assert k.grad[:, :20].abs().max() == 0 and k.grad[:, 31:].abs().max() == 0 and k.grad[:, 25].abs().max() > 0


def test_attention_with_a_score_mod_is_refused():
    q, k, v, _ = attention_inputs()
    with pytest.raises(NotImplementedError, match="attention takes a mask only"):
        FlexAttention.compiled_flex_attn(
            q, k, v, score_mod=lambda s, *_: s, block_mask=None, scale=None, enable_gqa=True,
            return_aux=AuxRequest(lse=False), kernel_options={},
        )  # fmt: skip


def test_grouped_matmul_in_bfloat16_is_the_float32_product_rounded_once():
    torch.manual_seed(0)
    x = torch.randn(40, 32, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(3, 24, 32, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([5, 5, 40], dtype=torch.int32)
    y = torch._grouped_mm(x, w.transpose(-2, -1), offs=ends)
    y.sin().sum().backward()
    dy = y.detach().float().cos().bfloat16().float()
    for i, (a, b) in enumerate([(0, 5), (5, 5), (5, 40)]):
        rows, weight = x[a:b].float(), w[i].float()
        assert y[a:b].equal((rows @ weight.T).bfloat16())
        torch.testing.assert_close(x.grad[a:b], (dy[a:b] @ weight).bfloat16(), rtol=8e-3, atol=1e-2)
        torch.testing.assert_close(w.grad[i], (dy[a:b].T @ rows).bfloat16(), rtol=8e-3, atol=1e-2)


def shards_and_replicas():
    """This rank's part of a tensor sharded one way and replicated the other, drawn at random."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, zeros

    torch.manual_seed(5)
    mesh = init_device_mesh("cpu", (2, 2))
    both = [zeros(8, 4, device_mesh=mesh, placements=[Replicate(), Shard(0)]).normal_() for _ in range(2)]
    return [t.to_local() for t in both], torch.rand(3)


def test_random_shards_differ_and_replicas_and_what_is_drawn_later_do_not():
    found = ranks.run(4, shards_and_replicas)
    for first, second in (shards for shards, _ in found):
        assert not torch.equal(first, second)
    for one in range(2):
        assert torch.equal(found[0][0][one], found[2][0][one]) and torch.equal(found[1][0][one], found[3][0][one])
        assert not torch.isclose(found[0][0][one], found[1][0][one]).any()
    assert all(torch.equal(later, found[0][1]) for _, later in found)
