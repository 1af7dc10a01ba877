#!/usr/bin/env bash
# Train FILE.toml on NODES nodes: [VARIABLE=value ...] scripts/slurm/train.sh [--dry-run] FILE.toml [--section.key value ...]
set -euo pipefail
. "${TITAN_MEGA_MOE_SCRIPTS:-$(dirname "$0")}/common.sh"
[ -n "${SLURM_JOB_ID:-}" ] || submit -- "$@"
enter
train "$@"
