"""Names in profiles: what the layer does when, as `mega_moe::...`.

Both passes of every backend are a `forward` or `backward` with phases inside. The reference has `dispatch`, `experts`
and `combine`; the fused one `routing`, `dispatch` and each kernel of gemm.cu by its name; deep_gemm has `load`, `pack`
and `kernel`. A CUDA graph's replay has only its kernels' names.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

_NOTHING = nullcontext()


def phase(name: str) -> AbstractContextManager[object]:
    """The range `mega_moe::NAME` of whatever profiler runs, torch's or NVTX; without one next to nothing."""
    # A record_function costs 8 us whether or not anyone looks, this 0.3 us.
    return record_function(f"mega_moe::{name}") if torch.autograd._profiler_enabled() else _NOTHING
