"""What TorchTitan offers to watch a training with works with the layer: validation, profiler, TensorBoard, W&B."""

import gzip
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import Validator
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer
from wandb.proto import wandb_internal_pb2

from tests import ranks
from tests.training import Ramps, Run, local, record, upstream, upstream_casts
from tests.training import config as settings_of
from titan_mega_moe.metrics import RecordedMetrics

RUN = Run(
    layers=2,
    hidden_dim=32,
    steps=4,
    training={"global_batch_size": 4},
    parallelism={"expert_parallel_degree": 2, "spmd_backend": "partial_dtensor"},
)
VALIDATED = "validation_metrics/loss"


class Padded(Ramps):
    """A third of each sequence is padding: its labels are TorchTitan's IGNORE_INDEX."""

    @dataclass(kw_only=True, slots=True)
    class Config(Ramps.Config):
        infinite: bool = True

    def __iter__(self):
        for inputs, labels in super().__iter__():
            labels = labels.clone()
            labels[:, -(labels.shape[1] // 3) :] = IGNORE_INDEX
            yield inputs, labels


def watched(run: Run, folder: str, validate: bool, watch: bool):
    """Losses, validation losses, tokens of each expert a step (this rank's), and the bias in the end."""
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    settings = settings_of(run, folder)
    settings.dataloader = Padded.Config()
    settings.validator = Validator.Config(enable=validate, freq=2, steps=2, dataloader=Padded.Config())
    settings.metrics = RecordedMetrics.Config(log_freq=1, enable_tensorboard=watch, enable_wandb=watch)
    settings.profiler = Profiler.Config(enable_profiling=watch, profile_freq=3, profiler_warmup=1, profiler_active=1)
    counts = []

    class Counting(Trainer):
        def __init__(self, config):
            super().__init__(config)
            moes = [block.moe for part in self.model_parts for block in part.layers.values()]
            handle = self.optimizers.register_step_pre_hook(
                lambda *_: counts.append(torch.stack([local(moe.tokens_per_expert_E) for moe in moes]).clone())
            )
            self.optimizers._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # the next one zeroes them

    with upstream_casts(False):
        result = record(settings, Counting)
    lines = Path(folder, "records", f"rank_{torch.distributed.get_rank()}.jsonl").read_text().splitlines()
    validation = {line["step"]: line[VALIDATED] for line in map(json.loads, lines) if VALIDATED in line}
    return result.losses, validation, counts, result.expert_bias


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    ours = ranks.run(2, watched, RUN, str(folder), True, True, timeout=240)
    return folder, ours


def test_padding_is_counted_as_torchtitan_does_and_validation_is_not(trained, tmp_path):
    """TorchTitan routes padding like any token and counts it; its validator's tokens change neither counts nor bias."""
    theirs = ranks.run(2, watched, upstream(RUN), str(tmp_path / "upstream"), True, False, timeout=240)
    without = ranks.run(2, watched, RUN, str(tmp_path / "without"), False, False, timeout=240)
    for ours, upstreams, plain in zip(trained[1], theirs, without, strict=True):
        losses, validation, counts, bias = ours
        assert len(losses) == len(counts) == 4 and losses == pytest.approx(upstreams[0], rel=1e-5)
        assert list(validation) == [1, 2, 4] and validation == pytest.approx(upstreams[1], rel=1e-5)
        assert losses == plain[0] and not plain[1]
        assert all(map(torch.equal, counts, plain[2])) and all(map(torch.equal, bias, plain[3]))
        # Beside upstream's layer later steps differ by rounding, where two experts have nearly one score.
        assert torch.equal(counts[0], upstreams[2][0]) and all(map(torch.equal, bias, upstreams[3]))
        assert all((a - b).abs().sum() <= 6 for a, b in zip(counts, upstreams[2], strict=True))
        # Two microbatches a step, of one row of 32 tokens each, to 8 experts a token.
        assert all((step.sum(1) == 2 * 32 * 8).all() for step in counts)
        assert len(bias) == 2 and all(b.any() for b in bias)


def test_tensorboard_and_wandb_get_the_load_of_each_step(trained):
    folder, ((losses, validation, _, _), _) = trained
    (events,) = folder.glob("tb/*/events.out.tfevents.*")
    accumulator = EventAccumulator(str(events)).Reload()

    def scalars(name):
        return {event.step: event.value for event in accumulator.Scalars(name)}

    (file,) = folder.glob("tb/*/wandb/offline-run-*/run-*.wandb")
    online = dict(histories(file))
    load = scalars("moe/expert_load(max/mean)")
    assert list(load) == [1, 2, 3, 4] and all(1 < x < 64 for x in load.values())
    for name, expected in {
        "loss_metrics/global_avg_loss": dict(enumerate(losses, 1)),
        VALIDATED: validation,
        "moe/expert_load(max/mean)": load,
        "moe/layer_1/expert_load(max/mean)": scalars("moe/layer_1/expert_load(max/mean)"),
    }.items():
        assert scalars(name) == pytest.approx(expected, rel=1e-6), name
        assert {step: row[name] for step, row in online.items() if name in row} == pytest.approx(expected, rel=1e-6)


def histories(file):
    """(step, metrics) of an offline run's file: a LevelDB log of W&B's protobufs behind a header of seven bytes."""
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # the rest of a block in which no record fits
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            found, whole = wandb_internal_pb2.Record.FromString(whole), b""
            if found.WhichOneof("record_type") == "history":
                row = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in found.history.item
                }
                yield row["_step"], row


def test_the_profiler_writes_every_ranks_step_with_the_layer_in_it(trained):
    folder, _ = trained
    for rank in (0, 1):
        trace = folder / "profiling" / "traces" / "iteration_3" / f"rank{rank}_trace.json.gz"
        names = [event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
        for phase in ("dispatch", "experts", "combine"):
            # Two layers, two microbatches: forward, at least.
            assert names.count(f"mega_moe::{phase}") >= 4, phase
