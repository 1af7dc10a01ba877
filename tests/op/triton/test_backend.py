"""In which order a pass sends and launches, and what is sent where; what the kernels compute is for GPUs."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from titan_mega_moe.op.backends import KEEP, BufferPlan, Call, Operands
from titan_mega_moe.op.symm_buffer import DY, SymmBuffer, X, layout
from titan_mega_moe.op.triton import backend, routing, workspace
from titan_mega_moe.op.triton.cuda import KERNELS

T, T_MAX, D, F, E, K = 5, 8, 64, 128, 4, 2
MEET = {"forward": "receive", "backward": "meet_peers"}
GATHERS = {"gate_up": X, "down_backward": DY, "weight_grad_down": DY, "weight_grad_gate_up": X}


@pytest.fixture
def passes(monkeypatch):
    """passes(ep, keep): what a forward and a backward of rank 0 do, in order, and the rows that each sends."""
    log: list = []

    def run(ep: int, keep: str) -> dict[str, tuple[list, dict[int, torch.Tensor]]]:
        nbytes = layout(ep, T_MAX, D, K)[1]
        memories = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(ep)]
        everyone = [SymmBuffer(memories, rank, T_MAX, D, K) for rank in range(ep)]
        monkeypatch.setattr(workspace, "group_size", lambda name: ep)
        monkeypatch.setattr(workspace, "SymmBuffer", SimpleNamespace(create=lambda plan: everyone[0]))
        monkeypatch.setattr(Call, "ep_size", property(lambda call: ep))
        fused = backend.FusedBackend()
        fused.prepare(BufferPlan("", torch.device("cpu"), T_MAX, D, F, E, K, keep))
        everyone[0].epoch.fill_(7)
        g = torch.Generator().manual_seed(0)
        x, dy = (torch.randn(T, D, generator=g).bfloat16() for _ in range(2))
        w1, w2, w3 = (torch.zeros(E // ep, *shape).bfloat16() for shape in ((F, D), (D, F), (F, D)))
        operands = Operands(x, torch.zeros(T, K, dtype=torch.int64), torch.zeros(T, K), w1, w2, w3)
        call = Call(E, "", torch.bfloat16, keep)
        found = {}
        _, saved = fused.forward(call, operands)
        found["forward"] = log.copy(), {X: x}
        log.clear()
        fused.backward(call, dy, operands, saved)
        found["backward"] = log.copy(), {X: x, DY: dy}
        log.clear()
        for peer in range(1, ep):  # of both passes alike
            for part, rows in {X: x, DY: dy}.items():
                assert torch.equal(everyone[peer].view("recv")[part, 0, :T], rows)
                assert everyone[peer].view("landed")[part].tolist() == [7 if d == ep - peer else 0 for d in range(ep)]
        return found

    def record(name: str, part: int | None = None) -> None:
        log.append((name, part))

    class Stream:
        def __init__(self, *_): ...

        def wait_stream(self, _) -> None:
            record("fork")

        def wait_event(self, _) -> None:
            record("join")

        def record_event(self) -> object:
            return object()

    for name in ("announce", "receive", "build", "begin_call", "meet_peers"):
        monkeypatch.setattr(routing, name, lambda *_, name=name: record(name))
    send = SymmBuffer.send
    monkeypatch.setattr(SymmBuffer, "send", lambda *args: (record("send", args[2]), send(*args)))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(backend.FusedBackend, "_compile", lambda *_: None)
    launches = {(kernel, part): partial(record, kernel, part) for kernel in KERNELS for part in (X, DY)}
    takes_fields = {key: lambda launch=launch, **_: launch() for key, launch in launches.items()}
    monkeypatch.setattr(backend, "_launches", lambda work: takes_fields)
    return run


@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_rows_are_sent_between_meeting_the_peers_and_gathering(passes, ep, keep):
    for name, (events, sent) in passes(ep, keep).items():
        names = [event for event, _ in events]
        products = [event for event in names if event in KERNELS]
        first, last = names.index(products[0]), len(names) - 1 - names[::-1].index(products[-1])
        # A kernel that a product waits for must not come beside it: no warp more fits on its multiprocessor.
        assert names.index(MEET[name]) < first, events
        if ep > 1:
            assert {part for event, part in events if event == "send"} == sent.keys()
            assert names.index(MEET[name]) < names.index("fork") < names.index("send"), events
            assert "send" not in names[first:] and names.index("join") > last, events
        else:
            assert not {"fork", "send", "join"} & {*names}
        assert all(part == GATHERS[event] for event, part in events if event in GATHERS), events
        if name == "forward":
            assert products == ["gate_up", "down", "combine"]
            continue
        again, rest = ["gate_up"] * (keep == "inputs"), ["combine_rest"] * (ep > 1)
        weights = ["weight_grad_down", "weight_grad_gate_up"]
        assert products == [*again, "down_backward", "gate_up_backward", *rest, *weights, "combine"]
        if ep > 1:  # what is needed first goes first
            assert events[names.index("send")] == ("send", X if keep == "inputs" else DY)
