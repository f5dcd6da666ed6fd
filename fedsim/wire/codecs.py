"""Encodings of one tensor: a table of pure pairs, pack and unpack.

pack(x) returns the parts of the encoding by layer ('values', 'indices'), each one frame on the wire;
unpack gets the parts back with the dense shape and dtype and returns the tensor. Part sizes are
functions of the dense size wherever they are fixed, so that a receiver checks them before parsing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.errors import UsageError, WireError, unknown
from fedsim.wire.messages import DTYPES

Part = tuple[str, memoryview]


@dataclass(frozen=True)
class Codec:
    """One encoding. lossy: the decoded tensor may differ from what was packed.

    sizes(count, itemsize) gives the exact bytes of every part for a tensor of `count` elements.
    """

    name: str
    about: str
    lossy: bool
    pack: Callable[[Tensor], tuple[Part, ...]]
    unpack: Callable[[tuple[memoryview, ...], tuple[int, ...], torch.dtype], Tensor]
    sizes: Callable[[int, int], tuple[tuple[str, int], ...]]


def raw_bytes(x: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    array: np.ndarray[tuple[int], np.dtype[np.uint8]] = (
        x.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    )
    return array.data


def from_bytes(data: memoryview, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor over `data` without a copy where the buffer is writable (treat it as read-only)."""
    array = np.frombuffer(data, dtype=np.uint8)
    if not array.size:  # torch cannot view an empty array as another dtype
        return torch.empty(shape, dtype=dtype)
    if not array.flags.writeable:  # torch has no read-only tensors
        array = array.copy()
    return torch.from_numpy(array).view(dtype).reshape(shape)


def _dense(x: Tensor) -> tuple[Part, ...]:
    return (("values", raw_bytes(x)),)


def _undense(parts: tuple[memoryview, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return from_bytes(parts[0], shape, dtype)


def _half(name: str, half: torch.dtype, about: str) -> Codec:
    def pack(x: Tensor) -> tuple[Part, ...]:
        if not x.is_floating_point():
            raise UsageError(f"codec {name!r} encodes floating-point fields only")
        return (("values", raw_bytes(x.to(half))),)

    def unpack(parts: tuple[memoryview, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return from_bytes(parts[0], shape, half).to(dtype)

    return Codec(name, about, True, pack, unpack, lambda count, _: (("values", 2 * count),))


CODECS: Mapping[str, Codec] = {
    c.name: c
    for c in (
        Codec(
            "dense",
            "every value as it is (float32: 4 bytes each), bit for bit",
            False,
            _dense,
            _undense,
            lambda count, itemsize: (("values", count * itemsize),),
        ),
        _half("bf16", torch.bfloat16, "bfloat16, 2 bytes a value, relative error at most 0.4 %"),
        _half("f16", torch.float16, "IEEE half, 2 bytes a value, overflows above 65504"),
    )
}


def codec(name: str) -> Codec:
    """Look a codec up by name."""
    if name not in CODECS:
        raise unknown("codec", name, CODECS)
    return CODECS[name]


def unpack_checked(
    name: str, parts: tuple[Part, ...], shape: tuple[int, ...], dtype: str, whose: str
) -> Tensor:
    """Unpack after checking every part's layer and size against what the codec and the shape demand.

    Errors: WireError naming the field.
    """
    chosen = codec(name)
    count = 1
    for n in shape:
        count *= n
    expected = chosen.sizes(count, DTYPES[dtype].itemsize)
    if len(parts) != len(expected):
        raise WireError(f"{whose}: {len(parts)} frames where codec {name!r} sends {len(expected)}")
    for (given, part), (layer, size) in zip(parts, expected, strict=True):
        if given != layer:
            raise WireError(f"{whose}: a part of {given!r} where codec {name!r} sends {layer!r}")
        if part.nbytes != size:
            raise WireError(f"{whose}: {part.nbytes} bytes of {layer} where the layout demands {size}")
    return chosen.unpack(tuple(part for _, part in parts), shape, DTYPES[dtype])
