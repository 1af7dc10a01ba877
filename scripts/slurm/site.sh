# What differs from one cluster, account and job to another. Each can be given in the environment instead:
#   NODES=4 TIME=2:00:00 scripts/slurm/train.sh train_configs/qwen3_30b_a3b.toml
# shellcheck shell=bash disable=SC2034

: "${NODES=1}"
: "${GPUS_PER_NODE=8}"          # ranks a node; 0: a CPU job of TASKS_PER_NODE ranks a node
: "${TASKS_PER_NODE=$((GPUS_PER_NODE > 0 ? GPUS_PER_NODE : 1))}"
: "${GPU_REQUEST=--gpus-per-node=$GPUS_PER_NODE}" # where that is not understood: --gres=gpu:8
: "${TIME=24:00:00}"            # limit of the job
: "${STOP_BEFORE=300}"          # requeue.sh: seconds before the limit at which to save and stop: a step and a checkpoint
: "${PARTITION=}"               # sbatch --partition; empty: the site's default
: "${ACCOUNT=}"                 # sbatch --account
: "${QOS=}"                     # sbatch --qos
: "${EXCLUSIVE=1}"              # whole nodes, with all their CPUs; empty: share them
: "${SBATCH_ARGS=}"             # any more arguments of sbatch, e.g. "--constraint=h200 --mail-type=FAIL"
: "${SRUN_ARGS=}"               # any more arguments of the srun that starts the ranks, e.g. "--cpu-bind=none"
: "${LOGS=logs}"                # folder of the jobs' own logs; those of each node are in the run's dump_folder/ranks

: "${MODULES=}"                 # environment modules to load, e.g. "cuda/13.0 python/3.11"
: "${VENV=}"                    # virtual environment with titan_mega_moe, on a file system that all nodes see
: "${CONTAINER_ARGS=}"          # or a container, as srun's plug-in takes it, with its mounts:
                                 # "--container-image=/images/titan.sqsh --container-mounts=/data,/home"

# The interface that sockets use, where a host has several and its name leads to the wrong one. MASTER_ADDR names the
# first host to the others; by default it is the host name.
: "${SOCKET_INTERFACE=}"        # e.g. "bond0": NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME

# NCCL chooses well by itself, so nothing is set here. What is worth knowing when it does not (export them):
#   NCCL_DEBUG=INFO              says which network and transports are in use; "NET/Socket" on an InfiniBand cluster
#                                means that it was not found and that training will be slow
#   NCCL_IB_HCA=mlx5_0,mlx5_1    the adapters to use, where some belong to storage
#   NCCL_IB_GID_INDEX=3          RoCE: the index of the GID to use
#   NCCL_IB_TIMEOUT=22           longer waits on large or busy fabrics
#   NCCL_CROSS_NIC=1             rings may change rails; 0 keeps them on one in rail-optimised networks
#   NCCL_NVLS_ENABLE=0           leaves NVLink multicast off, where it fails to initialise
