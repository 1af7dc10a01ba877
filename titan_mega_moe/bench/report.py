"""What a benchmark says: its numbers in, tables, Markdown and one line of JSON out. It runs nothing.

`derive` adds to the measured numbers all that follows from them.
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from titan_mega_moe.op.backends import FUSED
from titan_mega_moe.op.fastest import Sizes, Timing

GIB = 2**30
PASSES = ("forward", "forward_backward")
RIVALS = ("alltoall", "minimal_async_ep")
FORMAT = 1

HEAD = (
    "layer", "fwd ms", "sust.", "TFLOP/s", "% {product}", "x a2a", "x min",
    "f+b ms", "sust.", "TFLOP/s", "% {product}", "x a2a", "x min", "link GB/s", "peak GiB",
)  # fmt: skip
PARTS = ("part", "runs", "ms", "% of step", "TFLOP/s", "% {product}", "MB", "GB/s", "% copy", "link MB", "link GB/s")
CAVEATS = (
    "A burst is {warmups} calls to warm up and {timed} timed in a row; the figure is the median of "
    "{bursts} bursts, each the slowest rank's. Sustained is the mean of {sustained} calls in a row.",
    "Useful TFLOP/s count the rows that routing makes (a token and an expert), 6 D F each forward and "
    "twice that backward, over the ranks: neither padding nor recomputation.",
    "Link GB/s are useful bytes too: a token's row once to each rank that needs it and one row back, in "
    "each pass, of the rank with the most. Memory GB/s (in the JSON): weights, tokens and gradients once "
    "each.",
    "The ceiling of products (cuBLAS on a GPU, torch.mm on a CPU) is two dense ones of the layer's sizes, measured in "
    "the same run and protocol.",
    "TorchTitan's layers have plain bf16 weights, no FSDP, no recomputation and partial_dtensor; expert "
    "counts are given, as its MoE does. Their inputs are padded with tokens and slots of score 0 where "
    "they want that. MinimalAsyncEP is meant for full recomputation, which these times leave out: its "
    "buffers are used again in the backward, see its errors.",
    "Peak memory holds inputs, weights, gradients, what is kept between the passes and the layer's "
    "buffers; communicators' own memory is left out.",
    "Where the time goes: torch's profiler over one burst; it slows a CPU's operators, not a GPU's kernels. Bytes are "
    "each operand and result once, link bytes of the rank with the most. "
    "Sums to peers leave during down, gate_up_backward and the kernels after them, copies beside all else.",
    "Errors are relative Frobenius norms against the reference in float64 on the same bf16 inputs, over "
    "all ranks. A limit is upstream's own error or one rounding to bf16, with 8/sqrt(n) for n elements.",
)


def derive(result: dict[str, Any]) -> dict[str, Any]:
    """Adds rates, shares of the ceilings and ratios to every layer of every case, in place."""
    ceilings = result["ceilings"]
    for case in result["cases"]:
        product = ceilings["products"][shape_text(case["shape"])]
        for layer in case["layers"].values():
            for name in PASSES:
                _rates(layer[name], case["work"][name], product, ceilings)
                layer[name]["faster_than"] = {
                    rival: case["layers"][rival][name]["burst_ms"] / layer[name]["burst_ms"]
                    for rival in RIVALS
                    if rival in case["layers"]
                }
            if "breakdown" in layer:
                _account(layer["breakdown"], layer["forward_backward"]["burst_ms"], product, ceilings)
    return result


def _account(found: dict[str, Any], total_ms: float, product: dict[str, float], ceilings: dict[str, Any]) -> None:
    """Adds rates and shares to every part, their sum, and the time in which nothing ran."""
    for part in found["parts"].values():
        if "flops" in part:
            part["tflops"] = part["flops"] / part["ms"] / 1e9
            part["share_of_product"] = part["tflops"] / product["tflops"]
        if "bytes" in part:
            part["gb_s"] = part["bytes"] / part["ms"] / 1e6
            part["share_of_memory"] = part["gb_s"] / ceilings["device_copy_gb_s"]
        if "link_bytes" in part:
            part["link_gb_s"] = part["link_bytes"] / part["ms"] / 1e6
    if (sending := found["sending"]) is not None:
        sending["link_gb_s"] = sending["link_bytes"] / sending["alone_ms"] / 1e6
    found["sum_ms"] = sum(part["ms"] for part in found["parts"].values())
    found["gap_ms"], found["total_ms"] = found["profiled_ms"] - found["busy_ms"], total_ms


def _rates(times: dict[str, Any], work: dict[str, float], product: dict[str, float], ceilings: dict[str, Any]) -> None:
    ms = times["burst_ms"]
    times["tflops"] = work["flops"] / ms / 1e9
    times["sustained_tflops"] = work["flops"] / times["sustained_ms"] / 1e9
    times["link_gb_s"] = work["link_bytes"] / ms / 1e6
    times["memory_gb_s"] = work["memory_bytes"] / ms / 1e6
    times["share_of_product"] = times["tflops"] / product["tflops"]
    times["share_of_memory"] = times["memory_gb_s"] / ceilings["device_copy_gb_s"]
    link = ceilings["peer_copy_gb_s"]
    times["share_of_link"] = times["link_gb_s"] / link if link else None


def fused_timings(result: dict[str, Any]) -> list[Timing]:
    """Mean times of both passes, over the cases of each layer's sizes that both fused backends ran.

    Sustained ones, as training runs. A wrong result in any case counts as such.
    """
    machine = result["machine"]
    found: dict[Sizes, list[list[dict[str, Any]]]] = {}
    for case in result["cases"]:
        shape, layers = case["shape"], case["layers"]
        if all(name in layers for name in FUSED):
            sizes = Sizes(machine["ranks"], shape["E"], shape["K"], shape["D"], shape["F"])
            found.setdefault(sizes, []).append([layers[name] for name in FUSED])
    return [
        Timing(
            gpu=machine["device"],
            deep_gemm=machine["deep_gemm"],
            sizes=sizes,
            ms={
                name: None
                if any(layer["exceeded"] for layer in runs)
                else fmean(layer["forward_backward"]["sustained_ms"] for layer in runs)
                for name, runs in zip(FUSED, zip(*cases, strict=True), strict=True)
            },
        )
        for sizes, cases in found.items()
    ]


def shape_text(shape: dict[str, int]) -> str:
    return f"{shape['T']}x{shape['D']}x{shape['F']} E={shape['E']} K={shape['K']}"


def good(result: dict[str, Any]) -> bool:
    """Something ran, with no error beyond its limit and no differing bit."""
    judged = [layer for case in (*result["cases"], *result["checks"]) for layer in case["layers"].values()]
    beyond = any(layer.get("exceeded") for layer in judged)
    ran = bool(judged or result["repeats"])
    return ran and not beyond and not any(sum(r["differing"].values()) for r in result["repeats"])


def _rows(case: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, layer in case["layers"].items():
        cells = [name]
        for kind in PASSES:
            t = layer[kind]
            ratios = [f"{t['faster_than'][r]:.2f}" if r in t["faster_than"] else "-" for r in RIVALS]
            cells += [f"{t['burst_ms']:.2f}", f"{t['sustained_ms']:.2f}", _digits(t["tflops"])]
            cells += [f"{100 * t['share_of_product']:.0f}", *ratios]
        peak = layer["memory"]["peak_bytes"]
        cells += [
            _digits(layer["forward_backward"]["link_gb_s"]),
            "-" if peak is None else f"{peak / GIB:.2f}",
        ]
        rows.append(cells)
    return rows


def _part_rows(found: dict[str, Any]) -> list[list[str]]:
    """A line a part; then their sum, which counts what overlaps twice, and how the step divides."""

    def line(name: str, ms: float, part: dict[str, float], runs: str = "-") -> list[str]:
        scaled = (("tflops", 1), ("share_of_product", 100), ("bytes", 1e-6), ("gb_s", 1), ("share_of_memory", 100))
        cells = [_digits(part[key] * by) if key in part else "-" for key, by in scaled]
        link = [_digits(part[key] * by) if key in part else "-" for key, by in (("link_bytes", 1e-6), ("link_gb_s", 1))]
        return [name, runs, f"{ms:.3f}", f"{100 * ms / found['profiled_ms']:.1f}", *cells, *link]

    rows = [line(name, part["ms"], part, f"{part['launches']:.3g}") for name, part in found["parts"].items()]
    if found["sending"] is not None:
        rows.append(line("sending tokens once, alone", found["sending"]["alone_ms"], found["sending"]))
    wholes = {
        "sum of parts": "sum_ms",
        "any part runs": "busy_ms",
        "none runs": "gap_ms",
        "step, in the profiler": "profiled_ms",
        "step, without it": "total_ms",
    }
    return rows + [line(name, found[key], {}) for name, key in wholes.items()]


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.3g}"


def _error_rows(case: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, layer in case["layers"].items():
        beyond = layer.get("exceeded", [])
        cells = [f"{error:.2e}{' !' * (tensor in beyond)}" for tensor, error in layer["errors"].items()]
        rows.append([name, *cells])
    return rows


def _check_rows(result: dict[str, Any]) -> list[list[str]]:
    """One line a layer: how many checks it passed; of each tensor its largest error and upstream's."""
    rows = []
    names = {name: None for check in result["checks"] for name in check["layers"]}
    for name in names:
        of = [check["layers"][name] for check in result["checks"] if name in check["layers"]]
        passed = sum(not layer["exceeded"] for layer in of)
        cells = [name, f"{passed} of {len(of)}"]
        for tensor in of[0]["errors"]:
            worst = max(layer["errors"][tensor] for layer in of)
            theirs = [layer["upstream_errors"][tensor] for layer in of if layer["upstream_errors"]]
            cells.append(f"{worst:.1e} / {max(theirs):.1e}" if theirs else f"{worst:.1e}")
        rows.append(cells)
    return rows


