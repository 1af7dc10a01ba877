"""The planner's numbers against a real training's, against each other, and what it refuses."""

import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path

import pytest
import torch

from tests import ranks
from titan_mega_moe import config, planner

DEBUG = str(Path(__file__).parents[1] / "train_configs" / "debug_cpu.toml")
SMALL = ["--model.layers", "1", "--training.seq_len", "64"]
# A GPU's run: parameters gathered in bf16. CUDA graphs keep gradients allocated from step to step, so that
# the peak is where activations are.
GPU = ["--model.layers", "4", "--training.seq_len", "64"]
GPU += ["--device.kind", "cuda", "--mega_moe.backend", "deep_gemm"]
GPU += ["--training.mixed_precision_param", "bfloat16", "--training.no_disable_cuda_graphs"]


@cache
def gpu_plan(world_size: int, *overrides: str) -> planner.Plan:
    return planner.make(DEBUG, [*GPU, *overrides], world_size)


def train_one_step(folder: str) -> tuple[int, int, int]:
    """Bytes of this rank's parameters, gradients and optimizer states after a step."""
    run = config.load(DEBUG, [*SMALL, "--training.steps", "1", "--dump_folder", folder])
    trainer = run.build()
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    parameters = [p for part in trainer.model_parts for p in part.parameters()]
    states = [s for o in trainer.optimizers.optimizers for d in o.state.values() for s in d.values()]
    sizes = tuple(planner._bytes(t) for t in (parameters, [p.grad for p in parameters], states))
    trainer.close()
    return sizes


def test_what_persists_is_what_a_real_rank_holds(tmp_path):
    plan = planner.make(DEBUG, SMALL)
    assert (plan.world_size, plan.backend, plan.device) == (2, "reference", "cpu")
    assert plan.mesh["ep"] == 2 and plan.refused is None and plan.buffers == 0
    real = ranks.run(2, train_one_step, str(tmp_path), timeout=200)
    assert real[0] == (plan.parameters, plan.gradients, plan.optimizer)
    assert plan.total == sum(real[0]) + plan.activations


def test_more_ranks_hold_less_each():
    """Two expert-parallel ranks, then 32 groups of them: the same experts, each sharded 32 times."""
    two, many = gpu_plan(2), gpu_plan(64)
    assert {axis: many.mesh[axis] for axis in ("ep", "efsdp")} == {"ep": 2, "efsdp": 32}
    assert two.buffers is None and two.max_tokens == many.max_tokens == 4 * 64
    assert two.parameters / many.parameters == pytest.approx(32, rel=0.02)
    assert two.optimizer / many.optimizer == pytest.approx(32, rel=0.02)
    assert many.activations > 0 and many.total < two.total


def test_what_the_layer_keeps_counts_in_every_layer():
    """deep_gemm keeps l1 (32 experts, 2F = 1536, D = 256, bf16) of every layer, or nothing.

    The peak comes when the last of the 4 layers has gone backward and its gradients are still gathered.
    """
    kept, dropped = gpu_plan(2), gpu_plan(2, "--mega_moe.keep", "inputs")
    assert (kept.parameters, kept.optimizer) == (dropped.parameters, dropped.optimizer)
    l1 = 32 * 1536 * 256 * 2
    assert kept.total - dropped.total == pytest.approx(3 * l1, rel=0.05)


def test_ranks_that_do_not_fit_are_refused():
    with pytest.raises(config.ConfigError, match=r"expert_parallel_degree: 2 does not divide .* on 3 ranks"):
        planner.make(DEBUG, SMALL, world_size=3)
    assert not torch.distributed.is_initialized()


def test_sizes_that_the_kernels_do_not_take_are_refused():
    """Without expert parallelism, tensor parallelism leaves 192 of F = 768 to each rank."""
    args = [*GPU, "--parallelism.expert_parallel_degree", "1", "--parallelism.tensor_parallel_degree", "4"]
    with pytest.raises(config.ConfigError, match=r"cannot run on 4 ranks: .*F=192 of 128 for deep_gemm"):
        planner.make(DEBUG, args, world_size=4)


def test_the_process_that_plans_ends_with_the_one_that_asked(tmp_path):
    """Which is killed while the other reads the file."""
    os.mkfifo(tmp_path / "run.toml")
    ask = f"from titan_mega_moe import planner; planner.make({str(tmp_path / 'run.toml')!r}, [])"
    asking = subprocess.Popen([sys.executable, "-c", ask])
    file = os.open(tmp_path / "run.toml", os.O_WRONLY)  # when it is read
    asking.kill()
    asking.wait()
    with pytest.raises(BrokenPipeError):  # when nobody is left to read
        while True:
            os.write(file, b" ")
            time.sleep(0.05)
    os.close(file)


def test_a_plan_that_was_ended_is_one_sentence(monkeypatch):
    class Ended(ProcessPoolExecutor):
        def submit(self, *_):
            raise BrokenProcessPool

    monkeypatch.setattr(planner, "ProcessPoolExecutor", Ended)
    with pytest.raises(config.ConfigError, match=r"run.toml: the process that planned it was ended, .*fewer"):
        planner.make("run.toml", [])
