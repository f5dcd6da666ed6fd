"""Codecs that send a bitmap of the kept entries and their values, under zstd (docs/references/bytes.md).

    bitmap   the numbers of csr: keeps the largest entries of a layer, and replaces the others by their mean
    best     the same with bfloat16 values; the means stay float32
    topk     keeps the max(1, round(p size)) entries of largest magnitude of a layer (the first of equal
             entries), and replaces the others by 0, so it sends no means

    indices = zstd(one bit per position)     values = [means,] zstd(shuffled float32, or bfloat16 for best)

At p = 0.1, bitmap and best are 2.4 and 6 times smaller than csr.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.errors import WireError
from fedsim.wire.codecs.base import INCREMENTS, Array, Bound, Codec, Part, Spec, flat32
from fedsim.wire.codecs.csr import (
    all_kept,
    filled,
    finite,
    kept_of,
    largest,
    largest_and_means,
    merging,
    slice_of,
)
from fedsim.wire.codecs.zstd import bound, compressed, expanded, shuffled, unshuffled

_WHY_INCREMENTS = (
    "this codec sets all but the entries of largest magnitude of a layer to zero; "
    "it is for an increment, that is a delta or a gradient"
)
Width = np.dtype[Any]
_FLOAT: Width = np.dtype(np.float32)
_BFLOAT: Width = np.dtype(np.uint16)
"""bfloat16 as the upper half of a float32, because numpy has no bfloat16."""


def bitmap(p: float) -> Codec:
    return _with_means(f"bitmap:{p!r}", p, _FLOAT)


def best(p: float) -> Codec:
    return _with_means(f"best:{p!r}", p, _BFLOAT)


def _with_means(name: str, p: float, width: Width) -> Codec:
    def pack(x: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Part, ...] | None:
        selected = largest_and_means(x, spec, p)
        if selected is None:
            return None
        values, mask, means = selected
        return (_bits(mask), ("values", memoryview(means.tobytes() + _coded(values[mask], width))))

    def unpack(parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None) -> Tensor:
        mask, side = _mask(parts[0], spec, p), _side(spec)
        kept = _decoded(parts[1][side:], all_kept(spec, p), width)
        return filled(mask, np.frombuffer(parts[1][:side], dtype=np.float32), kept, spec)

    def bounds(spec: Spec) -> tuple[Bound, ...]:
        return _bounds(spec, p, width, _side(spec))

    return merging(name, pack, unpack, bounds)


def topk(p: float) -> Codec:
    def pack(x: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Part, ...] | None:
        values = flat32(x)
        if not finite(values):
            return None
        mask = largest(np.abs(values), spec, p)
        return (_bits(mask), ("values", memoryview(_coded(values[mask], _FLOAT))))

    def unpack(parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None) -> Tensor:
        kept = _decoded(parts[1], all_kept(spec, p), _FLOAT)
        zeros = np.zeros(len(spec.layout.slices), dtype=np.float32)
        return filled(_mask(parts[0], spec, p), zeros, kept, spec)

    def bounds(spec: Spec) -> tuple[Bound, ...]:
        return _bounds(spec, p, _FLOAT)

    name = f"topk:{p!r}"
    return Codec(name, pack, unpack, bounds, lossy=True, kinds=INCREMENTS, why=_WHY_INCREMENTS)


def _bounds(spec: Spec, p: float, width: Width, side: int = 0) -> tuple[Bound, ...]:
    kept = width.itemsize * all_kept(spec, p)
    return (bound("indices", _bitmap_bytes(spec), spec), bound("values", kept, spec, side))


def _side(spec: Spec) -> int:
    return 4 * len(spec.layout.slices)


# ---- positions


def _bitmap_bytes(spec: Spec) -> int:
    return -(-spec.count // 8)


def _bits(mask: Array) -> Part:
    return ("indices", memoryview(compressed(np.packbits(mask, bitorder="little").tobytes())))


def _mask(part: memoryview, spec: Spec, p: float) -> Array:
    """Return a mask, (P,), of the kept entries."""
    bits = np.frombuffer(expanded(part, _bitmap_bytes(spec)), dtype=np.uint8)
    every = np.unpackbits(bits, bitorder="little").view(bool)
    mask: Array = every[: spec.count]
    if every[spec.count :].any():
        raise WireError("bits set behind the last position")
    for s in spec.layout.slices:
        result = int(np.count_nonzero(mask[slice_of(s)]))
        if result != kept_of(s.size, p):
            raise WireError(f"{result} kept entries in layer {s.name!r}; p says {kept_of(s.size, p)}")
    return mask


# ---- values


def _coded(kept: Array, width: Width) -> bytes:
    if width is _BFLOAT:
        kept = torch.from_numpy(kept).to(torch.bfloat16).view(torch.int16).numpy().view(width)
    return compressed(shuffled(kept))


def _decoded(part: memoryview, count: int, width: Width) -> Array:
    kept = unshuffled(expanded(part, width.itemsize * count), width)
    return (kept.astype(np.uint32) << 16).view(np.float32) if width is _BFLOAT else kept
