"""The fused backend's forward and backward: which kernel runs when, on what.

Shape suffixes as in op/__init__.py; R rows are padded and counted for the worst routing (workspace.py).

    main stream   publish count scan tiles place | gate_up ............. | down ............... | combine
    side stream                 send x to every peer (copy engines)        (sums go to the peers)

    main stream   begin meet | down_backward | gate_up_backward .. | weight_grad_down | weight_grad_gate_up
    side stream                send dy, x to every peer  (sums go to the peers)

Rows are sent once every peer has begun the call: by then it has ended the one before, and read all of that. The two
streams meet before either pass returns.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from titan_mega_moe.op.backends import BufferPlan, Call, Operands, group_of
from titan_mega_moe.op.ranges import phase
from titan_mega_moe.op.symm_buffer import DY, TIMEOUT_SECONDS, SymmBuffer, X
from titan_mega_moe.op.triton import cuda, routing
from titan_mega_moe.op.triton.cuda import Launch
from titan_mega_moe.op.triton.routing import Sizes, Tables
from titan_mega_moe.op.triton.workspace import Workspace, kept_shapes, nbytes, sizes_of

MULTIPLE = 64  # of D and F: one 128-byte row of a shared-memory box
MAX_TOP_K = 32  # a warp's lanes hold a token's slots
MAX_GROUP = 32

Tensors = tuple[torch.Tensor, ...]


class FusedBackend:
    name = "triton"

    def __init__(self) -> None:
        self._workspaces: dict[tuple, Workspace] = {}

    def unavailable_reason(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"its kernels need an NVIDIA Hopper GPU, the device is {device.type}"
        if not torch.cuda.is_available():
            return "its kernels need an NVIDIA Hopper GPU, and torch sees no GPU"
        capability = torch.cuda.get_device_capability(device)
        if capability[0] != 9:
            return (
                "its kernels are for Hopper (compute capability 9.0), this GPU "
                f"({torch.cuda.get_device_name(device)}) has {capability[0]}.{capability[1]}"
            )
        try:
            from cuda.bindings import driver, nvrtc  # noqa: F401
        except ImportError as error:
            return f"it compiles with NVRTC through cuda-bindings, which cannot be imported ({error})"
        return None

    def forward(self, call: Call, operands: Operands) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x_TD, ids_TK, scores_TK, w1_eFD, w2_eDF, w3_eFD = operands
        work = self._workspace(call, x_TD, ids_TK, w1_eFD)
        work.symm.check()
        x, w1, w2, w3 = _bf16(x_TD, w1_eFD, w2_eDF, w3_eFD)
        ids = ids_TK.contiguous()
        saved = self.saved_like(call, operands)
        tables = Tables(saved[0], work.sizes)
        with phase("routing"):
            routing.announce(work.symm, work.scratch, work.sizes, ids, scores_TK.float().contiguous())
        if x.shape[0] > work.symm.t_max:  # the peers know now, and stop too
            raise ValueError(
                f"mega_moe: {x.shape[0]} tokens, but the buffers were made for at most {work.symm.t_max}; "
                "set [mega_moe] max_tokens to the largest number of tokens of a rank"
            )
        with phase("routing"):
            routing.receive(work.symm, work.scratch, work.sizes)
        sent = _send(work, {X: x})
        with phase("routing"):
            routing.build(work.symm, work.scratch, tables, work.sizes)
        kept = saved[1:] if call.keep == "activations" else None
        scaled_h = _gate_up(work, tables, x, w1, w3, kept)
        _launch(
            work, "down", tables, a0=(scaled_h, (128, 64)), b0=(w2, (1, 128, 64)), c0=(work.by_row, (16, 64)),
            partial_rows=work.by_row,
        )  # fmt: skip
        y = torch.empty_like(x)
        _launch(work, "combine", tables, partial_rows=work.by_row, ids=ids, out=y, dscores_out=0, backward=0)
        if sent is not None:
            torch.cuda.current_stream(x.device).wait_event(sent)
        return y.to(x_TD.dtype), saved

    def saved_like(self, call: Call, operands: Operands) -> list[torch.Tensor]:
        x_TD, ids_TK, w1_eFD = operands.x_TD, operands.ids_TK, operands.w1_eFD
        planned = self._workspaces.get(_key(call, x_TD, ids_TK, w1_eFD))
        t_max = planned.plan.max_tokens if planned is not None else x_TD.shape[0]
        sizes = Sizes(call.ep_size, t_max, ids_TK.shape[1], w1_eFD.shape[0])
        saved = [x_TD.new_empty(sizes.words, dtype=torch.int32)]
        if call.keep == "activations":
            shapes = kept_shapes(sizes, w1_eFD.shape[1]).values()
            saved += [x_TD.new_empty(shape, dtype=torch.bfloat16) for shape in shapes]
        return saved

    def backward(self, call: Call, dy_TD: torch.Tensor, operands: Operands, saved: list[torch.Tensor]) -> Tensors:
        x_TD, ids_TK, scores_TK, w1_eFD, w2_eDF, w3_eFD = operands
        work = self._workspace(call, x_TD, ids_TK, w1_eFD)
        if call.keep == "inputs" and work.plan.keep != "inputs":
            raise RuntimeError(
                'mega_moe: the buffers were made for keep="activations", this backward has to recompute; '
                "pass the same keep to prepare and to the layer"
            )
        work.symm.check()
        dy, x, w1, w2, w3 = _bf16(dy_TD, x_TD, w1_eFD, w2_eDF, w3_eFD)
        tables = Tables(saved[0], work.sizes)
        with phase("routing"):
            routing.begin_call(work.symm, work.scratch)
            # Not beside the products: their blocks leave no registers for a kernel that they wait for in the end.
            routing.meet_peers(work.symm, work.scratch)
        if call.keep == "inputs":
            sent = _send(work, {X: x, DY: dy})
            gate_up, scaled_h = work.gate_up, _gate_up(work, tables, x, w1, w3, [work.gate_up, work.scaled_h])
        else:
            sent = _send(work, {DY: dy, X: x})  # x is for the weight gradients, which come last
            gate_up, scaled_h = saved[1:]
        rows = work.by_row
        _launch(
            work, "down_backward", tables, part=DY, own=dy, b0=(w2, (1, 64, 64)),
            c0=(work.dgate, (16, 64)), c1=(work.dup, (16, 64)), gate_up=gate_up,
        )  # fmt: skip
        dx = torch.empty_like(x)
        dscores = torch.empty(scores_TK.shape, dtype=torch.float32, device=x.device)
        dw1, dw2, dw3 = (torch.empty_like(w, memory_format=torch.contiguous_format) for w in (w1, w2, w3))
        _launch(
            work, "gate_up_backward", tables, a0=(work.dgate, (128, 64)), a1=(work.dup, (128, 64)),
            b0=(w1, (1, 64, 64)), b1=(w3, (1, 64, 64)), c0=(rows, (16, 64)),
            partial_rows=rows, backward=1,
        )  # fmt: skip
        if work.symm.ep_size > 1:
            _launch(work, "combine_rest", tables, partial_rows=rows, backward=1)
        box, out = (64, 64), (1, 64, 64)
        _launch(work, "weight_grad_down", tables, part=DY, own=dy, b0=(scaled_h, box), c0=(dw2, (1, 16, 64)))
        _launch(
            work, "weight_grad_gate_up", tables, own=x, b0=(work.dgate, box), b1=(work.dup, box),
            c0=(dw1, out), c1=(dw3, out),
        )  # fmt: skip
        ids = ids_TK.contiguous()
        _launch(work, "combine", tables, partial_rows=rows, ids=ids, out=dx, dscores_out=dscores, backward=1)
        if sent is not None:
            torch.cuda.current_stream(x.device).wait_event(sent)
        like = (x_TD, scores_TK, w1_eFD, w2_eDF, w3_eFD)
        return tuple(g.to(t.dtype) for g, t in zip((dx, dscores, dw1, dw2, dw3), like, strict=True))

    def prepare(self, plan: BufferPlan) -> None:
        key = _plan_key(plan)
        have = self._workspaces.get(key)
        if have is not None and have.plan.max_tokens >= plan.max_tokens and have.plan.keep in (plan.keep, "inputs"):
            return
        if have is not None:  # what was planned before must still fit
            keep = "inputs" if "inputs" in (plan.keep, have.plan.keep) else plan.keep
            plan = replace(plan, max_tokens=max(plan.max_tokens, have.plan.max_tokens), keep=keep)
        _check_plan(plan)
        work = self._workspaces[key] = Workspace(plan)
        work.launches = _launches(work)
        self._compile(plan)

    def release(self, plan: BufferPlan) -> None:
        if self._workspaces.pop(_plan_key(plan), None) is None:
            return
        torch.cuda.synchronize(plan.device)
        if (group := group_of(plan.group_name)) is not None:
            dist.barrier(group)

    def symm_buffer(self, plan: BufferPlan) -> SymmBuffer:
        """The buffer that `prepare` made for the plan's group and shapes."""
        return self._workspaces[_plan_key(plan)].symm

    def buffer_bytes(self, plan: BufferPlan) -> int | None:
        return nbytes(plan)

    def check(self, wait: bool) -> None:
        for work in self._workspaces.values():
            if wait:
                torch.cuda.synchronize(work.plan.device)
            else:
                work.symm.timeout_seconds = TIMEOUT_SECONDS
            work.symm.check()

    def _compile(self, plan: BufferPlan) -> None:
        """Runs the op once without tokens, so that no rank compiles while another waits for its flags."""
        group = group_of(plan.group_name)
        if group is not None:
            dist.barrier(group)
        call = Call(plan.num_experts, plan.group_name, torch.bfloat16, plan.keep)
        e = sizes_of(plan).local_experts
        x = torch.zeros(0, plan.dim, dtype=torch.bfloat16, device=plan.device)
        ids = torch.zeros(0, plan.top_k, dtype=torch.int64, device=plan.device)
        scores = torch.zeros(0, plan.top_k, dtype=torch.float32, device=plan.device)
        w1, w3 = (x.new_zeros(e, plan.hidden_dim, plan.dim) for _ in range(2))
        w2 = x.new_zeros(e, plan.dim, plan.hidden_dim)
        operands = Operands(x, ids, scores, w1, w2, w3)
        _, saved = self.forward(call, operands)
        self.backward(call, x, operands, saved)
        torch.cuda.synchronize(plan.device)
        if group is not None:
            dist.barrier(group)

    def _workspace(self, call: Call, x: torch.Tensor, ids: torch.Tensor, w1: torch.Tensor) -> Workspace:
        """The workspace of the call's group and shapes; made here, once, for a layer that nobody planned."""
        if call.compute_dtype != torch.bfloat16:
            raise ValueError(
                f"mega_moe: the triton backend computes in bfloat16, not {call.compute_dtype}; "
                'set compute_dtype = "bfloat16" '
                'or backend = "reference"'
            )
        key = _key(call, x, ids, w1)
        if key not in self._workspaces:
            most = torch.tensor(x.shape[0], device=x.device)
            if call.group is not None:
                dist.all_reduce(most, dist.ReduceOp.MAX, call.group)
            self.prepare(
                BufferPlan(call.group_name, x.device, max(1, int(most)), x.shape[1], w1.shape[1], call.num_experts,
                           ids.shape[1], call.keep)
            )  # fmt: skip
        return self._workspaces[key]


