"""Byte shuffle and zstd frames whose size is known before they are decompressed."""

from __future__ import annotations

import numpy as np
import zstandard

from fedsim.errors import WireError
from fedsim.wire.codecs.base import Array, Bound, Spec

LEVEL = 3
SLACK = 64
"""What a zstd frame may add to the bytes in it, beside 1/256 of them."""


def compressed(data: bytes) -> bytes:
    """One zstd frame that declares its size; of nothing, nothing."""
    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(data) if data else b""


def expanded(frame: memoryview, nbytes: int) -> bytes:
    """The `nbytes` bytes in a frame.

    The library takes memory for the size that a frame declares, whatever its max_output_size says.

    Raises:
        WireError: before memory is taken for any other size.
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
    """Bytes of a part of `beside` plain bytes and `nbytes` compressed ones; dense is sent above its size."""
    most = beside + (nbytes + (nbytes >> 8) + SLACK if nbytes else 0)
    return Bound(layer, beside, min(most, spec.dense_bytes + beside + SLACK))


def shuffled(array: Array) -> bytes:
    """All first bytes of the values, then all second bytes, ..."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1, array.itemsize).T.tobytes()


def unshuffled(data: bytes, dtype: np.dtype[np.generic]) -> Array:
    """The values of shuffled bytes, in an array of its own."""
    columns = np.frombuffer(data, dtype=np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(columns.T).reshape(-1).view(dtype)
