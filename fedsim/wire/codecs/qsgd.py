"""QSGD, the standard unbiased quantiser of the literature, with b bits per value, for comparison.

    bucket of 512 values, h = max |v|, s = 2^(b-1) - 1
    v  ->  h sign(v) k / s,   k = floor(s |v| / h + U),  U uniform on [0, 1)

E[decoded] = v. The h of all buckets (float32) are sent first, then the signed integers k, entropy-coded layer
by layer (fedsim.wire.codecs.entropy). In an upload, a field that the broadcast also has is quantised as its
difference from the broadcast.

Source: QSGD, Alistarh et al. 2017, Sec. 3.1, and Sec. 5 for buckets of 512 and the maximum as the norm,
https://arxiv.org/abs/1610.02132. Differs: a range coder instead of Elias codes.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from torch import Tensor

from fedsim.errors import WireError
from fedsim.wire.codecs.base import INCREMENTS, Array, Bound, Codec, Part, Spec, flat32, tensor_of
from fedsim.wire.codecs.entropy import FEW, LEAST, decode_layers, encode_layers, layers_entropy

BUCKET = 512
FEWEST, MOST = 2, 16
"""The limits of b."""


def qsgd(b: int) -> Codec:
    return Codec(
        f"qsgd:{b}",
        partial(_pack, b),
        partial(_unpack, b),
        _bounds,
        lossy=True,
        kinds=INCREMENTS | {"mean"},
        why="this codec rounds at random on both sides of zero; it is for a mean or an increment",
        may_refer=True,
        entropy=lambda data, spec: 32 * _buckets(spec) + layers_entropy(data[4 * _buckets(spec) :], spec),
    )


def _buckets(spec: Spec) -> int:
    return -(-spec.count // BUCKET)


def _bounds(spec: Spec) -> tuple[Bound, ...]:
    least = 4 * _buckets(spec) + LEAST * len(spec.layout.slices)
    return (Bound("values", least, max(spec.dense_bytes, least + FEW * len(spec.layout.slices))),)


def _scales(largest: Array, spec: Spec) -> Array:
    """Return the h of every value's bucket, float64."""
    scales: Array = np.repeat(largest.astype(np.float64), BUCKET)[: spec.count]
    return scales


def _pack(b: int, x: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Part, ...] | None:
    if spec.stream is None:
        raise WireError("qsgd needs the random stream of a task")
    v = flat32(x) if ref is None else flat32(x) - flat32(ref)
    if not np.isfinite(v).all():
        return None
    size = np.abs(np.pad(v, (0, -len(v) % BUCKET)))
    largest = size.reshape(-1, BUCKET).max(axis=1, initial=0).astype("<f4")
    h, levels = _scales(largest, spec), 2 ** (b - 1) - 1
    relative = np.divide(np.abs(v), h, out=np.zeros(len(v)), where=h > 0)
    k = np.floor(levels * relative + spec.stream.numpy("qsgd").random(spec.count))
    integers = (np.sign(v) * np.minimum(k, levels)).astype(np.int64)
    data = largest.tobytes() + encode_layers(integers, spec)
    return (("values", memoryview(data)),) if len(data) <= _bounds(spec)[0].most else None


def _unpack(b: int, parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None) -> Tensor:
    head, levels = 4 * _buckets(spec), 2 ** (b - 1) - 1
    largest = np.frombuffer(parts[0][:head], dtype="<f4")
    if not (np.isfinite(largest).all() and (largest >= 0).all()):
        raise WireError("a bucket whose largest value is none")
    integers = decode_layers(parts[0][head:], spec)
    if (np.abs(integers) > levels).any():
        raise WireError(f"an integer above {levels}")
    values = _scales(largest, spec) * integers / levels
    return tensor_of((values if ref is None else values + flat32(ref)).astype(np.float32), spec)
