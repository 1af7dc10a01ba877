"""The layer as a module and as an override of any config registry."""

import pytest
import torch
from torchtitan.config import ConfigManager, OverrideConfig
from torchtitan.config.override import apply_overrides
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.gpt_oss import model_registry as gpt_oss
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

from tests import ranks
from tests.training import record, upstream_casts
from titan_mega_moe import mega_moe
from titan_mega_moe.activation_checkpoint import MegaSelectiveAC
from titan_mega_moe.models import model_spec
from titan_mega_moe.routed_experts import MegaMoEOptions, MegaRoutedExperts, replace_routed_experts

TARGET = "titan_mega_moe.routed_experts.mega_moe"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"backend": "nccl"}, "mega_moe.backend is 'nccl'; it must be one of auto, triton, deep_gemm"),
        (
            {"compute_dtype": "float16"},
            "mega_moe.compute_dtype is 'float16'; it must be one of bfloat16, float32",
        ),
        ({"keep": "nothing"}, "mega_moe.keep is 'nothing'; it must be one of activations, inputs"),
        ({"max_tokens": 0}, "mega_moe.max_tokens is 0; it must be at least 1"),
        ({"reserved_sms": -1}, "mega_moe.reserved_sms is -1; it must be from 0 to 160"),
    ],
)
def test_options(options, message):
    with pytest.raises(ValueError) as caught:
        MegaMoEOptions(**options)
    assert message in str(caught.value)


def layer(compute_dtype: str) -> MegaRoutedExperts:
    spec = model_spec(
        "deepseek_v3",
        "debugmodel",
        options=MegaMoEOptions(backend="reference", compute_dtype=compute_dtype),
    )
    built = spec.model.layers[1].moe.routed_experts.build()
    torch.manual_seed(0)
    for p in built.parameters():
        torch.nn.init.normal_(p, std=0.05)
    return built


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scores_dtype", [torch.float32, torch.bfloat16])
def test_forward_is_the_op(compute_dtype, scores_dtype):
    module = layer(compute_dtype)
    x = torch.randn(2, 5, 256)
    ids = torch.stack([torch.randperm(8)[:3] for _ in range(10)]).view(2, 5, 3)
    scores = torch.rand(2, 5, 3).to(scores_dtype)
    y = module(x, scores, ids, torch.zeros(8))
    w = module.inner_experts
    expected = mega_moe(
        x.view(10, 256),
        ids.view(10, 3),
        scores.view(10, 3).float(),
        w.w1_EFD,
        w.w2_EDF,
        w.w3_EFD,
        num_experts=8,
        group=None,
        compute_dtype=getattr(torch, compute_dtype),
    )
    assert y.shape == x.shape and y.dtype == x.dtype and torch.equal(y.view(10, 256), expected)


def test_parameters_keep_their_names():
    names = {name for name, _ in layer("float32").named_parameters()}
    assert names == {f"inner_experts.{w}" for w in ("w1_EFD", "w2_EDF", "w3_EFD")}


def test_refuses_other_experts():
    _, node, _, _ = next(gpt_oss("debugmodel").traverse(RoutedExperts.Config))
    with pytest.raises(ValueError, match="its experts are GptOssGroupedExperts"):
        replace_routed_experts(node, MegaMoEOptions())


def test_override_of_a_foreign_configuration():
    config = qwen3_moe_debug()
    config.training.disable_cuda_graphs = True
    config.parallelism.expert_parallel_degree = 2
    config.override = OverrideConfig(
        imports=[(TARGET, {"keep": "inputs"}), "titan_mega_moe.activation_checkpoint.selective"]
    )
    config.model_spec.model.update_from_config(config=config)
    before = {fqn: node for fqn, node, _, _ in config.model_spec.traverse(RoutedExperts.Config)}
    apply_overrides(config.override, config)
    after = {fqn: node for fqn, node, _, _ in config.model_spec.traverse(MegaRoutedExperts.Config)}
    assert len(after) == 8 and before.keys() == after.keys()
    for fqn, node in after.items():
        assert node.keep == "inputs"
        assert node.sharding_config is before[fqn].sharding_config is not None
        assert node.inner_experts is before[fqn].inner_experts
        assert node.inner_experts.sharding_config is not None
    assert type(config.activation_checkpoint) is MegaSelectiveAC.Config
    assert isinstance(config.activation_checkpoint, SelectiveAC.Config)
    # The layer has no token dispatcher that a CUDA graph could not capture.
    config.training.disable_cuda_graphs = False
    config._validate_cuda_graphs()


def test_override_refuses_unknown_options():
    config = qwen3_moe_debug()
    config.override = OverrideConfig(imports=[(TARGET, {"keeps": "inputs"})])
    with pytest.raises(TypeError, match="keeps"):
        apply_overrides(config.override, config)


def from_the_command_line(folder: str, *flags: str) -> list[float]:
    arguments = ["--module", "tests.foreign_registry", "--config", "tiny", "--dump_folder", folder, *flags]
    with upstream_casts(False):
        return record(ConfigManager().parse_args(arguments)).losses


def test_one_flag_switches_a_foreign_registry(tmp_path):
    options = '{"backend": "reference", "compute_dtype": "float32"}'
    flags = ("--override.imports", f"{TARGET}={options}")
    theirs = ranks.run(2, from_the_command_line, str(tmp_path), timeout=120)[0]
    ours = ranks.run(2, from_the_command_line, str(tmp_path), *flags, timeout=120)[0]
    assert len(ours) == 3 and ours == pytest.approx(theirs, rel=1e-5)
