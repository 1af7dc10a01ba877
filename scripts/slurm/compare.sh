#!/usr/bin/env bash
# Train FILE.toml with the layer and with TorchTitan's own, one after the other in one allocation, and compare:
#   [VARIABLE=value ...] scripts/slurm/compare.sh [--dry-run] FILE.toml [options of titan-mega-moe compare]
set -euo pipefail
. "${TITAN_MEGA_MOE_SCRIPTS:-$(dirname "$0")}/common.sh"
if [ -n "$CONTAINER_ARGS" ]; then
    echo "compare.sh starts ranks more than once, which needs srun beside it: set VENV instead of CONTAINER_ARGS" >&2
    exit 2
fi
[ -n "${SLURM_JOB_ID:-}" ] || submit -- "$@"
enter
titan-mega-moe compare "$@"
