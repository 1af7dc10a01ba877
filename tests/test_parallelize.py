"""Refusals, buffers, activation checkpointing and compilation around the layer."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import spmd_types as spmd
import torch
from torch._dynamo.utils import counters
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import compile
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.models.common.attention import FlexAttention

from tests import ranks
from tests.training import Run, relative, train, upstream
from titan_mega_moe import parallelize
from titan_mega_moe.activation_checkpoint import MegaSelectiveAC, save_op
from titan_mega_moe.models import model_spec
from titan_mega_moe.op import backends, reference
from titan_mega_moe.routed_experts import MegaMoEOptions

RUN = Run(layers=2, hidden_dim=32, steps=2, parallelism={"expert_parallel_degree": 2})


def dims(dp: int = 1, tp: int = 1, cp: int = 1, ep: int = 1, pp: int = 1) -> SimpleNamespace:
    return SimpleNamespace(dp=dp, tp=tp, cp=cp, ep=ep, ep_enabled=ep > 1, pp_enabled=pp > 1)


@pytest.mark.parametrize(
    "degrees, tokens",
    [
        ({}, 4 * 128),
        ({"cp": 2}, 4 * 64),
        ({"tp": 2}, 4 * 128),
        ({"tp": 2, "ep": 4}, 4 * 64),
        ({"tp": 2, "cp": 2, "ep": 8}, 4 * 32),
        ({"pp": 2, "ep": 2}, 2 * 128),
    ],
)
def test_tokens_per_rank(degrees, tokens):
    training = TrainingConfig(local_batch_size=4, seq_len=128)
    parallelism = ParallelismConfig(pipeline_parallel_microbatch_size=2)
    assert parallelize.tokens_per_rank(training, parallelism, dims(**degrees)) == tokens


def attempt(degrees: dict, training: dict, options: dict) -> None:
    """The wrapper on a model of one MoE layer, with an upstream that must not be reached."""
    spec = model_spec("qwen3", "debugmodel_moe", layers=1, options=MegaMoEOptions(backend="reference", **options))
    with torch.device("meta"):
        model = spec.model.build()
    parallelize.parallelize(
        model,
        upstream=lambda *args, **kwargs: pytest.fail("not refused"),
        parallel_dims=dims(**degrees),
        training=TrainingConfig(**training),
        parallelism=ParallelismConfig(),
        ac_config=None,
    )


@pytest.mark.parametrize(
    "degrees, training, options, message",
    [
        (
            {"cp": 2, "tp": 2, "ep": 4},
            {"seq_len": 130},
            {},
            "training.seq_len=130 does not divide over the 4",
        ),
        (
            {"ep": 3},
            {"seq_len": 128},
            {},
            "64 experts do not divide over parallelism.expert_parallel_degree=3",
        ),
        (
            {"ep": 2},
            {"seq_len": 128, "local_batch_size": 2},
            {"max_tokens": 255},
            "mega_moe.max_tokens=255 is less than the 256 tokens a rank routes in one forward",
        ),
    ],
)
def test_refuses(degrees, training, options, message):
    with pytest.raises(ValueError) as caught:
        attempt(degrees, training, options)
    assert message in str(caught.value)


def test_refuses_the_reference_inside_a_cuda_graph(monkeypatch):
    monkeypatch.setattr(parallelize, "device_type", "cuda")
    with pytest.raises(ValueError, match="which a CUDA graph cannot capture"):
        attempt({}, {"seq_len": 128}, {})


def test_refuses_a_backend_that_cannot_run_here():
    spec = model_spec("qwen3", "debugmodel_moe", layers=1, options=MegaMoEOptions(backend="deep_gemm"))
    with torch.device("meta"):
        model = spec.model.build()
    with pytest.raises(RuntimeError, match="backend 'deep_gemm' cannot run on cpu"):
        spec.parallelize_fn(
            model,
            parallel_dims=dims(),
            training=TrainingConfig(),
            parallelism=ParallelismConfig(),
            ac_config=None,
        )


def plans(run: Run) -> list[backends.BufferPlan]:
    """What the layers of a run ask the backend to allocate."""
    asked = []
    reference.Reference.prepare = lambda self, plan: asked.append(plan)
    try:
        train(run)
    finally:
        reference.Reference.prepare = PREPARE
    return list(dict.fromkeys(asked))


PREPARE = reference.Reference.prepare


@pytest.mark.parametrize(
    "world, parallelism, options, expected",
    [
        (1, {"spmd_backend": "partial_dtensor"}, {}, (32, 32, "")),
        (2, {"expert_parallel_degree": 2}, {}, (32, 32, None)),
        (2, {"expert_parallel_degree": 2}, {"max_tokens": 100, "reserved_sms": 4}, (100, 32, None)),
        (2, {"tensor_parallel_degree": 2}, {}, (32, 16, "")),
    ],
)
def test_buffers_are_planned_once_for_all_layers(world, parallelism, options, expected):
    run = replace(RUN, steps=1, parallelism=parallelism, options=options)
    for asked in ranks.run(world, plans, run, timeout=120):
        (plan,) = asked
        assert (plan.dim, plan.num_experts, plan.top_k, plan.keep) == (256, 64, 8, "activations")
        max_tokens, hidden_dim, group_name = expected
        assert (plan.max_tokens, plan.hidden_dim) == (max_tokens, hidden_dim)
        assert plan.reserved_sms == options.get("reserved_sms", 16)
        assert plan.group_name == group_name if group_name is not None else plan.group_name


def test_only_upstreams_selective_policy_is_extended():
    ours = save_op(SelectiveAC.Config(preserve_rng_state=False))
    assert type(ours) is MegaSelectiveAC.Config and not ours.preserve_rng_state
    assert ours.build().get_save_ops() - SelectiveAC.Config().build().get_save_ops() == {
        torch.ops.titan_mega_moe.mega_moe.default
    }
    for policy in (None, FullAC.Config(), MemoryBudgetAC.Config(), ours):
        assert save_op(policy) is policy


def checkpointing() -> None:
    run = replace(RUN, parallelism=RUN.parallelism | {"spmd_backend": "partial_dtensor"})
    with counted_forwards() as calls:
        kept = train(run)
        assert len(calls) == run.layers * run.steps
        assert all((counts.sum(1) == 32 * 8).all() for counts in kept.expert_counts)
        # Selective: the op's output is saved, so neither dispatch nor experts run again. Full: all of it
        # runs again.
        for policy, times in ((SelectiveAC.Config(), 1), (FullAC.Config(), 2)):
            calls.clear()
            again = train(replace(run, ac=policy))
            assert len(calls) == times * run.layers * run.steps
            assert again.losses == kept.losses
            assert all(torch.equal(again.grads[name], grad) for name, grad in kept.grads.items())
            # TorchTitan's router runs and counts again, and its balancing halves the counts of such blocks.
            theirs = train(upstream(replace(run, ac=policy)))
            for counts, once, right in zip(again.expert_counts, kept.expert_counts, theirs.expert_counts, strict=True):
                assert torch.equal(counts, 2 * once) and torch.equal(counts, right)
            for bias, once, right in zip(again.expert_bias, kept.expert_bias, theirs.expert_bias, strict=True):
                assert bias.any() and torch.equal(bias, once) and torch.equal(bias, right)


@contextmanager
def counted_forwards(keep: bool = False) -> Iterator[list[None]]:
    """One element for each run of the op's forward; `keep`: it keeps a tensor for the backward, as fused ones do."""
    calls: list[None] = []
    forward, saved_like = reference.Reference.forward, reference.Reference.saved_like

    def counted(*args):
        calls.append(None)
        y, saved = forward(*args)
        return y, [y.clone()] if keep else saved

    reference.Reference.forward = counted
    if keep:
        reference.Reference.saved_like = lambda self, call, operands: [torch.empty_like(operands.x_TD)]
    try:
        yield calls
    finally:
        reference.Reference.forward, reference.Reference.saved_like = forward, saved_like


