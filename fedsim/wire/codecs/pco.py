"""Lossless, by a model of the numbers: pcodec finds bins and bits of floats and integers by itself.

The values are decoded into an array of the expected size, so that a frame cannot ask for more memory.

Source: Loncaric et al. 2025, https://github.com/pcodec/pcodec.
"""

from __future__ import annotations

import numpy as np
from pcodec import ChunkConfig, standalone
from torch import Tensor

from fedsim.errors import WireError
from fedsim.wire.codecs.base import Bound, Codec, Part, Spec, from_bytes, raw_bytes

HEAD = 64
"""Bytes that a file of few numbers may have beside them."""
_DTYPES = {(4, True): np.float32, (8, True): np.float64, (1, False): np.uint8, (8, False): np.int64}
"""By size and whether they are floats."""


def pco() -> Codec:
    def size(data: memoryview, spec: Spec) -> float:
        return 8.0 * len(data)  # its symbols are not known here

    return Codec("pco", _pack, _unpack, _bounds, entropy=size)


def _bounds(spec: Spec) -> tuple[Bound, ...]:
    return (Bound("values", 0, spec.dense_bytes + HEAD if spec.count else 0),)


def _pack(x: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Part, ...] | None:
    values = np.frombuffer(raw_bytes(x), dtype=_DTYPES[x.itemsize, x.is_floating_point()])
    config = ChunkConfig(enable_8_bit=True)
    data = standalone.simple_compress(values, config) if len(values) else b""
    return (("values", memoryview(data)),) if len(data) <= _bounds(spec)[0].most else None


def _unpack(parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None) -> Tensor:
    values = np.empty(spec.count, dtype=_DTYPES[spec.dtype.itemsize, spec.dtype.is_floating_point])
    if not spec.count:
        return from_bytes(values.data, spec.shape, spec.dtype)
    try:
        progress = standalone.simple_decompress_into(bytes(parts[0]), values)
    except (RuntimeError, TypeError) as e:
        raise WireError(f"a damaged pco file: {e}") from None
    if progress.n_processed != spec.count or not progress.finished:
        raise WireError(f"a pco file of other than {spec.count} numbers")
    return from_bytes(values.view(np.uint8).data, spec.shape, spec.dtype)
