"""Codecs: tensors as bytes, and the specs of tensors that codecs use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.errors import UsageError, WireError
from fedsim.learning.params import Layout, Slice
from fedsim.seeds import RandomStream

Part = tuple[str, memoryview]
"""Layer ('values' or 'indices') and bytes: one frame on the wire."""

Array = np.ndarray[Any, np.dtype[Any]]

Packer = Callable[[Tensor, "Spec", Tensor | None], tuple[Part, ...] | None]
Unpacker = Callable[[tuple[memoryview, ...], "Spec", Tensor | None], Tensor]
ONE_SIGN = frozenset({"precision", "curvature"})
INCREMENTS = frozenset({"delta", "gradient"})
"""Kinds of field (fedsim.wire.schema.Kind) for which some codecs are made."""


@dataclass(frozen=True)
class Spec:
    """The expected tensor, which both sides know: shape, dtype, and where its layers lie in it.

    positive: the receiver refuses values <= 0, so a codec must not hide one. scale: a precision that both
    sides have, of the same shape, for a codec that is `scaled`. stream: for one that is `noisy`.

    Examples:
        >>> import fedsim, torch
        >>> spec = fedsim.Spec.of((3, 2), torch.float32)
        >>> spec.count, spec.dense_bytes
        (6, 24)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    positive: bool = False
    scale: Tensor | None = field(default=None, compare=False, repr=False)
    stream: RandomStream | None = None

    @staticmethod
    def of(
        shape: tuple[int, ...], dtype: torch.dtype, layout: Layout | None = None, *, positive: bool = False
    ) -> Spec:
        """Without a layout the tensor is one anonymous layer.

        Raises:
            WireError: for one of another size.
        """
        count = math.prod(shape)
        if layout is None:
            layout = Layout((Slice("", shape, 0, count),))
        if layout.size != count:
            raise WireError(f"{count} values where the layout has {layout.size}")
        return Spec(shape, dtype, layout, positive)

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def dense_bytes(self) -> int:
        return self.count * self.dtype.itemsize


class Bound(NamedTuple):
    """Layer of a part and the bytes it may have; least == most where the layout says it exactly.

    Examples:
        >>> import fedsim
        >>> fedsim.Bound("values", least=8, most=8)
        Bound(layer='values', least=8, most=8)
    """

    layer: str
    least: int
    most: int


