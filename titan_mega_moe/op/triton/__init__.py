"""The fused backend: kernels of our own for Hopper, over symmetric memory. See docs/kernels.md.

Triton makes the routing tables (routing.py); the matrix products and the combine beside them are CUDA C++ (gemm.cu),
compiled at first use by NVRTC (cuda.py).
"""

from titan_mega_moe.op.triton.backend import BACKEND

__all__ = ["BACKEND"]
