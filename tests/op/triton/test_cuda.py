"""What NVRTC makes of gemm.cu; needs no GPU."""

import ctypes
import re

import pytest

from titan_mega_moe.op.triton import cuda


def nvrtc_missing() -> str | None:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # RuntimeError: the bindings are there, the library is not
        return f"NVRTC cannot be loaded: {error}"
    return None


@pytest.fixture(scope="module")
def compiled() -> tuple[bytes, str]:
    """The image and the log of the shipped source, compiled here rather than taken from the cache."""
    if reason := nvrtc_missing():
        pytest.skip(reason)
    return cuda.compile_image(cuda.SOURCE.read_text())


def compile_after_the_source(line: str) -> None:
    if reason := nvrtc_missing():
        pytest.skip(reason)
    struct = cuda.SOURCE.read_text().partition("\nDEVICE ")[0]  # types and constants come before the first function
    cuda.compile_image(f"{struct}\n{line}\n")


def test_the_image_is_of_hopper_and_holds_every_kernel(compiled):
    image, log = compiled
    assert image.startswith(b"\x7fELF")
    assert re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", log)
    assert {*re.findall(r"Compiling entry function '(\w+)' for 'sm_90a'", log)} == {*cuda.KERNELS}
    names = image.split(b"\0")
    assert all(name.encode() in names for name in cuda.KERNELS)


def test_registers_are_spilled_hardly_anywhere(compiled):
    _, log = compiled
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    # Measured: at most 224 stored and 292 loaded.
    assert len(spills) >= len(cuda.KERNELS)
    assert all(int(n) <= 400 for spill in spills for n in spill), log


def test_no_products_wait_for_each_other(compiled):
    """ptxas says so (C7510 and relatives) when it has to serialize wgmma."""
    _, log = compiled
    assert not re.search(r"C75\d\d|serializ", log), log


def test_parameters_have_one_layout():
    """The same fields in the same order, each and all of one size: alignment follows from these."""
    struct = re.search(r"struct Params \{(.*?)\n\};", cuda.SOURCE.read_text(), re.DOTALL)[1]
    declared = re.sub(r"//.*", "", struct)
    names = re.findall(r"(\w+)\s*[,;]", declared)
    assert names == [name for name, _ in cuda.Params._fields_]
    size = -(-ctypes.sizeof(cuda.Params) // 64) * 64
    asserts = [f"static_assert(sizeof(Params) == {size} && alignof(Params) == 64);"]
    for name, kind in cuda.Params._fields_:
        asserts.append(f"static_assert(sizeof(Params::{name}) == {ctypes.sizeof(kind)});")
    compile_after_the_source("\n".join(asserts))


def test_a_layout_that_differs_does_not_compile():
    with pytest.raises(RuntimeError, match="NVRTC could not compile the kernels for sm_90a"):
        compile_after_the_source(f"static_assert(sizeof(Params) == {ctypes.sizeof(cuda.Params) + 64});")


def test_shared_memory_fits_a_block_of_hopper():
    # STOP is the last word of gemm.cu's map of the shared memory.
    assert cuda.SHARED_BYTES <= 232448
    compile_after_the_source(f"static_assert(STOP + 4 <= {cuda.SHARED_BYTES});")
