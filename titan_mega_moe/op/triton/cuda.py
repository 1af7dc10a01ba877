"""Compiles gemm.cu with NVRTC, describes tensors to the TMA, launches its kernels.

Only NVRTC and the driver are used, through `cuda.bindings`, which torch's CUDA builds depend on: no nvcc, no host
compiler, no headers. The compiled image is cached on disk under the hash of the source and of NVRTC's version.
"""

import ctypes
import functools
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("gemm.cu")
THREADS = 384
SHARED_BYTES = 4 * 49152 + 8 * 2 * 2048 + 16 * 4 + 16  # gemm.cu: stages, staging buffers, barriers, stop
ARCH = "sm_90a"
# Kernels of gemm.cu, and the blocks each wants on a multiprocessor. All but the combine take the shared memory whole.
KERNELS = {
    "gate_up": 1,
    "down": 1,
    "down_backward": 1,
    "gate_up_backward": 1,
    "weight_grad_gate_up": 1,
    "weight_grad_down": 1,
    "combine_rest": 2,
    "combine": 2,
}


class Params(ctypes.Structure):
    """gemm.cu's `Params`, field for field."""

    _fields_ = [
        *[(name, ctypes.c_uint64 * 16) for name in ("a0", "a1", "b0", "b1", "c0", "c1")],
        *[(name, ctypes.c_uint64) for name in ("own", "recv", "zeros")],
        *[(name, ctypes.c_uint64) for name in ("rows", "scores", "tiles", "num_tiles", "expert_rows")],
        *[(name, ctypes.c_uint64) for name in ("gate_up", "dscores", "done", "landed", "epoch", "error")],
        *[
            (name, ctypes.c_uint64)
            for name in ("partial_rows", "row_of", "tokens", "tiles_of", "tickets", "summed", "peers", "ids")
        ],
        *[(name, ctypes.c_uint64) for name in ("returned", "out", "dscores_out")],
        *[(name, ctypes.c_uint64) for name in ("sums_offset", "dscores_offset", "returned_offset", "timeout_ns")],
        *[(name, ctypes.c_int32) for name in ("D", "F", "experts", "rank", "t_max", "ep_size")],
        *[(name, ctypes.c_int32) for name in ("top_k", "max_rows", "keep", "subs", "backward")],
    ]


def _check(result: tuple) -> Any:
    """The value of a cuda.bindings call; RuntimeError with the call's error name otherwise."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA call failed: {error.name}")
    return values[0] if values else None


def cache_dir() -> Path:
    return Path(os.environ.get("TITAN_MEGA_MOE_CACHE", Path.home() / ".cache" / "titan_mega_moe"))


def compile_image(source: str, arch: str = ARCH) -> tuple[bytes, str]:
    """(device image, compiler log) of a CUDA source; needs NVRTC, not a GPU. Raises RuntimeError with NVRTC's log."""
    from cuda.bindings import nvrtc

    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), b"gemm.cu", 0, [], []))
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"--ptxas-options=-v"]
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
    _check(nvrtc.nvrtcGetProgramLog(program, log))
    text = log.rstrip(b"\0 ").decode()
    if int(status) != 0:
        raise RuntimeError(f"NVRTC could not compile the kernels for {arch}: {text}")
    image = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
    _check(nvrtc.nvrtcGetCUBIN(program, image))
    _check(nvrtc.nvrtcDestroyProgram(program))
    return image, text


def _cached_image() -> bytes:
    from cuda.bindings import nvrtc

    source = SOURCE.read_text()
    version = nvrtc.nvrtcVersion()[1:]
    path = cache_dir() / f"gemm-{hashlib.sha256(f'{source}{version}{ARCH}'.encode()).hexdigest()[:16]}.cubin"
    if path.exists():
        return path.read_bytes()
    image, _ = compile_image(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(image)
    os.replace(file.name, path)  # ranks may race: each writes the same bytes, the rename is atomic
    return image


@functools.cache
def kernel(name: str, device_index: int):
    """A kernel of gemm.cu, loaded in the current context of `device_index`."""
    from cuda.bindings import driver

    function = _check(driver.cuModuleGetFunction(_module(device_index), name.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _check(driver.cuFuncSetAttribute(function, attribute, _shared_bytes(name)))
    return function


@functools.cache
def _module(device_index: int):
    from cuda.bindings import driver

    torch.cuda.current_stream(device_index)  # makes sure that torch has created the context
    return _check(driver.cuModuleLoadData(_cached_image()))


@functools.lru_cache(maxsize=4096)
def _tensor_map(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> bytes:
    from cuda.bindings import driver as d

    rank = len(shape)
    tensor_map = _check(
        d.cuTensorMapEncodeTiled(
            d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            rank,
            pointer,
            [d.cuuint64_t(n) for n in reversed(shape)],
            [d.cuuint64_t(2 * n) for n in reversed(strides[:-1])],
            [d.cuuint32_t(n) for n in reversed(box)],
            [d.cuuint32_t(1)] * rank,
            d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(tensor_map.getPtr(), 128)


def tensor_map(tensor: torch.Tensor, box: tuple[int, ...]):
    """TMA descriptor of a bf16 tensor with unit last stride, read or written in boxes of `box` elements, 128-byte
    swizzled; reads outside the tensor give zeros, writes outside are dropped."""
    encoded = _tensor_map(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), box)
    return (ctypes.c_uint64 * 16).from_buffer_copy(encoded)


def _shared_bytes(name: str) -> int:
    return SHARED_BYTES if KERNELS[name] == 1 else 0


class Launch:
    """A kernel of gemm.cu with its parameters in place: what no call changes is written once. Small layers would wait
    for the host if every launch put them all together."""

    def __init__(self, name: str, device: torch.device, **fields: Any) -> None:
        """device has an index; fields: as in __call__."""
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._kernel, self._device_index = kernel(name, device.index), device.index
        self._blocks, self._shared_bytes = KERNELS[name] * (multiprocessors // 2 * 2), _shared_bytes(name)
        # The kernel's parameter is 64-byte aligned, and longer than Params by that alignment's padding.
        self._storage = ctypes.create_string_buffer(ctypes.sizeof(Params) + 128)
        address = (ctypes.addressof(self._storage) + 63) & ~63
        self._params = Params.from_address(address)
        self._arguments = (ctypes.c_void_p * 1)(address)
        fill(self._params, fields)

    def __call__(self, **fields: Any) -> None:
        """Sets `fields`, as `fill` takes them, and runs on the device's current stream, on every multiprocessor. The
        driver copies the parameters, so the next call may set others at once."""
        from cuda.bindings import driver

        fill(self._params, fields)
        stream = torch._C._cuda_getCurrentRawStream(self._device_index)
        _check(
            driver.cuLaunchKernel(
                self._kernel, self._blocks, 1, 1, THREADS, 1, 1, self._shared_bytes, stream,
                ctypes.addressof(self._arguments), 0,
            )
        )  # fmt: skip


def fill(params: Params, fields: dict[str, Any]) -> None:
    """A field is a tensor (its address), (tensor, box) or a number."""
    for field, value in fields.items():
        if isinstance(value, tuple):
            value = tensor_map(*value)
        elif isinstance(value, torch.Tensor):
            value = value.data_ptr()
        setattr(params, field, value)
