"""The Gaussian-product paper's compression of a diagonal precision (arXiv:2102.01936v1, Sec. 3.5).

In every layer, the max(1, round(p size)) largest entries are kept (the first of equal entries), and the other
entries are replaced by their mean. csr encodes the result as in the paper; fedsim.wire.codecs.bitmap encodes
the same numbers in fewer bytes.

    indices   for each layer, the row pointers and the columns of the kept entries (int32)
    values    one mean per layer, then the kept values (float32)

The rows of a layer are its first axis; the other axes are flattened to columns. A bias is one row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
from torch import Tensor

from fedsim.errors import WireError
from fedsim.learning.params import Slice
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

WHY = (
    "this codec keeps the large values of a layer and merges the small ones, whatever their sign; "
    "it is for a precision or a curvature"
)
merging = partial(Codec, lossy=True, kinds=ONE_SIGN, why=WHY, bias=math.inf)
"""Constructor of codecs that send the kept values of each layer and the mean of its other values."""


def csr(p: float) -> Codec:
    def pack(x: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Part, ...] | None:
        selected = largest_and_means(x, spec, p)
        if selected is None:
            return None
        values, mask, means = selected
        indices = [a for s in spec.layout.slices for a in _compressed_rows(mask[slice_of(s)], s)]
        return (("indices", joined(*indices)), ("values", joined(means, values[mask])))

    def unpack(parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None) -> Tensor:
        numbers = np.frombuffer(parts[0], dtype=np.int32)
        mask, at = np.zeros(spec.count, dtype=bool), 0
        for s in spec.layout.slices:
            rows, kept = _rows(s), kept_of(s.size, p)
            pointers = numbers[at : at + rows + 1]
            columns = numbers[at + rows + 1 : at + rows + 1 + kept]
            at += rows + 1 + kept
            mask[s.offset + _positions(pointers, columns, s)] = True
        floats, layers = np.frombuffer(parts[1], dtype=np.float32), len(spec.layout.slices)
        return filled(mask, floats[:layers], floats[layers:], spec)

    def bounds(spec: Spec) -> tuple[Bound, ...]:
        kept, slices = all_kept(spec, p), spec.layout.slices
        pointers = sum(_rows(s) + 1 for s in slices)
        return (fixed("indices", 4 * (pointers + kept)), fixed("values", 4 * (len(slices) + kept)))

    return merging(f"csr:{p!r}", pack, unpack, bounds)


# ---- the rule


def kept_of(size: int, p: float) -> int:
    """Return the number of kept entries in a layer."""
    return min(size, max(1, round(p * size)))


def all_kept(spec: Spec, p: float) -> int:
    """Return the number of kept entries in a tensor."""
    return sum(kept_of(s.size, p) for s in spec.layout.slices)


def slice_of(s: Slice) -> slice:
    return slice(s.offset, s.offset + s.size)


def finite(values: Array) -> bool:
    return not values.size or bool(np.isfinite(values.min()) and np.isfinite(values.max()))


def largest(values: Array, spec: Spec, p: float) -> Array:
    """Return a mask, (P,), of the largest entries of each layer; of equal entries, the first are taken."""
    mask = np.zeros(spec.count, dtype=bool)
    for s in spec.layout.slices:
        kept = kept_of(s.size, p)
        if kept:
            mask[slice_of(s)] = _largest(values[slice_of(s)], kept)
    return mask


def _largest(layer: Array, kept: int) -> Array:
    threshold = np.partition(layer, layer.size - kept)[layer.size - kept]
    mask: Array = layer > threshold
    mask[np.flatnonzero(layer == threshold)[: kept - np.count_nonzero(mask)]] = True
    return mask


def largest_and_means(x: Tensor, spec: Spec, p: float) -> tuple[Array, Array, Array] | None:
    """Return the values, (P,), a mask of the kept ones, (P,), and the mean of the others per layer, float32.

    Return None if a mean would hide invalid values from the receiver: values that are not finite, or values
    <= 0 if the spec demands positive values.
    """
    values = flat32(x)
    if not finite(values) or (spec.positive and values.size and values.min() <= 0):
        return None
    mask, means = largest(values, spec, p), np.zeros(len(spec.layout.slices), dtype=np.float32)
    for i, s in enumerate(spec.layout.slices):
        rest = values[slice_of(s)][~mask[slice_of(s)]]
        if rest.size:
            means[i] = rest.mean(dtype=np.float64)
    return values, mask, means


def filled(mask: Array, means: Array, kept: Array, spec: Spec) -> Tensor:
    """Return a tensor with the kept values at their positions, and the mean of the layer elsewhere."""
    sizes: list[int] = [s.size for s in spec.layout.slices]
    out: Array = np.repeat(means, sizes)
    out[mask] = kept
    return tensor_of(out, spec)


# ---- compressed sparse rows


def _rows(s: Slice) -> int:
    return s.shape[0] if len(s.shape) > 1 else 1


def _compressed_rows(mask: Array, s: Slice) -> Iterator[Array]:
    """Yield the row pointers (rows + 1,) and columns (kept,) of a layer, int32, as scipy.sparse does."""
    table = mask.reshape(_rows(s), math.prod(s.shape[1:]) if len(s.shape) > 1 else s.size)
    counts = np.count_nonzero(table, axis=1)
    yield np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    yield np.nonzero(table)[1].astype(np.int32)


def _positions(pointers: Array, columns: Array, s: Slice) -> Array:
    width = s.size // max(1, _rows(s))
    wide = pointers.astype(np.int64)
    counts = wide[1:] - wide[:-1]
    if pointers[0] != 0 or pointers[-1] != len(columns) or (counts < 0).any():
        raise WireError(f"row pointers of layer {s.name!r} do not count its {len(columns)} entries")
    if ((columns < 0) | (columns >= width)).any():
        raise WireError(f"columns of layer {s.name!r} outside its {width}")
    flat: Array = np.repeat(np.arange(len(counts)) * width, counts) + columns
    if (np.diff(flat) <= 0).any():
        raise WireError(f"columns of layer {s.name!r} do not ascend")
    return flat
