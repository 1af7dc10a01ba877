"""Selective activation checkpointing that saves the op's result: neither dispatch nor experts run again."""

from dataclasses import dataclass

import torch
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, SelectiveAC

from titan_mega_moe.op import library  # noqa: F401  registers the op


class MegaSelectiveAC(SelectiveAC):
    """Upstream's policy with the op's output among those it saves."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return SelectiveAC.get_save_ops(self) | {torch.ops.titan_mega_moe.mega_moe.default}


def save_op(config: ActivationCheckpointing.Config | None) -> ActivationCheckpointing.Config | None:
    """Upstream's selective policy becomes ours; any other policy is left as it is."""
    return selective(config) if type(config) is SelectiveAC.Config else config


@override(target=SelectiveAC.Config, description="Selective checkpointing saves the fused op's output.", exact=True)
def selective(config: SelectiveAC.Config) -> MegaSelectiveAC.Config:
    """For config registries that are not ours, beside the layer's override:
    `--override.imports titan_mega_moe.routed_experts.mega_moe
    titan_mega_moe.activation_checkpoint.selective`.
    """
    return derive(config, MegaSelectiveAC.Config)
