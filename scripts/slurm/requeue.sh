#!/usr/bin/env bash
# As train.sh, for runs longer than a job may be, and on nodes that may be taken away. STOP_BEFORE seconds before the limit
# SLURM signals the ranks; it does so too (SIGTERM) when it preempts the job. They finish their step, write a checkpoint and
# end with exit code 75. The job then puts itself back into the queue, with the same id, and goes on from the checkpoint.
# Any other exit code is the end.
set -euo pipefail
. "${TITAN_MEGA_MOE_SCRIPTS:-$(dirname "$0")}/common.sh"
[ -n "${SLURM_JOB_ID:-}" ] || submit --requeue --open-mode=append "--signal=USR1@$STOP_BEFORE" -- "$@"
enter
trap : USR1 TERM # the ranks' business: this shell has to see them end
code=0
train "$@" --checkpoint.enable || code=$?
if [ $code = 75 ]; then
    echo "job $SLURM_JOB_ID goes back into the queue (restarts so far: ${SLURM_RESTART_COUNT:-0})"
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # SLURM ends this script, and would count it as finished if it came first
fi
exit $code
