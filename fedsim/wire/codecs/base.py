"""The classes Codec and Spec, and conversions between tensors, arrays and bytes."""

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
"""One frame on the wire: its layer ('values' or 'indices') and its bytes."""

Array = np.ndarray[Any, np.dtype[Any]]

Packer = Callable[[Tensor, "Spec", Tensor | None], tuple[Part, ...] | None]
Unpacker = Callable[[tuple[memoryview, ...], "Spec", Tensor | None], Tensor]
ONE_SIGN = frozenset({"precision", "curvature"})
INCREMENTS = frozenset({"delta", "gradient"})
"""Names of field kinds (fedsim.wire.schema.FieldKind) to which some codecs are limited."""


@dataclass(frozen=True)
class Spec:
    """The shape and dtype of a tensor and the positions of its layers, which both sides know.

    positive: True if the receiver refuses values <= 0; a codec must not replace them by positive values.
    scale: a precision of the same shape that both sides have, for `scaled` codecs. stream: the random stream
    of codecs that draw random numbers.

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
        """Return a spec. Without a layout, the tensor is one layer without a name.

        Raises:
            WireError: If the layout and the shape have different sizes.
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
    """The layer of a part, and its smallest and largest size in bytes, which are equal if the size is fixed.

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
    """An encoding: two pure functions, and the sizes that a receiver checks before it parses any part.

    Attributes:
        packer: Encodes a tensor; returns None for values that it cannot represent, which are then sent dense.
        bounds: Returns the limits of the sizes of all parts.
        lossy: True if the decoded tensor may differ from the original.
        kinds: The kinds of field that the codec accepts; None: all.
        why: The reason for `kinds`, for error messages.
        delta: True if both sides need the reference `ref`, a tensor of the same shape that both have.
        may_refer: True if both sides use a reference when there is one.
        scaled: True if both sides need the spec's scale.
        bias: A bound of |log| of a decoded precision over the exact one where the codec rounds to the
            nearest, so that all clients err alike; inf if it leaves values out, 0 if exact or unbiased.
        upwards: The codec that takes its place in uploads; "" for itself.
        last: True if the reference is the last broadcast; `alone` is the codec for receivers without it.
        own: True if the reference is the last broadcast that the receiving client got.
        entropy: Returns the zeroth-order entropy of an entropy-coded part 'values', in bits.
        step: Returns the step of a mean in the part 'values', in standard deviations.

    Examples:
        A codec that sends only the sign of a value, as one byte:

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
    bias: float = 0.0
    upwards: str = ""
    last: bool = False
    own: bool = False
    alone: str = ""
    entropy: Callable[[memoryview, Spec], float] | None = None
    step: Callable[[memoryview], float] | None = None

    def pack(self, x: Tensor, spec: Spec | None = None, ref: Tensor | None = None) -> tuple[Part, ...] | None:
        """Encode `x` and return its parts, or None if the codec cannot represent its values.

        Raises:
            UsageError: If the codec does not encode this dtype, or if it needs a reference and gets none.
        """
        spec = spec or Spec.of(tuple(x.shape), x.dtype)
        if (self.lossy or self.delta) and not x.is_floating_point():
            raise UsageError(f"codec {self.name!r} encodes floating-point fields only")
        return self.packer(x, spec, self._checked(ref, spec))

    def unpack(self, parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None = None) -> Tensor:
        """Decode parts whose number, layers and sizes agree with `bounds`.

        Raises:
            WireError: If the parts are damaged or do not fit the spec.
        """
        if (self.lossy or self.delta) and not spec.dtype.is_floating_point:
            raise WireError(f"codec {self.name!r} encodes floating-point fields only")
        return self.unpacker(parts, spec, self._checked(ref, spec))

    def sizes(self, count: int, itemsize: int) -> tuple[tuple[str, int], ...]:
        """Return the largest size of every part (exact for most codecs) for one layer of `count` values."""
        dtype = next(d for d in (torch.float32, torch.float64, torch.uint8) if d.itemsize == itemsize)
        return tuple((b.layer, b.most) for b in self.bounds(Spec.of((count,), dtype)))

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
    """Return the bytes of a CPU tensor, without a copy if it is contiguous."""
    array: np.ndarray[tuple[int], np.dtype[np.uint8]] = (
        x.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    )
    return array.data


def from_bytes(data: memoryview, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return `data` as a tensor; treat it as read-only. It shares memory with `data` if the buffer is
    writable and its address is a multiple of the dtype's size."""
    array = np.frombuffer(data, dtype=np.uint8)
    if not array.size:  # torch cannot view an empty array as another dtype
        return torch.empty(shape, dtype=dtype)
    if not array.flags.writeable or array.ctypes.data % dtype.itemsize:  # torch has no read-only tensors
        array = array.copy()
    return torch.from_numpy(array).view(dtype).reshape(shape)


def joined(*arrays: Array) -> memoryview:
    return memoryview(b"".join(a.tobytes() for a in arrays))


def flat32(x: Tensor) -> Array:
    """Return the values of a tensor as a flat float32 array."""
    array: Array = x.detach().reshape(-1).to(torch.float32).numpy()
    return array


def tensor_of(array: Array, spec: Spec) -> Tensor:
    """Convert an array to a tensor with the spec's shape and dtype, which may share the array's memory."""
    return torch.from_numpy(array).reshape(spec.shape).to(spec.dtype)
