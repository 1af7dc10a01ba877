#!/usr/bin/env bash
# Train the small Qwen3 MoE of train_configs/debug_cpu.toml on two CPU processes, with the layer and with
# TorchTitan's own, and show the losses side by side. Arguments are those of `titan-mega-moe compare`.
set -euo pipefail
. "$(dirname "$0")/setup.sh"
setup ''
exec titan-mega-moe compare train_configs/debug_cpu.toml "$@"