@dataclass(frozen=True)
class Codec:
    """One encoding: a pure pair and the sizes that a receiver checks before it parses anything.

    lossy: the decoded tensor may differ from what was packed. kinds: the only kinds of field that it
    takes, if not all, and the reason. delta: both sides need `ref`, a tensor of the same shape that both
    have; may_refer: they use it if there is one. scaled: both sides need the spec's scale. noisy: they
    need its stream. last: `ref` is the last broadcast, and `alone` is the codec for receivers without it;
    own: it is the last one that the receiving client got. packer returns None for values that it cannot
    represent, which are then sent dense. entropy: bits of zeroth-order entropy of an entropy-coded part
    'values'. step: the step of a mean in that part, in standard deviations.

    The part 'values' is, before any compression, `side` bytes per layer, then `width` bytes per value
    (None: as many as its dtype has) of `kept` entries of each layer (None: of all).

    Examples:
        One byte a value, the sign alone:

        >>> import fedsim, torch
        >>> def pack(x, spec, ref):
        ...     return (("values", memoryview((x > 0).numpy().astype("uint8").tobytes())),)
        >>> def unpack(parts, spec, ref):
        ...     bits = torch.frombuffer(bytearray(parts[0]), dtype=torch.uint8)
        ...     return (2.0 * bits - 1).to(spec.dtype).reshape(spec.shape)
        >>> def bounds(spec):
        ...     return (fedsim.Bound("values", spec.count, spec.count),)
        >>> signs = fedsim.Codec("signs", pack, unpack, bounds, lossy=True)
        >>> x = torch.tensor([0.3, -2.0])
        >>> signs.unpack(tuple(data for _, data in signs.pack(x)), fedsim.Spec.of((2,), x.dtype))
        tensor([ 1., -1.])
    """

    name: str
    packer: Packer
    unpacker: Unpacker
    bounds: Callable[[Spec], tuple[Bound, ...]]
    lossy: bool = False
    kinds: frozenset[str] | None = None
    why: str = ""
    delta: bool = False
    may_refer: bool = False
    scaled: bool = False
    noisy: bool = False
    last: bool = False
    own: bool = False
    alone: str = ""
    side: int = 0
    width: int | None = None
    kept: Callable[[int], int] | None = None
    entropy: Callable[[memoryview, Spec], float] | None = None
    step: Callable[[memoryview], float] | None = None

    def pack(self, x: Tensor, spec: Spec | None = None, ref: Tensor | None = None) -> tuple[Part, ...] | None:
        """The parts of `x`.

        Raises:
            UsageError: for a dtype that the codec does not encode.
        """
        spec = spec or Spec.of(tuple(x.shape), x.dtype)
        if (self.lossy or self.delta) and not x.is_floating_point():
            raise UsageError(f"codec {self.name!r} encodes floating-point fields only")
        return self.packer(x, spec, self._checked(ref, spec))

    def unpack(self, parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None = None) -> Tensor:
        """The tensor of parts whose number, layers and sizes agree with `bounds`.

        Raises:
            WireError: if it is damaged or does not fit.
        """
        if (self.lossy or self.delta) and not spec.dtype.is_floating_point:
            raise WireError(f"codec {self.name!r} encodes floating-point fields only")
        return self.unpacker(parts, spec, self._checked(ref, spec))

    def sizes(self, count: int, itemsize: int) -> tuple[tuple[str, int], ...]:
        """Largest bytes of every part (of most codecs the exact ones) for one layer of `count` values."""
        dtype = next(d for d in (torch.float32, torch.float64, torch.uint8) if d.itemsize == itemsize)
        return tuple((b.layer, b.most) for b in self.bounds(Spec.of((count,), dtype)))

    def numbers(self, spec: Spec) -> int:
        """The number of values in a tensor's encoding."""
        return sum(self.kept(s.size) if self.kept else s.size for s in spec.layout.slices)

    def _checked(self, ref: Tensor | None, spec: Spec) -> Tensor | None:
        if not self.delta and not self.may_refer:
            return None
        if self.may_refer and (ref is None or tuple(ref.shape) != spec.shape):
            return None
        if ref is None or tuple(ref.shape) != spec.shape:
            raise UsageError(f"codec {self.name!r} needs the same field of the broadcast to refer to")
        return ref.to(spec.dtype)


def fixed(layer: str, nbytes: int) -> Bound:
    return Bound(layer, nbytes, nbytes)


def raw_bytes(x: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    array: np.ndarray[tuple[int], np.dtype[np.uint8]] = (
        x.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    )
    return array.data


def from_bytes(data: memoryview, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor over `data`, without a copy where the buffer is writable and lies at a multiple of the dtype's
    size (treat it as read-only)."""
    array = np.frombuffer(data, dtype=np.uint8)
    if not array.size:  # torch cannot view an empty array as another dtype
        return torch.empty(shape, dtype=dtype)
    if not array.flags.writeable or array.ctypes.data % dtype.itemsize:  # torch has no read-only tensors
        array = array.copy()
    return torch.from_numpy(array).view(dtype).reshape(shape)


def joined(*arrays: Array) -> memoryview:
    """The bytes of arrays, one behind the other."""
    return memoryview(b"".join(a.tobytes() for a in arrays))


def flat32(x: Tensor) -> Array:
    """The values of a tensor as a flat float32 array."""
    array: Array = x.detach().reshape(-1).to(torch.float32).numpy()
    return array


def tensor_of(array: Array, spec: Spec) -> Tensor:
    """A fresh array of the spec's size as the tensor that the receiver gets."""
    return torch.from_numpy(array).reshape(spec.shape).to(spec.dtype)
