"""numerics = portable: the same kernels, and so the same bits, on x86-64 processors of all makes.

By default ATen, MKL, oneDNN, numpy and OpenBLAS choose their kernels by the processor, so an Intel and an AMD
machine with the same libraries give different bits. These variables, set before torch and numpy are imported,
fix the choice to what every x86-64 processor has, at a cost (docs/benchmarks.md). The C library keeps its own
choice: its exp and log differ between processors with and without FMA. Other architectures (ARM) may still
round differently; the probe digest says so.

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
"""Environment variables that a process of a portable run has before it imports torch and numpy. numpy takes a
list of what to enable or of what to disable, not both; empty is as good as not set."""
LEAST = ("DEFAULT", "NO AVX")
"""torch's names of the kernels that every processor has; the second is that of torch 2.6."""


def environment_for(numerics: str) -> Mapping[str, str]:
    """The variables to set before torch and numpy are imported: those of PORTABLE, or none for native."""
    return PORTABLE if numerics == "portable" else {}


def check_numerics(numerics: str) -> None:
    """Check that this process, which has imported torch and numpy, computes as asked.

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
