"""numerics = portable: the same kernels, and so the same bits, on x86-64 processors of all makes.

By default ATen, MKL and oneDNN choose their kernels by the processor, so an Intel and an AMD machine with the
same libraries give different bits. These variables, set before torch is imported, fix the choice to what
every x86-64 processor has, at a cost (docs/benchmarks.md). Other architectures (ARM) may still round
differently; the probe digest says so.

References:
    https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-linux/2024-2/specifying-code-branches.html
    https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from fedsim.errors import UsageError

PORTABLE: Mapping[str, str] = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}
"""Environment variables that a process of a portable run has before it imports torch."""
LEAST = ("DEFAULT", "NO AVX")
"""What torch calls the kernels that every processor has; the second name is that of torch 2.6."""


def environment_for(numerics: str) -> Mapping[str, str]:
    """The variables to set before torch is imported: those of PORTABLE, or none for native."""
    return PORTABLE if numerics == "portable" else {}


def check_numerics(numerics: str) -> None:
    """Check that this process, which has imported torch, computes as asked.

    Raises:
        UsageError: if numerics is portable and torch was imported before the variables were set.
    """
    import torch

    if numerics != "portable":
        return
    there = {name: os.environ.get(name) for name in PORTABLE}
    if there != dict(PORTABLE) or torch.backends.cpu.get_cpu_capability() not in LEAST:
        needed = " ".join(f"{name}={value}" for name, value in PORTABLE.items())
        raise UsageError(
            "numerics = portable must be known before torch is imported, and this program has imported it: "
            f"start it with {needed}, or use the command, fedsim launch --numerics portable"
        )