def _plan_key(plan: BufferPlan) -> tuple:
    return (plan.group_name, plan.dim, plan.hidden_dim, plan.num_experts, plan.top_k)


def _key(call: Call, x: torch.Tensor, ids: torch.Tensor, w1: torch.Tensor) -> tuple:
    return (call.group_name, x.shape[1], w1.shape[1], call.num_experts, ids.shape[1])


def _check_plan(plan: BufferPlan) -> None:
    sizes = sizes_of(plan)
    for name, value in (("D", plan.dim), ("F", plan.hidden_dim)):
        if value <= 0 or value % MULTIPLE:
            raise ValueError(
                f"mega_moe: the triton backend needs {name} to be a multiple of {MULTIPLE}, got {value}; "
                'set backend = "reference"'
            )
    limits = {
        "experts of a rank": (
            sizes.local_experts,
            routing.MAX_LOCAL_EXPERTS,
            "raise the expert parallel degree",
        ),
        "experts per token (K)": (plan.top_k, MAX_TOP_K, 'set backend = "reference"'),
        "ranks of the expert-parallel group": (sizes.ep_size, MAX_GROUP, "lower the expert parallel degree"),
    }
    for what, (value, limit, remedy) in limits.items():
        if value > limit:
            raise ValueError(f"mega_moe: the triton backend takes at most {limit} {what}, got {value}; {remedy}")


