"""One byte per value: 256 logarithmic levels per layer, from its smallest positive to its largest value.

    values    the ranges lo, hi of all layers (float32), then one byte per value
    level_k = lo (hi / lo)^(k / 255),   lo = max(smallest positive value, 1e-9 hi, min(hi, 1.2e-38))

The relative error of values from lo on is at most (hi / lo)^(1 / 510) - 1 <= 4.2 %. Smaller positive values
become lo: those below 1e-9 hi, and denormal ones, below 1.2e-38. If even hi is denormal, all positive values
of the layer become hi. In a layer with zeros, byte 0 is exactly 0, 255 levels remain (508 replaces 510), and
-lo is sent to mark the layer. In a layer that has only zeros, lo and hi are 0.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from fedsim.errors import WireError
from fedsim.wire.codecs.base import (
    ONE_SIGN,
    Array,
    Bound,
    Codec,
    Part,
    Spec,
    fixed,
    flat32,
    joined,
    tensor_of,
)

DEPTH = 1e-9
"""Smallest level of a layer, as a fraction of its largest value."""
_NORMAL = np.finfo(np.float32).tiny
"""The lower limit of levels, unless all values are below it; some threads flush denormal numbers to 0."""
_WHY = "this codec has no levels below zero; it is for a precision or a curvature"


def log8() -> Codec:
    return Codec(
        "log8",
        _pack,
        _unpack,
        _bounds,
        lossy=True,
        kinds=ONE_SIGN,
        why=_WHY,
        bias=-math.log(DEPTH) / 508,
    )


def _pack(x: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Part, ...] | None:
    values = flat32(x)
    if values.size and not (values.min() >= 0 and np.isfinite(values.max())):
        return None  # min and max are NaN if any value is NaN
    ranges = np.zeros((len(spec.layout.slices), 2), dtype=np.float32)
    codes = np.zeros(spec.count, dtype=np.uint8)
    for i, s in enumerate(spec.layout.slices):
        layer = values[s.offset : s.offset + s.size]
        positive = layer > 0
        if not positive.any():
            continue
        hi = layer.max()
        lo = max(layer[positive].min(), np.float32(DEPTH * float(hi)), min(hi, _NORMAL))
        zeros = not positive.all()
        first = int(zeros)
        ranges[i] = (-lo if zeros else lo, hi)
        step = _step(float(lo), float(hi), first)
        levels = np.log(np.maximum(layer, lo).astype(np.float64) / float(lo)) / step if step else 0.0 * layer
        codes[s.offset : s.offset + s.size] = np.where(positive, np.rint(levels) + first, 0)
    return (("values", joined(ranges, codes)),)


def _step(lo: float, hi: float, first: int) -> float:
    return (math.log(hi) - math.log(lo)) / (255 - first)


def _levels(lo: float, hi: float) -> Array:
    """Return the float32 values of the 256 bytes in a layer."""
    if not (math.isfinite(lo) and math.isfinite(hi) and abs(lo) <= hi):
        raise WireError(f"a logarithmic range from {abs(lo):g} to {hi:g}")
    out = np.zeros(256, dtype=np.float32)
    if lo:
        first = int(lo < 0)
        out[first:] = abs(lo) * np.exp(_step(abs(lo), hi, first) * np.arange(256 - first))
        out[first], out[255] = abs(lo), hi
    return out


def _unpack(parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None) -> Tensor:
    slices = spec.layout.slices
    ranges = np.frombuffer(parts[0][: 8 * len(slices)], dtype=np.float32).reshape(-1, 2)
    codes = np.frombuffer(parts[0][8 * len(slices) :], dtype=np.uint8)
    out = np.empty(spec.count, dtype=np.float32)
    for (lo, hi), s in zip(ranges.tolist(), slices, strict=True):
        out[s.offset : s.offset + s.size] = _levels(lo, hi)[codes[s.offset : s.offset + s.size]]
    return tensor_of(out, spec)


def _bounds(spec: Spec) -> tuple[Bound, ...]:
    return (fixed("values", 8 * len(spec.layout.slices) + spec.count),)
