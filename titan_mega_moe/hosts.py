"""Which hosts the ranks of an expert-parallel group are on: the layer writes into their memory, over NVLink."""

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from titan_mega_moe.slurm import host_name


def crossing_reason(group: dist.ProcessGroup) -> str | None:
    """Why the ranks of `group`, to which this one belongs, are on more than one host, or None.

    Called on every rank of the group; they tell each other through the store, without a collective.
    """
    store, ranks = _get_default_store(), dist.get_process_group_ranks(group)
    store.set(f"host/{dist.get_rank()}", host_name())
    hosts = {rank: store.get(f"host/{rank}").decode() for rank in ranks}
    names = sorted(set(hosts.values()))
    if len(names) == 1:
        return None
    where = ", ".join(f"{name} (ranks {_spell([r for r in ranks if hosts[r] == name])})" for name in names)
    return f"an expert-parallel group is on {len(names)} hosts: {where}"


def remedy(ranks_per_host: int | None = None) -> str:
    """What to do about a group on several hosts."""
    degree = "a divisor of a host's ranks" if ranks_per_host is None else f"a divisor of {ranks_per_host}"
    return (
        f"make parallelism.expert_parallel_degree {degree} and number the ranks host by host "
        "(srun --distribution=block), or, where one NVLink domain spans the hosts, set mega_moe.across_hosts = true"
    )


def _spell(ranks: list[int]) -> str:
    """[0, 1, 2, 3] -> "0-3", [0, 2] -> "0, 2"."""
    whole = len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if whole else ", ".join(map(str, ranks))
