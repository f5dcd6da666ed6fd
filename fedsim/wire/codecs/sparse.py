"""The Gaussian-product paper's compression of a diagonal precision (papers-and-code.md 7.3), coded twice.

Rule: of every layer keep the max(1, round(p size)) largest entries (of equal ones the first) and replace
the rest by their mean. csr sends that as the paper says; bitmap and best code the same numbers better
(wire.md 3: 2.4 and 6 times smaller at p = 0.1).

    csr      indices = per layer int32 row pointers, int32 columns     values = means, kept values (float32)
    bitmap   indices = zstd(one bit per position)                      values = means, zstd(shuffled float32)
    best     the same with bfloat16 values; the means stay float32

A layer's rows are its first axis, the rest flattened; a bias is one row. Means are 4 bytes per layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedsim.errors import WireError
from fedsim.learning.params import Slice
from fedsim.wire.codecs.frames import bound, compressed, expanded, shuffled, unshuffled
from fedsim.wire.codecs.tensors import Array, Bound, Codec, Part, Spec, fixed, flat32, joined, tensor_of


def csr(p: float) -> Codec:
    def pack(x: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Part, ...] | None:
        chosen = _chosen(x, spec, p)
        if chosen is None:
            return None
        values, mask, means = chosen
        indices = [a for s in spec.layout.slices for a in _compressed_rows(mask[_of(s)], s)]
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
        return _filled(mask, np.frombuffer(parts[1], dtype=np.float32), spec)

    def bounds(spec: Spec) -> tuple[Bound, ...]:
        kept, slices = _kept(spec, p), spec.layout.slices
        pointers = sum(_rows(s) + 1 for s in slices)
        return (fixed("indices", 4 * (pointers + kept)), fixed("values", 4 * (len(slices) + kept)))

    return Codec(f"csr:{p!r}", pack, unpack, bounds, lossy=True, signs=True)


def bitmap(p: float) -> Codec:
    return _bitmap(f"bitmap:{p!r}", p, half=False)


def best(p: float) -> Codec:
    return _bitmap(f"best:{p!r}", p, half=True)


def _bitmap(name: str, p: float, *, half: bool) -> Codec:
    width = np.dtype(np.uint16 if half else np.float32)

    def pack(x: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Part, ...] | None:
        chosen = _chosen(x, spec, p)
        if chosen is None:
            return None
        values, mask, means = chosen
        kept = values[mask]
        if half:
            kept = torch.from_numpy(kept).to(torch.bfloat16).view(torch.int16).numpy().view(width)
        coded = means.tobytes() + compressed(shuffled(kept))
        indices = compressed(np.packbits(mask, bitorder="little").tobytes())
        return (("indices", memoryview(indices)), ("values", memoryview(coded)))

    def unpack(parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None) -> Tensor:
        bits = np.frombuffer(expanded(parts[0], -(-spec.count // 8)), dtype=np.uint8)
        every = np.unpackbits(bits, bitorder="little").view(bool)
        mask = every[: spec.count]
        if every[spec.count :].any():
            raise WireError("bits set behind the last position")
        for s in spec.layout.slices:
            found = int(np.count_nonzero(mask[_of(s)]))
            if found != kept_of(s.size, p):
                raise WireError(f"{found} kept entries in layer {s.name!r}; p says {kept_of(s.size, p)}")
        side = 4 * len(spec.layout.slices)
        kept = unshuffled(expanded(parts[1][side:], width.itemsize * _kept(spec, p)), width)
        if half:
            kept = (kept.astype(np.uint32) << 16).view(np.float32)
        means = np.frombuffer(parts[1][:side], dtype=np.float32)
        return _filled(mask, np.concatenate([means, kept]), spec)

    def bounds(spec: Spec) -> tuple[Bound, ...]:
        side, kept = 4 * len(spec.layout.slices), width.itemsize * _kept(spec, p)
        return (bound("indices", -(-spec.count // 8), spec), bound("values", kept, spec, side))

    return Codec(name, pack, unpack, bounds, lossy=True, signs=True)


# ---- the rule


def kept_of(size: int, p: float) -> int:
    """How many entries of a layer are kept."""
    return min(size, max(1, round(p * size)))


def _kept(spec: Spec, p: float) -> int:
    return sum(kept_of(s.size, p) for s in spec.layout.slices)


def _of(s: Slice) -> slice:
    return slice(s.offset, s.offset + s.size)


def _chosen(x: Tensor, spec: Spec, p: float) -> tuple[Array, Array, Array] | None:
    """Values (P,), which of them are kept (P,), and the mean of the others per layer, float32.

    None where the mean would hide what the receiver must see: values not finite, or not positive where
    they have to be.
    """
    values = flat32(x)
    if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
        return None
    if spec.positive and values.size and values.min() <= 0:
        return None
    mask, means = np.zeros(spec.count, dtype=bool), np.zeros(len(spec.layout.slices), dtype=np.float32)
    for i, s in enumerate(spec.layout.slices):
        layer, kept = values[_of(s)], kept_of(s.size, p)
        if kept:
            mask[_of(s)] = chosen = _largest(layer, kept)
        if kept < s.size:
            means[i] = layer[~chosen].mean(dtype=np.float64)
    return values, mask, means


def _largest(layer: Array, kept: int) -> Array:
    """Which entries are the largest ones; of equal ones the first, on any machine."""
    threshold = np.partition(layer, layer.size - kept)[layer.size - kept]
    mask: Array = layer > threshold
    mask[np.flatnonzero(layer == threshold)[: kept - np.count_nonzero(mask)]] = True
    return mask


def _filled(mask: Array, numbers: Array, spec: Spec) -> Tensor:
    """The tensor of kept positions and, in one array, the layers' means and the kept values."""
    slices = spec.layout.slices
    sizes: list[int] = [s.size for s in slices]
    out: Array = np.repeat(numbers[: len(slices)], sizes)
    out[mask] = numbers[len(slices) :]
    return tensor_of(out, spec)


# ---- compressed sparse rows


def _rows(s: Slice) -> int:
    return s.shape[0] if len(s.shape) > 1 else 1


def _compressed_rows(mask: Array, s: Slice) -> Iterator[Array]:
    """Row pointers (rows + 1,) and columns (kept,) of a layer, int32, as scipy.sparse.csr_matrix has them."""
    table = mask.reshape(_rows(s), math.prod(s.shape[1:]) if len(s.shape) > 1 else s.size)
    counts = np.count_nonzero(table, axis=1)
    yield np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    yield np.nonzero(table)[1].astype(np.int32)


def _positions(pointers: Array, columns: Array, s: Slice) -> Array:
    """The flat positions in a layer. Errors: WireError unless both arrays are canonical."""
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
