"""Memory of the fused kernels on one rank: allocated once, shared by all layers and both passes."""

import torch

from titan_mega_moe.op.backends import BufferPlan, group_size
from titan_mega_moe.op.symm_buffer import SymmBuffer, layout
from titan_mega_moe.op.triton.cuda import Launch
from titan_mega_moe.op.triton.routing import TILE, Scratch, Sizes

COLUMNS = 128  # of the kept g and u: gemm.cu's tiles of GATE_UP


def sizes_of(plan: BufferPlan) -> Sizes:
    ep_size = group_size(plan.group_name)
    return Sizes(ep_size, plan.max_tokens, plan.top_k, plan.num_experts // ep_size)


def kept_shapes(sizes: Sizes, hidden_dim: int) -> dict[str, tuple[int, int]]:
    """bf16 tensors that the forward leaves for a backward that does not recompute.

    gate_up: g and u in the order of the consumers' registers, F rounded up to whole tiles; scaled_h: s * h, [R, F].
    """
    columns = -(-hidden_dim // COLUMNS) * COLUMNS
    return {
        "gate_up": (sizes.rows, 2 * columns),
        "scaled_h": (sizes.rows, hidden_dim),
    }


def shapes(sizes: Sizes, plan: BufferPlan) -> dict[str, tuple[int, int]]:
    """bf16 tensors of the workspace.

    by_row serves in turn the experts' outputs (forward) and dx by row (backward), [R, D].
    """
    rows, F = sizes.rows, plan.hidden_dim
    own = {"by_row": (rows, plan.dim), "dgate": (rows, F), "dup": (rows, F)}
    return own if plan.keep == "activations" else own | kept_shapes(sizes, F)


def nbytes(plan: BufferPlan) -> int:
    """Bytes on each rank: symmetric buffer and workspace (not what layers keep for their backward)."""
    sizes = sizes_of(plan)
    _, symmetric = layout(sizes.ep_size, plan.max_tokens, plan.dim, plan.top_k)
    elements = sum(r * c for r, c in shapes(sizes, plan).values())
    return symmetric + 2 * elements + 4 * sizes.rows * (plan.hidden_dim // 64) + 4 * sizes.words


class Workspace:
    """A plan's symmetric buffer and workspace. Creating one is a collective over the plan's group."""

    by_row: torch.Tensor
    dgate: torch.Tensor
    dup: torch.Tensor
    # Only where a backward may have to recompute:
    gate_up: torch.Tensor
    scaled_h: torch.Tensor
    launches: dict[tuple[str, int], Launch]  # the backend fills them in

    def __init__(self, plan: BufferPlan) -> None:
        self.plan, self.sizes = plan, sizes_of(plan)
        self.symm = SymmBuffer.create(plan)
        self.scratch = Scratch(self.sizes, plan.device)
        for name, shape in shapes(self.sizes, plan).items():
            setattr(self, name, torch.empty(shape, dtype=torch.bfloat16, device=plan.device))
        self.dscores = torch.empty(plan.hidden_dim // 64, self.sizes.rows, dtype=torch.float32, device=plan.device)
        self.zeros = torch.zeros(plan.dim, dtype=torch.bfloat16, device=plan.device)
        self.side = torch.cuda.Stream(plan.device)
        assert self.sizes.rows % TILE == 0
