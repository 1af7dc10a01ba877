"""Tables of what runs take on many GPUs, in Markdown, from the planner: no GPU is used.

    python scripts/plan.py --world-sizes 32,64,128 train_configs/qwen3_30b_a3b_multinode.toml [more files]
    python scripts/plan.py --start --world-sizes 8,64,1024 FILE [--section.key value ...]

The first gives mesh, global batch and memory per GPU of each file and number of GPUs. With --start, rank 0 of so many
is also started, on this CPU with TorchTitan's fake backend, for the time and host memory that it takes until its first
step: cut the model with --model.layers to what fits here.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomli

from titan_mega_moe import planner

GIB = 2**30
PLAN = ["model", "GPUs", "mesh", "global batch", "tokens a step", "parameters, gradients, optimizer", "activations"]
PLAN += ["buffers", "total, GiB"]
START = ["GPUs", "mesh", "largest checkpoint shard, GiB", "files a checkpoint", "planning, s", "start, s"]
START += ["host memory, GiB"]
CPU = ["--device.kind", "cpu", "--comm.mode", "fake_backend", "--training.steps", "1", "--training.seq_len", "128"]
CPU += ["--training.local_batch_size", "1", "--training.mixed_precision_param", "float32", "--mega_moe.backend", "auto"]
CPU += ["--training.disable_cuda_graphs", "--tokenizer.type", "StdlibTokenizer", "--dataloader.dataset", "stdlib"]
CPU += ["--parallelism.spmd_backend", "partial_dtensor", "--compile.no_enable"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-sizes", required=True, type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--start", action="store_true", help="start a rank of each size too")
    parser.add_argument("files", nargs="+", metavar="FILE")
    options, overrides = parser.parse_known_args()
    row(START if options.start else PLAN)
    row(["---"] + ["---:"] * (len(START if options.start else PLAN) - 1))
    for file in options.files:
        for ranks in options.world_sizes:
            begin = time.monotonic()
            plan = planner.make(file, overrides, ranks)
            seconds = time.monotonic() - begin
            row(started(file, overrides, plan, seconds) if options.start else planned(file, plan))


def planned(file: str, plan: planner.Plan) -> list[object]:
    table = tomli.loads(Path(file).read_text())
    model = f"{table['model']['name']} {table['model']['flavor']}"
    sequences = plan.mesh["batch"] * table["training"]["local_batch_size"]
    tokens = sequences * table["training"]["seq_len"]
    kept = plan.parameters + plan.gradients + plan.optimizer
    parts = [f"{(part or 0) / GIB:.1f}" for part in (kept, plan.activations, plan.buffers, plan.total)]
    return [model, plan.world_size, mesh(plan), sequences, f"{tokens:,}", *parts]


def started(file: str, overrides: list[str], plan: planner.Plan, planning: float) -> list[object]:
    ranks = plan.world_size
    variables = {"NGPU": str(ranks), "WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"}
    with tempfile.TemporaryDirectory() as folder:
        command = ["train", file, *overrides, *CPU, "--dump_folder", folder]
        begin = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "titan_mega_moe", *command],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        first, lines = 0.0, []
        for line in process.stdout:
            lines.append(line)
            if "Training starts at step" in line:
                first = time.monotonic() - begin
                process.kill()  # a step of this model on a CPU is of no interest
        _, _, used = os.wait4(process.pid, 0)
    if not first:
        sys.exit("".join(lines[-20:]))
    saved = f"{(plan.parameters + plan.optimizer) / GIB:.2f}"
    # One file a rank and the metadata: all ranks hold a part of every sharded tensor.
    memory = used.ru_maxrss * 1024 / GIB
    return [ranks, mesh(plan), saved, ranks + 1, f"{planning:.0f}", f"{first:.0f}", f"{memory:.1f}"]


def mesh(plan: planner.Plan) -> str:
    shown = ("pp", "dp_replicate", "fsdp", "dp_shard", "tp", "efsdp", "ep")
    axes = {axis: plan.mesh[axis] for axis in shown if axis in plan.mesh}
    if "dp_shard" in axes:
        axes.pop("fsdp", None)
    return ", ".join(f"{axis} {size}" for axis, size in axes.items())


def row(cells: list[object] | list[str]) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":  # the planner starts processes that import this file
    main()