def _bf16(*tensors: torch.Tensor) -> Tensors:
    return tuple(t.to(torch.bfloat16).contiguous() for t in tensors)


def _send(work: Workspace, rows: dict[int, torch.Tensor]) -> torch.cuda.Event | None:
    """Sends rows [T, D] to every peer, by part of its buffer, on the side stream, after what the current stream holds;
    the event tells when that is done. Without peers there is nothing to send."""
    if work.symm.ep_size == 1:
        return None
    work.side.wait_stream(torch.cuda.current_stream(work.plan.device))
    with torch.cuda.stream(work.side), phase("dispatch"):
        for part, rows_TD in rows.items():
            work.symm.send(rows_TD, part)
        done = work.side.record_event()
    if work.symm.shares_gpu:  # copies within a GPU take multiprocessors, which waiting kernels would not leave them
        torch.cuda.current_stream(work.plan.device).wait_event(done)
    return done


def _gate_up(
    work: Workspace,
    tables: Tables,
    x: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor,
    kept: list[torch.Tensor] | None,
) -> torch.Tensor:
    """s * h by row. kept: where g and u, and s * h go; None keeps only s * h, in the workspace."""
    # A forward that leaves nothing puts s * h where the backward will put dg.
    gate_up, scaled_h = kept if kept is not None else (None, work.dgate)
    extra = {"keep": 0} if kept is None else {"keep": 1, "gate_up": gate_up}
    box = (1, 128, 64)
    _launch(work, "gate_up", tables, own=x, b0=(w1, box), b1=(w3, box), c0=(scaled_h, (16, 64)), **extra)
    return scaled_h


