"""A config registry that knows nothing of our layer."""

from torchtitan.trainer import Trainer

from tests.training import Run, config


def tiny() -> Trainer.Config:
    parallelism = {"expert_parallel_degree": 2, "spmd_backend": "partial_dtensor"}
    return config(Run(backend="upstream", layers=1, hidden_dim=32, steps=3, parallelism=parallelism), "")
