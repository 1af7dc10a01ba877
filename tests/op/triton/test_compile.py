"""The routing kernels compile for Hopper with the installed Triton; no GPU is needed for that."""

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from titan_mega_moe.op.triton import routing

POINTERS = {"scores": "*fp32", "scores_in": "*fp32", "peers": "*i64"}
NUMBERS = {"T", "experts", "rank", "t_max", "polls", "blocks", "number"}
OFFSETS = {"ids_offset", "scores_offset", "tokens_offset", "routed_offset"}
CONSTANTS = {
    "EP": 2,
    "K": 8,
    "E": 64,
    "E_PAD": 64,
    "TILE": 128,
    "BLOCK": 256,
    "STEP": 128,
    "PAD": 64,
    "COLUMNS_PAD": 1024,
}


def type_of(kernel: str, name: str) -> str:
    if name in CONSTANTS:
        return "constexpr"
    if name in NUMBERS:
        return "i32"
    if name in OFFSETS:
        return "i64"
    return "*i64" if (kernel, name) == ("publish", "ids") else POINTERS.get(name, "*i32")


@pytest.mark.parametrize("kernel", ["publish", "begin", "meet", "count", "scan", "tiles", "place"])
def test_routing_kernel_compiles_for_hopper(kernel: str) -> None:
    function = getattr(routing, kernel)
    signature = {name: type_of(kernel, name) for name in function.arg_names}
    constants = {name: CONSTANTS[name] for name in function.arg_names if name in CONSTANTS}
    compiled = compile(ASTSource(function, signature, constants), target=GPUTarget("cuda", 90, 32))
    assert ".target sm_90" in compiled.asm["ptx"]