def sections(result: dict[str, Any]) -> list[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Title, head and rows of every table."""
    tables: list[tuple[str, tuple[str, ...], list[list[str]]]] = []
    product = result["ceilings"]["product"] if result["ceilings"] else ""
    head, parts = (tuple(cell.format(product=product) for cell in cells) for cells in (HEAD, PARTS))
    for case in result["cases"]:
        title = f"{shape_text(case['shape'])}, {case['routing']}"
        tables.append((title, head, _rows(case)))
        tensors = next(iter(case["layers"].values()))["errors"] if case["layers"] else {}
        tables.append((f"{title}: error against float64", ("layer", *tensors), _error_rows(case)))
        for name, layer in case["layers"].items():
            if "breakdown" in layer:
                tables.append((f"{title}: where the time of {name} goes", parts, _part_rows(layer["breakdown"])))
        if case["refused"]:
            tables.append((f"{title}: not run", ("layer", "why"), [list(r) for r in case["refused"].items()]))
    if result.get("chosen"):
        title = 'backend "auto" on this machine from now on'
        tables.append((title, ("layer's sizes", "backend", "why"), result["chosen"]))
    if result["ceilings"]:
        tables.append(("ceilings", ("what", "measured"), _ceiling_rows(result["ceilings"])))
    if result["checks"]:
        rows = _check_rows(result)
        tensors = (
            next(iter(next(c for c in result["checks"] if c["layers"])["layers"].values()))["errors"] if rows else {}
        )
        title = f"{len(result['checks'])} checks: worst error / upstream's worst"
        tables.append((title, ("layer", "passed", *tensors), rows))
        failed = [
            [name, f"{shape_text(c['shape'])} {c['routing']}", _exceeded_text(layer)]
            for c in result["checks"]
            for name, layer in c["layers"].items()
            if layer["exceeded"]
        ]
        if failed:
            tables.append(("failed checks", ("layer", "case", "error > limit"), failed))
        reasons = {(name, why): None for c in result["checks"] for name, why in c["refused"].items()}
        if reasons:
            tables.append(("not checked", ("layer", "why"), [list(r) for r in reasons]))
    if result["repeats"]:
        tables.append(("same input, same bits", ("layer", "case", "runs", "runs that differ"), _repeat_rows(result)))
    if result.get("not_repeated"):
        tables.append(("not repeated", ("layer", "why"), [list(r) for r in result["not_repeated"].items()]))
    if result.get("moved"):
        columns = ("case", "layer", "what", "before", "now", "now / before")
        tables.append((f"against the baseline of {result['baseline']}", columns, result["moved"]))
    return tables


def _exceeded_text(layer: dict[str, Any]) -> str:
    return ", ".join(f"{n} {layer['errors'][n]:.2e} > {layer['limits'][n]:.2e}" for n in layer["exceeded"])


def _repeat_rows(result: dict[str, Any]) -> list[list[str]]:
    rows = []
    for r in result["repeats"]:
        off = {name: count for name, count in r["differing"].items() if count}
        text = ", ".join(f"{name} {count}" for name, count in off.items()) or "none"
        rows.append([r["layer"], f"{shape_text(r['shape'])} {r['routing']}", str(r["repeats"]), text])
    return rows


def _ceiling_rows(ceilings: dict[str, Any]) -> list[list[str]]:
    rows = [
        [
            f"{ceilings['product']} at {shape}",
            f"{_digits(p['tflops'])} TFLOP/s (gate+up {_digits(p['gate_up_tflops'])}, "
            f"down {_digits(p['down_tflops'])}), sustained {_digits(p['sustained_tflops'])}",
        ]
        for shape, p in ceilings["products"].items()
    ]
    peer = ceilings["peer_copy_gb_s"]
    rows.append(["copy on the device", f"{_digits(ceilings['device_copy_gb_s'])} GB/s, read and write"])
    how = ceilings["peer_copy"]
    rows.append(["copy to a peer", f"{_digits(peer)} GB/s each way ({how})" if peer else how])
    return rows


def moved(result: dict[str, Any], baseline: dict[str, Any]) -> list[list[str]]:
    """What both have, before and now: times, memory, the largest error."""
    before = {(shape_text(c["shape"]), c["routing"]): c["layers"] for c in baseline["cases"]}
    rows = []
    for case in result["cases"]:
        key = (shape_text(case["shape"]), case["routing"])
        for name, layer in case["layers"].items():
            old = before.get(key, {}).get(name)
            if old is None:
                continue
            pairs = [
                ("forward ms", old["forward"]["burst_ms"], layer["forward"]["burst_ms"]),
                (
                    "forward + backward ms",
                    old["forward_backward"]["burst_ms"],
                    layer["forward_backward"]["burst_ms"],
                ),
                ("peak bytes", old["memory"]["peak_bytes"], layer["memory"]["peak_bytes"]),
                ("largest error", max(old["errors"].values()), max(layer["errors"].values())),
            ]
            rows += [
                [" ".join(key), name, what, f"{a:.4g}", f"{b:.4g}", f"{b / a:.3f}" if a else "-"]
                for what, a, b in pairs
                if a is not None and b is not None
            ]
    return rows


def origin(result: dict[str, Any]) -> str:
    """When and where a result was measured."""
    machine = result["machine"]
    return f"{result['date']}: {machine['ranks']} ranks, {machine['device']}"


def show(result: dict[str, Any], console: Console) -> None:
    for title, head, rows in sections(result):
        table = Table(title=title, title_justify="left")
        for column, name in enumerate(head):
            text = column == 0 or len(head) < 5
            table.add_column(name, justify="left" if text else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def json_line(result: dict[str, Any]) -> str:
    return json.dumps(result, separators=(",", ":"))


def markdown(result: dict[str, Any]) -> str:
    """The saved page: what ran where, every table, and what to know before reading them."""
    parts = [
        f"# bench, {result['date']}",
        _table(("what", "value"), [[k, str(v)] for k, v in result["machine"].items()]),
    ]
    parts.append(f"Command: `titan-mega-moe bench {result['command']}`")
    for title, head, rows in sections(result):
        parts += [f"## {title}", _table(head, rows)]
    parts += ["## Caveats", "\n".join(f"- {line.format(**result['protocol'])}" for line in CAVEATS)]
    return "\n\n".join(parts) + "\n"


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def files(path: Path) -> tuple[Path, Path]:
    """Where `save` writes the line of JSON, and the tables."""
    return path, path.with_suffix(".md")


def save(result: dict[str, Any], path: Path) -> None:
    """Both files of `path`, whose folder is there. Raises OSError."""
    line, page = files(path)
    line.write_text(json_line(result) + "\n")
    page.write_text(markdown(result))
