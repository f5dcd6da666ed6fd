"""Square roots and inverse trigonometric functions that do not depend on the CPU, for numerics = portable.

On CPUs, torch computes sqrt, acos, asin and atan of tensors with MKL's vector functions. These begin with
the processor's approximate instructions (rsqrtps), which Intel and AMD round differently. MKL_CBWR and
ATEN_CPU_CAPABILITY do not change this. Therefore a few roots are off by one unit in the last place, and
Intel and AMD differ in which ones. numpy's sqrt is correctly rounded, as IEEE 754 requires.

Sources: IEEE 754-2019, section 5.4.1 (squareRoot is correctly rounded); ATen/cpu/vml.h of PyTorch;
https://docs.pytorch.org/docs/stable/library.html
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.library import Library

FUNCTIONS = {"sqrt": np.sqrt, "acos": np.arccos, "asin": np.arcsin, "atan": np.arctan}
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""The type in which values of a half-precision type are computed. numpy has no bfloat16, and torch itself
computes both types in float32."""

_libraries: list[Library] = []


def use_exact_roots(exact: bool) -> None:
    """Replace torch's functions in this process, or restore them. Use sqrt(x): x ** 0.5 is not replaced."""
    if exact and not _libraries:
        library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():  # torch warns that a kernel is replaced
            warnings.simplefilter("ignore")
            for name, function in FUNCTIONS.items():
                for form, kernel in _forms(name, function).items():
                    library.impl(form, kernel, "CPU")  # type: ignore[no-untyped-call]
        _libraries.append(library)
    elif not exact:
        while _libraries:
            _libraries.pop()._destroy()  # type: ignore[no-untyped-call]


def _forms(name: str, function: np.ufunc) -> dict[str, Callable[..., Tensor]]:
    """Return the three forms of a torch function: sqrt(x), sqrt_(x) in place, and sqrt(x, out=y)."""

    def compute(x: Tensor) -> Tensor:
        floating = x.is_floating_point() or x.is_complex()
        dtype = x.dtype if floating else torch.get_default_dtype()
        wide = x.detach().resolve_neg().resolve_conj().to(WIDER.get(dtype, dtype))
        result = torch.empty_like(wide)
        with np.errstate(all="ignore"):
            function(wide.numpy(), out=result.numpy())
        return result.to(dtype)

    def change(x: Tensor) -> Tensor:
        return x.copy_(compute(x))

    def write(x: Tensor, *, out: Tensor) -> Tensor:
        result = compute(x)
        return out.resize_(result.shape).copy_(result)

    return {name: compute, f"{name}_": change, f"{name}.out": write}