def test_activation_checkpointing():
    ranks.run(2, checkpointing, timeout=280)


def compiled_checkpointing() -> None:
    run = replace(RUN, layers=1, steps=1)
    eager = train(run)
    # Inductor's partitioner, which a memory budget is for, without its code generator, which needs a compiler.
    choose = compile._maybe_regional_inductor_backend
    compile._maybe_regional_inductor_backend = lambda model, backend: backend
    saved = []
    try:
        # A budget of a quarter: what is cheap runs again, and the layer, which is not, does not.
        for policy, times in (
            (None, 1),
            (MemoryBudgetAC.Config(memory_budget=0.25), 1),
            (FullAC.Config(), 2),
        ):
            torch._dynamo.reset()
            packed: list[None] = []
            with (
                counted_forwards(keep=True) as calls,
                torch._functorch.config.patch(activation_memory_budget=1.0),
                torch.autograd.graph.saved_tensors_hooks(lambda t, to=packed: (to.append(None), t)[1], lambda t: t),
            ):
                ours = train(replace(run, ac=policy, compile="aot_eager_decomp_partition"))
            saved.append(len(packed))
            assert len(calls) == times, policy
            assert ours.losses == pytest.approx(eager.losses, rel=1e-6)
            assert torch.equal(ours.expert_counts[0], eager.expert_counts[0])  # a compiled block counts once
            for name, grad in eager.grads.items():
                assert relative(ours.grads[name], grad) < 1e-5, (policy, name)
    finally:
        compile._maybe_regional_inductor_backend = choose
    assert saved[0] > saved[1] > saved[2], saved


def test_activation_checkpointing_of_compiled_blocks():
    ranks.run(2, compiled_checkpointing, timeout=280)


def typechecked() -> None:
    inner = FlexAttention.compiled_flex_attn

    # The checker does not know the operations of the CPU's attention: it is one local computation too.
    def attention(q, k, v, **settings):
        with spmd.no_typecheck():
            out = inner(q, k, v, **settings)
        if spmd.is_type_checking():
            spmd.assert_type_like(out[0], q)
        return out

    FlexAttention.compiled_flex_attn = staticmethod(attention)
    try:
        checked = train(replace(RUN, debug={"spmd_typechecking": True}))
    finally:
        FlexAttention.compiled_flex_attn = staticmethod(inner)
    assert checked.losses == train(RUN).losses


def test_passes_the_spmd_type_checker():
    ranks.run(2, typechecked, timeout=120)


def compiled() -> None:
    # Other lengths on each rank and in each step, and with them other rows for each expert.
    run = replace(RUN, steps=5, lengths=((32, 32), (24, 16), (16, 28), (20, 2), (32, 31)))
    eager = train(run)
    torch._dynamo.reset()
    counters.clear()
    ours = train(replace(run, compile="aot_eager"))
    assert ours.losses == eager.losses and ours.grad_norms == eager.grad_norms
    # One graph for all blocks, and one more, for any length, when the length first changes: then none.
    assert ours.graphs == [1, 2, 2, 2, 2]
    assert not counters["graph_break"]


def test_blocks_compile_once_for_any_number_of_tokens():
    ranks.run(2, compiled, timeout=280)


def test_what_the_package_says_is_heard_where_torchtitan_is(caplog):
    """The level of the notes on a configuration, which are always heard, is not the whole package's."""
    with caplog.at_level("INFO"):
        logging.getLogger("titan_mega_moe.op.backends").info("chosen")
    assert "chosen" in caplog.messages
