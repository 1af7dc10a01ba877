"""What one benchmark runs, on every rank alike; its answer is plain numbers, the same on every rank."""

import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from titan_mega_moe.bench import breakdown, measure
from titan_mega_moe.bench.layers import (
    DISPATCHERS,
    Inputs,
    Layer,
    OpLayer,
    Shape,
    UpstreamLayer,
    exact,
    layer,
    make_inputs,
)
from titan_mega_moe.bench.measure import Protocol, Ranks
from titan_mega_moe.bench.routing import KINDS, Routing


@dataclass(frozen=True)
class Plan:
    """What to run. `shapes` is empty when only checks are asked for."""

    shapes: list[Shape]
    routings: list[Routing]
    layers: list[str]
    checks: int = 0
    repeat_bits: int = 0
    seed: int = 0
    protocol: Protocol = field(default_factory=Protocol)
    breakdown: bool = False


def run(plan: Plan, ranks: Ranks) -> dict[str, Any]:
    """All of the plan's results. A collective over the ranks."""
    found: dict[str, Any] = {"cases": [], "checks": [], "repeats": [], "not_repeated": {}, "ceilings": None}
    if plan.shapes:
        _say(ranks, "ceilings of the machine")
        products = {str(s): measure.product_ceiling(s, ranks, plan.protocol) for s in plan.shapes}
        product = "cuBLAS" if ranks.cuda else "torch.mm"
        found["ceilings"] = {"product": product, "products": products, **measure.copy_ceilings(ranks, plan.protocol)}
        if ranks.cuda:
            torch.cuda.empty_cache()
    for shape in plan.shapes:
        found["cases"] += _cases(shape, plan, ranks)
    if plan.checks:
        found["checks"] = _checks(plan, ranks)
    if plan.repeat_bits:
        (shape,) = plan.shapes[:1] or repeated_shapes(plan.repeat_bits, plan.seed, ranks.size, ranks.cuda)
        found["repeats"], found["not_repeated"] = _repeats(shape, plan, ranks)
    return found


def _say(ranks: Ranks, text: str) -> None:
    if ranks.group is None or ranks.group.rank() == 0:
        print(text, file=sys.stderr, flush=True)


def _ready(
    names: list[str], shape: Shape, routings: list[Routing], ranks: Ranks
) -> tuple[list[tuple[Layer, dict[str, float]]], dict[str, str]]:
    """The layers that run this shape, prepared, with the bytes that took; and why the others do not."""
    able: list[tuple[Layer, dict[str, float]]] = []
    refused: dict[str, str] = {}
    for name in names:
        candidate = layer(name, ranks.device.type)
        reasons = [candidate.refusal(shape, routing, ranks.group) for routing in routings]
        if all(reasons):
            refused[name] = str(reasons[0])
            continue
        took, reason = measure.prepare(candidate, shape, ranks)
        if reason is None:
            able.append((candidate, took))
        else:
            refused[name] = reason
    return able, refused


def _cases(shape: Shape, plan: Plan, ranks: Ranks) -> list[dict[str, Any]]:
    """One result for each routing."""
    able, refused = _ready(plan.layers, shape, plan.routings, ranks)
    cases = []
    for number, routing in enumerate(plan.routings):
        make = _maker(shape, routing, plan.seed + number, ranks)
        case: dict[str, Any] = {"shape": asdict(shape), "routing": str(routing), "layers": {}}
        case["work"] = measure.work(make(), ranks)
        rest = [pair for pair in able if pair[0].refusal(shape, routing, ranks.group) is None]
        judged = _errors([one for one, _ in rest], make, ranks)
        for one, took in rest:
            _say(ranks, f"{shape} {routing}: {one.name}")
            result: dict[str, Any] = {"memory": _memory(one, took, make, ranks), **judged[one.name]}
            bound = one.bind(make())
            result["forward"] = measure.times(bound.forward, ranks, plan.protocol)
            result["forward_backward"] = measure.times(bound.step, ranks, plan.protocol)
            if plan.breakdown and isinstance(one, OpLayer):
                result["breakdown"] = breakdown.measure(one, bound, make(), ranks, plan.protocol)
            case["layers"][one.name] = result
        case["refused"] = refused | {
            one.name: str(reason) for one, _ in able if (reason := one.refusal(shape, routing, ranks.group)) is not None
        }
        cases.append(case)
    _release([one for one, _ in able], ranks)
    return cases


def _maker(shape: Shape, routing: Routing, seed: int, ranks: Ranks) -> Callable[[], Inputs]:
    return lambda: make_inputs(shape, routing, ranks.group, ranks.device, seed)


def _release(layers: list[Layer], ranks: Ranks) -> None:
    ranks.meet()
    for one in layers:
        one.release()
    if ranks.cuda:
        torch.cuda.empty_cache()
    ranks.meet()


def _memory(one: Layer, took: dict[str, float], make: Callable[[], Inputs], ranks: Ranks) -> dict[str, float | None]:
    """Bytes of the worst rank: the peak, which is what the allocator gave plus the buffers made before."""
    bound = one.bind(make())
    bound.step()  # what a first call allocates for good is no part of the layer's peak
    del bound
    allocated = measure.peak_bytes(lambda: one.bind(make()), ranks)
    known = one.buffer_bytes()
    measured = took["outside"] + took["inside"]
    buffers = measured if known is None else float(known)
    total = None if allocated is None else allocated + buffers
    return {
        "peak_bytes": total,
        "allocated_bytes": allocated,
        "buffer_bytes": buffers,
        "measured_buffer_bytes": measured,
    }


