"""Encode states as bytes, for files and digests. Tensors are encoded as on the wire, without pickle.

A state is a frozen dataclass of tensors, numbers, strings, None, tuples and nested dataclasses of this kind.
Decoding verifies a checksum and checks every value against the annotations of the class. A damaged or foreign
file raises WireError; a partial state is never returned.

bytes = b"FEDSTATE" | xxh3_64 of the rest | header length (u32) | msgpack header | tensors, in order
"""

from __future__ import annotations

import struct
import types
from dataclasses import fields, is_dataclass
from functools import cache
from math import prod
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import torch
import xxhash
from torch import Tensor

from fedsim.errors import UsageError, WireError
from fedsim.wire.codecs import from_bytes, raw_bytes
from fedsim.wire.schema import DTYPES
from fedsim.wire.state_header import MAGIC, MAX_HEADER, opened_state

_DTYPES = {**DTYPES, "bool": torch.bool}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
MAX_DIMS = 8
S = TypeVar("S")


def _plain(value: Any, hint: Any, tensors: list[Tensor]) -> Any:
    """Replace every tensor in `value` by its description, and append the tensor to `tensors`.

    If a field allows float but not int, an int is written as a float: equal states must have equal bytes, and
    the decoder accepts no int there.
    """
    accepted = _alternatives(hint)
    if isinstance(value, Tensor):
        if value.dtype not in _NAMES or value.dim() > MAX_DIMS:
            raise UsageError(f"a state cannot hold a tensor of {value.dtype} with {value.dim()} dimensions")
        tensors.append(value)
        return [_NAMES[value.dtype], list(value.shape)]
    if is_dataclass(value) and not isinstance(value, type):
        hints = _hints(type(value))
        return {f.name: _plain(getattr(value, f.name), hints[f.name], tensors) for f in fields(value)}
    if isinstance(value, tuple):
        inner = next((_inner(h, len(value)) for h in accepted if get_origin(h) is tuple), (Any,) * len(value))
        return [_plain(v, h, tensors) for v, h in zip(value, inner, strict=True)]
    if type(value) is int and float in accepted and int not in accepted:
        return float(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UsageError(f"a state cannot hold a {type(value).__name__}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types that an annotation allows; Annotated and unions are unpacked."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _alternatives(get_args(hint)[0])
    if origin in (Union, types.UnionType):
        return tuple(a for inner in get_args(hint) for a in _alternatives(inner))
    return (hint,)


def _inner(hint: Any, count: int) -> tuple[Any, ...]:
    """Return one annotation for each of the `count` items of a tuple[X, ...] or a tuple[X, Y]."""
    inner = get_args(hint)
    if inner[-1:] == (Ellipsis,):
        return inner[:1] * count
    if len(inner) != count:
        raise UsageError(f"{count} items where {hint} is annotated")
    return inner


def state_chunks(state: object) -> list[bytes | memoryview]:
    """Return the bytes of a state as a list of chunks, without copying the tensors.

    Raises:
        UsageError: If a value has an unsupported type, or if too many values are outside tensors.
    """
    tensors: list[Tensor] = []
    try:
        header = msgspec.msgpack.encode(_plain(state, type(state), tensors))
    except OverflowError:
        raise UsageError("a state cannot hold an integer of more than 64 bits") from None
    if len(header) > MAX_HEADER:
        raise UsageError(f"a state with a header of {len(header)} bytes; keep what is many in a tensor")
    chunks: list[bytes | memoryview] = [struct.pack(">I", len(header)), header]
    chunks += [raw_bytes(t.cpu()) for t in tensors]
    hashed = xxhash.xxh3_64()
    for chunk in chunks:
        hashed.update(chunk)
    return [MAGIC + struct.pack(">Q", hashed.intdigest()), *chunks]


def encode_state(state: object) -> bytes:
    """Return the bytes of a state; equal states have equal bytes."""
    return b"".join(state_chunks(state))


def decode_state(kind: type[S], data: bytes | memoryview, owner: str) -> S:
    """Decode a state of class `kind`."""
    header, body = opened_state(data, owner)
    reader = _Reader(body, owner)
    state: S = reader.value(kind, header, kind.__qualname__)
    reader.finish()
    return state


class _Reader:
    """Builds the values of a state from its decoded header and one buffer of tensors, read in order."""

    def __init__(self, data: memoryview, owner: str) -> None:
        self.data, self.at, self.owner = data, 0, owner

    def finish(self) -> None:
        if self.at != self.data.nbytes:
            raise WireError(f"{self.owner}: {self.data.nbytes - self.at} bytes too many")

    def _fail(self, where: str, hint: Any) -> WireError:
        return WireError(f"{self.owner}: {where} is not a {getattr(hint, '__name__', hint)}")

    def value(self, hint: Any, plain: Any, where: str) -> Any:
        origin = get_origin(hint)
        if origin is Annotated:
            return self.value(get_args(hint)[0], plain, where)
        if origin in (Union, types.UnionType):
            for inner in get_args(hint):
                at = self.at
                try:
                    return self.value(inner, plain, where)
                except WireError:
                    self.at = at
            raise self._fail(where, hint)
        if hint is type(None) and plain is None:
            return None
        if hint is Tensor:
            return self._tensor(plain, where)
        if origin is tuple:
            if not isinstance(plain, list):
                raise self._fail(where, hint)
            try:
                inner = _inner(hint, len(plain))
            except UsageError:
                raise self._fail(where, hint) from None
            pairs = zip(inner, plain, strict=True)
            return tuple(self.value(h, v, f"{where}[{i}]") for i, (h, v) in enumerate(pairs))
        if is_dataclass(hint) and isinstance(hint, type):
            hints = _hints(hint)
            if not isinstance(plain, dict) or list(plain) != [f.name for f in fields(hint)]:
                raise self._fail(where, hint.__qualname__)
            return hint(**{n: self.value(hints[n], v, f"{where}.{n}") for n, v in plain.items()})
        if hint in (bool, int, float, str) and type(plain) is hint:
            return plain
        raise self._fail(where, hint)

    def _tensor(self, plain: Any, where: str) -> Tensor:
        match plain:
            case [str(name), list(sizes)] if name in _DTYPES and len(sizes) <= MAX_DIMS:
                dtype, shape = _DTYPES[name], tuple(sizes)
            case _:
                raise self._fail(where, "tensor")
        if not all(type(n) is int and n >= 0 for n in shape) or prod(n for n in shape if n) >= 2**62:
            raise self._fail(where, "shape")
        count = prod(shape)
        end = self.at + count * dtype.itemsize
        if end > self.data.nbytes:
            raise WireError(f"{self.owner}: {where} is cut off")
        part = self.data[self.at : end]
        self.at = end
        if dtype is torch.bool and bytes(part).strip(b"\0\1"):
            raise self._fail(where, "truth value")
        return from_bytes(part, shape, dtype)
