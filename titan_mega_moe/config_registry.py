"""Upstream's training configurations with our layer in the model, for torchtitan's own command:

    torchrun --nproc-per-node 8 -m torchtitan.train --module titan_mega_moe --config mega_moe_qwen3_30b_a3b

Everything but the layer is upstream's, and every key can be overridden on the command line.
"""

import importlib
from collections.abc import Callable

from torchtitan.trainer import Trainer

from titan_mega_moe.models import with_mega_moe
from titan_mega_moe.routed_experts import MegaMoEOptions


def _switched(family: str, name: str) -> Callable[[], Trainer.Config]:
    def config() -> Trainer.Config:
        registry = importlib.import_module(f"torchtitan.models.{family}.config_registry")
        result = getattr(registry, name)()
        result.model_spec = with_mega_moe(result.model_spec, MegaMoEOptions())
        return result

    config.__doc__ = f"torchtitan.models.{family}'s {name} with the fused layer."
    return config


mega_moe_qwen3_debug = _switched("qwen3", "qwen3_moe_debug")
mega_moe_qwen3_30b_a3b = _switched("qwen3", "qwen3_30b_a3b")
mega_moe_deepseek_v3_debug = _switched("deepseek_v3", "deepseek_v3_debugmodel")
mega_moe_deepseek_v3_16b = _switched("deepseek_v3", "deepseek_v3_16b")
mega_moe_deepseek_v3_671b = _switched("deepseek_v3", "deepseek_v3_671b")
mega_moe_kimi_k2_7_debug = _switched("kimi_k2_7", "kimi_k2_5_debugmodel")
mega_moe_kimi_k2_7_moonlight_16b_a3b = _switched("kimi_k2_7", "moonlight_16b_a3b")
mega_moe_kimi_k2_7_vl_a3b = _switched("kimi_k2_7", "kimi_vl_a3b")
mega_moe_kimi_k2_7 = _switched("kimi_k2_7", "kimi_k2_5")
# These need flash-linear-attention, so families are imported when a configuration is asked for.
mega_moe_qwen3_5_debug = _switched("qwen3_5", "qwen35_debugmodel_moe")
mega_moe_qwen3_5_35b_a3b = _switched("qwen3_5", "qwen35_35b_a3b")
mega_moe_qwen3_5_122b_a10b = _switched("qwen3_5", "qwen35_122b_a10b")
mega_moe_qwen3_5_397b_a17b = _switched("qwen3_5", "qwen35_397b_a17b")
