# Sourced by the jobs beside it. Each of them submits itself when it runs outside a job, and works when inside.
# shellcheck shell=bash
here=${TITAN_MEGA_MOE_SCRIPTS:-$(cd "$(dirname "$0")" && pwd)}
. "$here/site.sh"

# submit SBATCH_ARGS... -- ARGS...: hand this script with ARGS to sbatch, or print that command for --dry-run. Exits.
submit() {
    local own=() dry=0
    while [ "$1" != -- ]; do own+=("$1"); shift; done
    shift
    if [ "${1:-}" = --dry-run ]; then dry=1; shift; fi
    if [ $# = 0 ] || [ "${1:0:1}" = - ]; then
        echo "usage: NODES=N $0 [--dry-run] FILE.toml [--section.key value ...]; variables: $here/site.sh" >&2
        exit 2
    fi
    local name; name=$(basename "$0" .sh)
    local command=(sbatch "--job-name=$name" "--nodes=$NODES" "--ntasks-per-node=$TASKS_PER_NODE" "--time=$TIME")
    [ "$GPUS_PER_NODE" = 0 ] || command+=("$GPU_REQUEST")
    [ -z "$PARTITION" ] || command+=("--partition=$PARTITION")
    [ -z "$ACCOUNT" ] || command+=("--account=$ACCOUNT")
    [ -z "$QOS" ] || command+=("--qos=$QOS")
    [ -z "$EXCLUSIVE" ] || command+=(--exclusive)
    # shellcheck disable=SC2206  # several arguments in one variable
    command+=("--output=$LOGS/%x-%j.log" "--export=ALL,TITAN_MEGA_MOE_SCRIPTS=$here" "${own[@]}" $SBATCH_ARGS)
    command+=("$here/$name.sh" "$@")
    if [ $dry = 1 ]; then
        printf '%q ' "${command[@]}"
        echo
        exit 0
    fi
    mkdir -p "$LOGS"
    exec "${command[@]}"
}

# What the job needs of its site.
enter() {
    # shellcheck disable=SC2086
    [ -z "$MODULES" ] || module load $MODULES
    # shellcheck disable=SC1091
    [ -z "$VENV" ] || . "$VENV/bin/activate"
    [ -z "$SOCKET_INTERFACE" ] || export NCCL_SOCKET_IFNAME=$SOCKET_INTERFACE GLOO_SOCKET_IFNAME=$SOCKET_INTERFACE
    export TITAN_MEGA_MOE_SRUN_ARGS=$SRUN_ARGS
}

# train ARGS...: `titan-mega-moe train ARGS` starts its ranks; in a container, which has no srun, srun does it here.
train() {
    if [ -z "$CONTAINER_ARGS" ]; then
        titan-mega-moe train "$@"
        return
    fi
    local gpus=() cpus=$((SLURM_CPUS_ON_NODE / TASKS_PER_NODE))
    [ "$GPUS_PER_NODE" = 0 ] || gpus=(--gpu-bind=none)
    # shellcheck disable=SC2086
    srun --ntasks-per-node="$TASKS_PER_NODE" --distribution=block --kill-on-bad-exit=1 --label \
        --cpus-per-task="$((cpus > 0 ? cpus : 1))" "${gpus[@]}" $SRUN_ARGS $CONTAINER_ARGS titan-mega-moe train "$@"
}
