"""The symmetric buffer of an expert-parallel group: one allocation a rank, which every peer can read and write.

One buffer serves all layers and both passes. What may be overwritten when: a rank sends rows of call n + 1 only once
the peer has begun that call, so has ended n; the rest it writes only once it ended n itself, for which every peer had
to return its sums of n, so had read what they needed of it.

    region     shape                   written by                          read by
    recv       [X | DY, EP, t_max, D]  peers, dispatch of x and of dy      this rank's gather
    sums       [EP, t_max, D]          peers, each token's partial sum     this rank's last addition
    ids        [EP, t_max, K] int32    peers, the expert ids               this rank's routing
    scores     [EP, t_max, K] float32  peers, the router scores            this rank's routing
    dscores    [t_max, K] float32      peers, the scores' gradients        this rank's last addition
    tokens     [EP] int32              peers, their number of tokens       this rank's routing
    routed, landed, returned  int32 flags, by ring distance of the writer: the epoch (number of the call) of
               the last ids (in a backward, which sends none: that it began), rows, sums that are complete here.
               landed has one row for x, one for dy.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName

from titan_mega_moe.op.backends import BufferPlan, group_of

_ALIGNMENT = 1024
# Why a kernel gave up: the first four are gemm.cu's Phase.
NONE, ROUTING, DISPATCH, COMBINE, TOKENS, IDS, START = range(7)
X, DY = range(2)  # the two parts of recv
# In a first step each rank compiles and tunes at its own pace: TorchTitan's collectives wait as long then.
FIRST_TIMEOUT_SECONDS, TIMEOUT_SECONDS = 300, 60


@dataclass(frozen=True)
class Region:
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def subs_of(t_max: int) -> int:
    """Flags of a rank's returned sums: one for SUB tokens (gemm.cu)."""
    return -(-t_max // 1024)


def layout(ep_size: int, t_max: int, dim: int, top_k: int) -> tuple[dict[str, Region], int]:
    """Regions by name, and the buffer's bytes."""
    sources = ep_size if ep_size > 1 else 0  # nothing comes where there are no peers
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "recv": ((2, sources, t_max, dim), torch.bfloat16),
        "sums": ((sources, t_max, dim), torch.bfloat16),
        "ids": ((ep_size, t_max, top_k), torch.int32),
        "scores": ((ep_size, t_max, top_k), torch.float32),
        "dscores": ((t_max, top_k), torch.float32),
        "tokens": ((ep_size,), torch.int32),
        "routed": ((ep_size,), torch.int32),
        "landed": ((2, ep_size), torch.int32),
        "returned": ((ep_size, subs_of(t_max)), torch.int32),
    }
    regions, offset = {}, 0
    for name, (shape, dtype) in wanted.items():
        regions[name] = Region(offset, shape, dtype)
        offset += -(-regions[name].nbytes // _ALIGNMENT) * _ALIGNMENT
    return regions, offset


class SymmBuffer:
    """A group's buffer on this rank's device, with views of the peers'.

    memories: every rank's buffer, as bytes, this rank's at `rank`; zeros.
    """

    def __init__(self, memories: list[torch.Tensor], rank: int, t_max: int, dim: int, top_k: int) -> None:
        self._memories, self.rank, self.ep_size = memories, rank, len(memories)
        self.t_max, self.dim, self.top_k = t_max, dim, top_k
        self._views: dict[tuple[str, int], torch.Tensor] = {}
        self._mapping: object = None  # the peers' memory stays mapped while it lives
        self.timeout_seconds = FIRST_TIMEOUT_SECONDS  # of every wait for a peer
        self.shares_gpu = False  # whether ranks of the group take turns on a GPU
        self.regions, self.nbytes = layout(self.ep_size, t_max, dim, top_k)
        device = memories[rank].device
        self.peers = torch.tensor([m.data_ptr() for m in memories], dtype=torch.int64, device=device)
        self.epoch = torch.zeros(1, dtype=torch.int32, device=device)
        # Host memory that kernels write when they give up: phase, ring distance, epoch wanted, epoch seen.
        self.error = torch.zeros(4, dtype=torch.int32, pin_memory=device.type == "cuda")

    @classmethod
    def create(cls, plan: BufferPlan) -> "SymmBuffer":
        """Allocates. A collective over the plan's group; EP=1 has no peers and takes ordinary memory.

        Raises RuntimeError when the ranks cannot map each other's memory (different hosts, no peer access).
        """
        group = group_of(plan.group_name)
        ep_size, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        _, nbytes = layout(ep_size, plan.max_tokens, plan.dim, plan.top_k)
        if group is None:
            memories, mapping = [torch.zeros(nbytes, dtype=torch.uint8, device=plan.device)], None
        else:
            memories, mapping = _rendezvous(nbytes, plan, group)
        buffer = cls(memories, rank, plan.max_tokens, plan.dim, plan.top_k)
        buffer._mapping = mapping
        if group is not None and plan.device.type == "cuda":
            gpus: list[str] = [""] * ep_size
            dist.all_gather_object(gpus, str(torch.cuda.get_device_properties(plan.device).uuid), group)
            buffer.shares_gpu = len(set(gpus)) < ep_size
        return buffer

    def view(self, name: str, rank: int | None = None) -> torch.Tensor:
        """A region of a rank's buffer (this rank's by default) in its shape."""
        key = name, self.rank if rank is None else rank
        if key not in self._views:  # kept, as every call asks for several
            region, memory = self.regions[name], self._memories[key[1]]
            bytes_ = memory[region.offset : region.offset + region.nbytes]
            self._views[key] = bytes_.view(region.dtype).view(region.shape)
        return self._views[key]

    def send(self, rows_TD: torch.Tensor, part: int) -> None:
        """Copies this rank's rows into the part X or DY of every peer's recv, nearest writer first, each followed by
        its flag.

        Plain copies on the current stream: the copy engines move them and no multiprocessor is held. A peer sees its
        flag only after the rows, since one stream's copies complete in order.
        """
        for distance in range(1, self.ep_size):
            peer = (self.rank - distance) % self.ep_size
            self.view("recv", peer)[part, self.rank, : rows_TD.shape[0]].copy_(rows_TD, non_blocking=True)
            self.view("landed", peer)[part, distance].copy_(self.epoch[0], non_blocking=True)

    def check(self) -> None:
        """Raises RuntimeError if a kernel of an earlier call gave up waiting. Reads host memory, never waits."""
        phase, distance, wanted, seen = self.error.tolist()
        if phase == NONE:
            return
        peer = (self.rank + distance) % self.ep_size
        if phase == TOKENS:
            raise RuntimeError(
                f"mega_moe: rank {peer} of the expert-parallel group has {seen} tokens, but the buffers of rank "
                f"{self.rank} hold {self.t_max}; set [mega_moe] max_tokens to the largest number of tokens of a rank"
            )
        if phase == IDS:
            raise RuntimeError(
                f"mega_moe: rank {self.rank} of the expert-parallel group got expert id {seen}; ids go from 0 to "
                f"{wanted - 1}, and -1 stands for no expert: look at the router, or at NaN in what it got"
            )
        what = {ROUTING: "expert ids", DISPATCH: "dispatched rows", COMBINE: "combined sums", START: "start"}[phase]
        raise RuntimeError(
            f"mega_moe: rank {self.rank} of the expert-parallel group waited {self.timeout_seconds} s for the {what} "
            f"of rank {peer} (call {wanted}, the last that came was {seen}); look at that rank's log for an earlier "
            "error, and at whether every rank makes the same calls in the same order"
        )


def _rendezvous(nbytes: int, plan: BufferPlan, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], object]:
    import torch.distributed._symmetric_memory as symm_mem

    memory = symm_mem.empty(nbytes, dtype=torch.uint8, device=plan.device)
    try:
        mapping = symm_mem.rendezvous(memory, GroupName(plan.group_name))
        memories = [mapping.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size())]
    except RuntimeError as error:
        raise RuntimeError(
            f"mega_moe: the {group.size()} ranks of group {plan.group_name!r} cannot map each other's memory "
            f"({error}); expert parallelism has to stay within one host's NVLink domain"
        ) from error
    memories[group.rank()] = memory
    memory.zero_()
    torch.cuda.synchronize(plan.device)
    dist.barrier(group)  # no peer may write flags before they are zero
    return memories, mapping
