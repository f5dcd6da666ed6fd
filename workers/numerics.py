"""Settings that float results depend on, fixed in every process that computes.

Denormals are flushed to zero: saturated units give gradients near 1e-20 whose squares would be
denormal, and slow. The flag is inherited by threads started afterwards.
"""

from __future__ import annotations

import torch

from fedsim.errors import UsageError


def fix_numerics(threads: int, device: str) -> None:
    """See below.

    Raises:
        UsageError: if `device` is cuda and torch has none.
    """
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise UsageError("this installation of torch cannot use the GPU here; give --devices cpu")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