def _errors(layers: list[Layer], make: Callable[[], Inputs], ranks: Ranks) -> dict[str, dict[str, Any]]:
    """Per layer its errors, and for the op's backends the limits and whether they hold."""
    inputs = make()
    want = exact(inputs)
    found: dict[str, dict[str, Any]] = {}
    for one in layers:
        if one.name in DISPATCHERS:
            found[one.name] = {"errors": measure.errors(one.bind(inputs).results(), want, ranks)}
    upstream = found["alltoall"]["errors"] if "alltoall" in found else _upstream_errors(inputs, want, ranks)
    limits = measure.limits(upstream, want, inputs, ranks)
    for one in layers:
        if one.name not in DISPATCHERS:
            bound = one.bind(inputs)
            with measure.poisoned():
                errors = measure.errors(bound.results(), want, ranks)
            found[one.name] = {
                "errors": errors,
                "upstream_errors": upstream,
                "limits": limits,
                # Written so that a NaN does not hold.
                "exceeded": [name for name, error in errors.items() if not error <= limits[name]],
            }
    return found


def _upstream_errors(inputs: Inputs, want: dict[str, torch.Tensor], ranks: Ranks) -> dict[str, float] | None:
    """Those of upstream's all-to-all layer; None where torchtitan cannot be had."""
    upstream = UpstreamLayer("alltoall", ranks.device.type)
    if upstream.refusal(inputs.shape, inputs.routing, ranks.group) is not None:
        return None
    upstream.prepare(inputs.shape, ranks.group, ranks.device)
    return measure.errors(upstream.bind(inputs).results(), want, ranks)


def repeated_shapes(repeats: int, seed: int, size: int, cuda: bool) -> list[Shape]:
    """The one whose bits are compared where none is timed, on so many ranks; none where nothing is repeated."""
    return [shape for shape, _ in check_shapes(1, seed, size, cuda)] if repeats else []


def check_shapes(count: int, seed: int, size: int, cuda: bool) -> list[tuple[Shape, Routing]]:
    """`count` small shapes and routings for so many ranks: all kinds in turn, and sizes that fit no tile.

    Few pairs of D and F, because kernels may be compiled for each.
    """
    pick = random.Random(seed)
    sizes = [(64, 64), (192, 320), (512, 256), (1024, 704), (2048, 768)] if cuda else [(64, 64), (128, 192)]
    tokens = [1, 7, 64, 129, 500, 1024, 1537, 2000] if cuda else [1, 7, 33, 64]
    experts = [1, 2, 3, 8, 16, 32, 64, 128] if cuda else [1, 2, 3, 4]
    kinds = [Routing(kind) for kind in KINDS] + [Routing("skewed", "7"), Routing("skewed", "0.2")]
    cases: list[tuple[Shape, Routing]] = []
    for number in range(count):
        (D, F), routing = sizes[number % len(sizes)], kinds[number % len(kinds)]
        E = size * pick.choice(experts)
        shape = Shape(pick.choice(tokens), D, F, E, pick.randint(1, min(8, E)))
        while routing.refusal(shape.T, shape.E, shape.K, size) is not None:
            if size == 1:
                routing = Routing("random")
            E = size * pick.choice(experts)
            shape = Shape(shape.T, D, F, E, pick.randint(1, min(8, E)))
        cases.append((shape, routing))
    return cases


def _checks(plan: Plan, ranks: Ranks) -> list[dict[str, Any]]:
    """Errors alone, over many shapes and routings, fresh inputs each."""
    names = [name for name in plan.layers if name not in DISPATCHERS]
    found = []
    for number, (shape, routing) in enumerate(check_shapes(plan.checks, plan.seed, ranks.size, ranks.cuda)):
        _say(ranks, f"check {number + 1} of {plan.checks}: {shape} {routing}")
        able, refused = _ready(names, shape, [routing], ranks)
        judged = _errors([o for o, _ in able], _maker(shape, routing, plan.seed + 1000 + number, ranks), ranks)
        _release([one for one, _ in able], ranks)
        found.append({"shape": asdict(shape), "routing": str(routing), "layers": judged, "refused": refused})
    return found


def _repeats(shape: Shape, plan: Plan, ranks: Ranks) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The same input many times over: in how many runs any bit differs; and why layers did not run."""
    names = [name for name in plan.layers if name not in DISPATCHERS]
    found: list[dict[str, Any]] = []
    not_run: dict[str, str] = {}
    for number, routing in enumerate(plan.routings):
        able, refused = _ready(names, shape, [routing], ranks)
        not_run |= refused
        for one, _ in able:
            _say(ranks, f"{plan.repeat_bits} times {shape} {routing}: {one.name}")
            bound = one.bind(make_inputs(shape, routing, ranks.group, ranks.device, plan.seed + number))
            counts = measure.differing(bound, plan.repeat_bits, ranks)
            found.append(
                {
                    "shape": asdict(shape),
                    "routing": str(routing),
                    "layer": one.name,
                    "repeats": plan.repeat_bits,
                    "differing": counts,
                }
            )
        _release([one for one, _ in able], ranks)
    return found, not_run