def _launches(work: Workspace) -> dict[tuple[str, int], Launch]:
    """Every kernel, ready for any call: by name and part of `recv` that it gathers from."""
    symm, scratch, plan, sizes = work.symm, work.scratch, work.plan, work.sizes
    constants: dict[str, Any] = dict(
        returned=symm.view("returned"), zeros=work.zeros,
        dscores=work.dscores, done=scratch.done, tickets=scratch.tickets, summed=scratch.summed,
        epoch=symm.epoch, error=symm.error, peers=symm.peers,
        sums_offset=symm.regions["sums"].offset, dscores_offset=symm.regions["dscores"].offset,
        returned_offset=symm.regions["returned"].offset,
        D=plan.dim, F=plan.hidden_dim, experts=sizes.local_experts, rank=symm.rank, t_max=symm.t_max,
        ep_size=sizes.ep_size, top_k=plan.top_k, max_rows=sizes.rows, subs=symm.view("returned").shape[1],
    )  # fmt: skip
    return {
        (name, part): Launch(
            name, plan.device, recv=symm.view("recv")[part], landed=symm.view("landed")[part], **constants
        )
        for name in cuda.KERNELS
        for part in (X, DY)
    }


def _launch(work: Workspace, name: str, tables: Tables, *, part: int = X, **fields: Any) -> None:
    """Runs a kernel on the routing of `tables` and the fields of this call: each call of a kernel sets the same."""
    with phase(name):
        timeout_ns = work.symm.timeout_seconds * 10**9
        work.launches[name, part](timeout_ns=timeout_ns, **tables.addresses, **fields)


BACKEND = FusedBackend()
