"""What the op means, in torch collectives and matmuls: one all-to-all row per (token, slot), one matmul per
expert.

Operands of every matmul are rounded to compute_dtype; everything between them, and every sum, is float32
(float64 when compute_dtype is). No sum depends on timing, so results repeat bit for bit. It keeps nothing
for the backward, which sends x and dy together and computes g and u again, whatever `keep` says. It waits
for the row counts on the host.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from titan_mega_moe.op.backends import BufferPlan, Call, Operands
from titan_mega_moe.op.ranges import phase


@dataclass(frozen=True)
class _Routing:
    """Where rows go. Rows leave sorted by expert, so by rank, and are sorted by local expert on arrival."""

    group: dist.ProcessGroup | None
    slot_N: torch.Tensor  # flat (token, slot) of each sent row
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    arrival_R: torch.Tensor  # arrival position of each expert-sorted row
    rows_e: list[int]  # rows of each local expert

    @staticmethod
    def build(call: Call, ids_TK: torch.Tensor) -> "_Routing":
        ids = ids_TK.reshape(-1)
        _check_ids(ids, call.num_experts)
        order = torch.argsort(ids, stable=True)
        slot_N = order[(ids < 0).sum() :]
        e = call.num_experts // call.ep_size
        sent_EPe = torch.bincount(ids[slot_N], minlength=call.num_experts).view(call.ep_size, e)
        received_EPe = torch.empty_like(sent_EPe)
        if call.group is None:
            received_EPe = sent_EPe
        else:
            dist.all_to_all_single(received_EPe, sent_EPe, group=call.group)
        experts = torch.arange(e, device=ids.device).repeat(call.ep_size)
        return _Routing(
            group=call.group,
            slot_N=slot_N,
            sent=sent_EPe.sum(1).tolist(),
            received=received_EPe.sum(1).tolist(),
            arrival_R=torch.argsort(experts.repeat_interleave(received_EPe.view(-1)), stable=True),
            rows_e=received_EPe.sum(0).tolist(),
        )

    def dispatch(self, rows_N: torch.Tensor) -> torch.Tensor:
        """(N, ...) rows in this rank's order -> (R, ...) rows of this rank's experts, sorted by expert."""
        return self._exchange(rows_N, self.sent, self.received)[self.arrival_R]

    def combine(self, rows_R: torch.Tensor) -> torch.Tensor:
        """The way back: (R, ...) rows of this rank's experts -> (N, ...) rows in this rank's order."""
        arrived = torch.empty_like(rows_R)
        arrived[self.arrival_R] = rows_R
        return self._exchange(arrived, self.received, self.sent)

    def _exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        if self.group is None:
            return rows
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.group)
        return out

    def to_slots(self, rows_N: torch.Tensor, T: int, K: int) -> torch.Tensor:
        """(N, ...) rows -> (T, K, ...), zero where a slot has no expert."""
        slots = rows_N.new_zeros(T * K, *rows_N.shape[1:])
        slots[self.slot_N] = rows_N
        return slots.view(T, K, *rows_N.shape[1:])


class Reference:
    name = "reference"

    def unavailable_reason(self, device: torch.device) -> str | None:
        return None

    def prepare(self, plan: BufferPlan) -> None:
        """Nothing to allocate: every row buffer is as large as the rows of the call."""

    def release(self, plan: BufferPlan) -> None:
        """Nothing was allocated."""

    def buffer_bytes(self, plan: BufferPlan) -> int:
        return 0

    def check(self, wait: bool) -> None:
        """Collectives raise by themselves."""

    def saved_like(self, call: Call, operands: Operands) -> list[torch.Tensor]:
        return []

    def forward(self, call: Call, operands: Operands) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x_TD, ids_TK, scores_TK, w1_eFD, w2_eDF, w3_eFD = operands
        T, K = ids_TK.shape
        with phase("dispatch"):
            routing = _Routing.build(call, ids_TK)
            x_RD = routing.dispatch(x_TD.to(call.compute_dtype)[routing.slot_N // K])
        with phase("experts"):
            o_RD = x_RD.new_empty(x_RD.shape, dtype=_wide(call))
            start = 0
            for i, rows in enumerate(routing.rows_e):
                r = slice(start, start := start + rows)
                x, w1, w2, w3 = (_operand(call, t) for t in (x_RD[r], w1_eFD[i], w2_eDF[i], w3_eFD[i]))
                h = F.silu(x @ w1.T) * (x @ w3.T)
                o_RD[r] = _operand(call, h) @ w2.T
        with phase("combine"):
            o_TKD = routing.to_slots(routing.combine(o_RD), T, K)
            # A slot without an expert adds nothing, whatever its score is.
            y_TD = (o_TKD * scores_TK.masked_fill(ids_TK < 0, 0).unsqueeze(-1)).sum(1)
        return y_TD.to(x_TD.dtype), []

    def backward(
        self, call: Call, dy_TD: torch.Tensor, operands: Operands, saved: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        x_TD, ids_TK, scores_TK, w1_eFD, w2_eDF, w3_eFD = operands
        T, K = ids_TK.shape
        with phase("dispatch"):
            routing = _Routing.build(call, ids_TK)
            token_N = routing.slot_N // K
            x_RD, dy_RD = (routing.dispatch(t.to(call.compute_dtype)[token_N]) for t in (x_TD, dy_TD))
            s_R1 = routing.dispatch(scores_TK.reshape(-1, 1)[routing.slot_N]).to(_wide(call))
        with phase("experts"):
            dx_RD = x_RD.new_empty(x_RD.shape, dtype=_wide(call))
            ds_R = s_R1.new_empty(s_R1.shape[0])
            dw1_eFD, dw2_eDF, dw3_eFD = (t.new_empty(t.shape) for t in (w1_eFD, w2_eDF, w3_eFD))
            start = 0
            for i, rows in enumerate(routing.rows_e):
                r = slice(start, start := start + rows)
                x, dy, w1, w2, w3 = (_operand(call, t) for t in (x_RD[r], dy_RD[r], w1_eFD[i], w2_eDF[i], w3_eFD[i]))
                g, u, s = x @ w1.T, x @ w3.T, s_R1[r]
                sig = torch.sigmoid(g)
                silu = g * sig
                h = silu * u
                dh_unscaled = dy @ w2
                dh = s * dh_unscaled
                ds_R[r] = (h * dh_unscaled).sum(1)
                dg = _operand(call, dh * u * sig * (1 + g * (1 - sig)))
                du = _operand(call, dh * silu)
                dw2_eDF[i] = dy.T @ _operand(call, s * h)
                dw1_eFD[i] = dg.T @ x
                dw3_eFD[i] = du.T @ x
                dx_RD[r] = dg @ w1 + du @ w3
        with phase("combine"):
            dx_TD = routing.to_slots(routing.combine(dx_RD), T, K).sum(1)
            ds_TK = routing.to_slots(routing.combine(ds_R), T, K)
        return dx_TD.to(x_TD.dtype), ds_TK.to(scores_TK.dtype), dw1_eFD, dw2_eDF, dw3_eFD


def _wide(call: Call) -> torch.dtype:
    return torch.promote_types(call.compute_dtype, torch.float32)


def _operand(call: Call, t: torch.Tensor) -> torch.Tensor:
    """A matmul's operand: rounded to compute_dtype, held wide so that products are exact and sums float32."""
    return t.to(call.compute_dtype).to(_wide(call))


def _check_ids(ids: torch.Tensor, num_experts: int) -> None:
    if ids.numel() == 0:
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < -1 or high >= num_experts:
        wrong = low if low < -1 else high
        raise ValueError(f"mega_moe: expert id {wrong} is outside [-1, {num_experts}); -1 means no expert in that slot")


BACKEND = Reference()
