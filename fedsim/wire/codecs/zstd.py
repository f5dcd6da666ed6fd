"""Lossless codecs: byte shuffle and zstd, of the values or of their difference from a reference.

A zstd frame declares the size of its content, so a receiver knows the size before it decompresses the frame.

    delta:  key(x) = b if b >= 0 else b xor (2^(n-1) - 1),  b = the bits of x as a signed integer
            z      = zigzag(key(x) - key(ref) mod 2^n)

`key` keeps the order of the floats (-0 next to 0), so close floats have close integers. It is one-to-one on
all bit patterns, including NaN payloads. Measurements: docs/references/bytes.md#lossless-codecs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard
from torch import Tensor

from fedsim.errors import WireError
from fedsim.wire.codecs.base import Array, Bound, Codec, Part, Spec, from_bytes, raw_bytes

_SIGNED: dict[int, np.dtype[Any]] = {4: np.dtype(np.int32), 8: np.dtype(np.int64)}
_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


def zstd() -> Codec:
    def pack(x: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Part, ...]:
        return _part(np.frombuffer(raw_bytes(x), dtype=_UNSIGNED[x.itemsize]))

    def unpack(parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None) -> Tensor:
        bits = unshuffled(expanded(parts[0], spec.dense_bytes), _UNSIGNED[spec.dtype.itemsize])
        return _tensor(bits, spec)

    return Codec("zstd", pack, unpack, _bounds)


def delta_zstd() -> Codec:
    def pack(x: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Part, ...]:
        assert ref is not None  # Codec.pack has checked it
        return _part(_zigzag(ordered(x) - ordered(ref)))

    def unpack(parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None) -> Tensor:
        assert ref is not None
        size = spec.dtype.itemsize
        z = unshuffled(expanded(parts[0], spec.dense_bytes), _UNSIGNED[size])
        key = ordered(ref) + ((z >> 1) ^ (~(z & 1) + 1)).view(_SIGNED[size])
        return _tensor(_fold(key), spec)

    return Codec("delta+zstd", pack, unpack, _bounds, delta=True)


def _part(array: Array) -> tuple[Part, ...]:
    return (("values", memoryview(compressed(shuffled(array)))),)


def _tensor(bits: Array, spec: Spec) -> Tensor:
    return from_bytes(bits.view(np.uint8).data, spec.shape, spec.dtype)


def _bounds(spec: Spec) -> tuple[Bound, ...]:
    return (bound("values", spec.dense_bytes, spec),)


def _fold(bits: Array) -> Array:
    """Convert bits to keys, or keys to bits; the function is its own inverse."""
    top = 8 * bits.itemsize - 1
    flipped: Array = bits ^ ((bits >> top) & np.iinfo(bits.dtype).max)
    return flipped


def ordered(x: Tensor) -> Array:
    """Return the keys of floats: their bits as signed integers in the order of the floats."""
    return _fold(np.frombuffer(raw_bytes(x), dtype=_SIGNED[x.itemsize]))


def _zigzag(difference: Array) -> Array:
    """Map 0, -1, 1, -2, ... to 0, 1, 2, 3, ..., so that the high bytes of small differences are 0."""
    top = 8 * difference.itemsize - 1
    z: Array = ((difference << 1) ^ (difference >> top)).view(_UNSIGNED[difference.itemsize])
    return z


# ---- byte shuffle and zstd frames

LEVEL = 3
SLACK = 64
"""Bytes that a zstd frame may add to its content, in addition to 1/256 of the content."""


def compressed(data: bytes) -> bytes:
    """Compress data to one zstd frame that declares its size; return no bytes for empty data."""
    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(data) if data else b""


def expanded(frame: memoryview, nbytes: int) -> bytes:
    """Return the `nbytes` bytes in a frame.

    The declared size is checked first, because the library allocates this size and ignores max_output_size.

    Raises:
        WireError: If the frame is damaged or declares another size.
    """
    if not nbytes:
        if frame.nbytes:
            raise WireError(f"{frame.nbytes} bytes where there is nothing to compress")
        return b""
    try:
        declared = zstandard.frame_content_size(frame)
        if declared != nbytes:
            what = f"declares {declared} bytes" if declared >= 0 else "does not declare its size"
            raise WireError(f"a zstd frame {what}; the layout demands {nbytes}")
        data = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise WireError(f"a damaged zstd frame: {e}") from None
    if len(data) != nbytes:
        raise WireError(f"a zstd frame of {len(data)} bytes; the layout demands {nbytes}")
    return data


def bound(layer: str, nbytes: int, spec: Spec, beside: int = 0) -> Bound:
    """Return the bound of a part of `beside` plain and `nbytes` compressed bytes, capped near dense size."""
    most = beside + (nbytes + (nbytes >> 8) + SLACK if nbytes else 0)
    return Bound(layer, beside, min(most, spec.dense_bytes + beside + SLACK))


def shuffled(array: Array) -> bytes:
    """Return the first bytes of all values, then all second bytes, and so on."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1, array.itemsize).T.tobytes()


def unshuffled(data: bytes, dtype: np.dtype[np.generic]) -> Array:
    """Return the values of shuffled bytes as a new array."""
    columns = np.frombuffer(data, dtype=np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(columns.T).reshape(-1).view(dtype)
