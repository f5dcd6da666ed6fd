"""Settings for numerics = portable: the same kernels, and so the same bits, on all x86-64 processors.

By default ATen, MKL, oneDNN, numpy and OpenBLAS choose their kernels by the processor, so an Intel and an AMD
machine with the same libraries give different bits. PORTABLE limits the choice to kernels for every x86-64
processor, at a cost in speed (docs/benchmarks.md). The C library still chooses by processor: its exp and log
differ between processors with and without FMA. Other architectures (ARM) may also round differently; the
probe digest shows this.

References:
    https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-linux/2024-2/specifying-code-branches.html
    https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html
    https://numpy.org/doc/stable/reference/simd/build-options.html
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from fedsim.errors import UsageError

PORTABLE: Mapping[str, str] = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "NPY_ENABLE_CPU_FEATURES": "X86_V2",
    "NPY_DISABLE_CPU_FEATURES": "",
    "OPENBLAS_CORETYPE": "Prescott",
}
"""Environment variables of a portable run, set before torch and numpy are imported. numpy accepts features to
enable or features to disable, not both; an empty variable counts as not set."""
LEAST = ("DEFAULT", "NO AVX")
"""torch's names for the kernels that every processor can run; torch 2.6 uses the second one."""


def environment_for(numerics: str) -> Mapping[str, str]:
    """Return the variables to set before torch and numpy are imported; none unless numerics is portable."""
    return PORTABLE if numerics == "portable" else {}


def check_numerics(numerics: str) -> None:
    """Check that this process, which has imported torch and numpy, uses the requested numerics.

    Raises:
        UsageError: if numerics is portable and torch or numpy was imported before the variables were set.
    """
    import numpy
    import torch

    if numerics != "portable":
        return
    there = {name: os.environ.get(name) for name in PORTABLE}
    beyond = numpy.show_config(mode="dicts")["SIMD Extensions"].get("found")
    if there != dict(PORTABLE) or torch.backends.cpu.get_cpu_capability() not in LEAST or beyond:
        needed = " ".join(f"{name}={value}" for name, value in PORTABLE.items())
        raise UsageError(
            "numerics = portable must be known before torch and numpy are imported, and this program has "
            f"imported one of them: start it with {needed}, or use the command fedsim launch"
        )
