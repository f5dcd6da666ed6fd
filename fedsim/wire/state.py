"""States as bytes: the same values that the wire carries, for files and digests; no pickle.

A state is a frozen dataclass of tensors, numbers, strings, None, tuples and nested such dataclasses.
Decoding is directed by the class's annotations and covered by a checksum, so a damaged or foreign
file raises WireError and never becomes half a state.

bytes = b"FEDSTATE" | xxh3_64 of the rest | header length (u32) | msgpack header | tensors, in order
"""

from __future__ import annotations

import struct
import types
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import torch
import xxhash
from torch import Tensor

from fedsim.errors import UsageError, WireError
from fedsim.wire.codecs import from_bytes, raw_bytes

MAGIC = b"FEDSTATE"
_DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "u8": torch.uint8,
    "i64": torch.int64,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
S = TypeVar("S")


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    """`value` with every tensor replaced by its description."""
    if isinstance(value, Tensor):
        if value.dtype not in _NAMES:
            raise UsageError(f"a state cannot hold a tensor of {value.dtype}")
        tensors.append(value)
        return [_NAMES[value.dtype], list(value.shape)]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name), tensors) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(v, tensors) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(f"a state cannot hold a {type(value).__name__}")


def encode_state(state: object) -> bytes:
    """The bytes of a state; equal states have equal bytes."""
    tensors: list[Tensor] = []
    header = msgspec.msgpack.encode(_plain(state, tensors))
    hashed = xxhash.xxh3_64()
    chunks: list[bytes | memoryview] = [struct.pack(">I", len(header)), header]
    chunks += [raw_bytes(t.cpu()) for t in tensors]
    for chunk in chunks:
        hashed.update(chunk)
    return b"".join([MAGIC, struct.pack(">Q", hashed.intdigest()), *chunks])


def decode_state(kind: type[S], data: bytes, whose: str) -> S:
    """The state of class `kind`. Errors: WireError, beginning with `whose`."""
    if data[:8] != MAGIC or len(data) < 20:
        raise WireError(f"{whose}: not a fedsim state")
    body = memoryview(data)[16:]
    if struct.unpack(">Q", data[8:16])[0] != xxhash.xxh3_64_intdigest(body):
        raise WireError(f"{whose}: the checksum does not match; the state is damaged")
    (length,) = struct.unpack(">I", body[:4])
    try:
        header = msgspec.msgpack.decode(body[4 : 4 + length])
    except msgspec.DecodeError as e:
        raise WireError(f"{whose}: unreadable header: {e}") from None
    reader = _Reader(body[4 + length :], whose)
    state: S = reader.value(kind, header, kind.__qualname__)
    reader.finish()
    return state


class _Reader:
    """Builds values from a plain header, directed by annotations, taking tensors off one buffer."""

    def __init__(self, data: memoryview, whose: str) -> None:
        self.data, self.at, self.whose = data, 0, whose

    def finish(self) -> None:
        if self.at != self.data.nbytes:
            raise WireError(f"{self.whose}: {self.data.nbytes - self.at} bytes too many")

    def _fail(self, where: str, hint: Any) -> WireError:
        return WireError(f"{self.whose}: {where} is not a {hint}")

    def value(self, hint: Any, plain: Any, where: str) -> Any:
        origin = get_origin(hint)
        if origin is Annotated:
            return self.value(get_args(hint)[0], plain, where)
        if origin in (Union, types.UnionType):
            if plain is None and type(None) in get_args(hint):
                return None
            for inner in (a for a in get_args(hint) if a is not type(None)):
                at = self.at
                try:
                    return self.value(inner, plain, where)
                except WireError:
                    self.at = at
            raise self._fail(where, hint)
        if hint is Tensor:
            return self._tensor(plain, where)
        if origin is tuple:
            inner = get_args(hint)[0]
            if not isinstance(plain, list):
                raise self._fail(where, hint)
            return tuple(self.value(inner, v, f"{where}[{i}]") for i, v in enumerate(plain))
        if is_dataclass(hint) and isinstance(hint, type):
            hints = get_type_hints(hint, include_extras=True)
            if not isinstance(plain, dict) or list(plain) != [f.name for f in fields(hint)]:
                raise self._fail(where, hint.__qualname__)
            return hint(**{n: self.value(hints[n], v, f"{where}.{n}") for n, v in plain.items()})
        if hint in (bool, int, float, str) and type(plain) is hint:
            return plain
        raise self._fail(where, hint)

    def _tensor(self, plain: Any, where: str) -> Tensor:
        if not isinstance(plain, list) or len(plain) != 2 or plain[0] not in _DTYPES:
            raise self._fail(where, "tensor")
        dtype, shape = _DTYPES[plain[0]], tuple(plain[1])
        if not all(isinstance(n, int) and n >= 0 for n in shape):
            raise self._fail(where, "shape")
        count = 1
        for n in shape:
            count *= n
        end = self.at + count * dtype.itemsize
        if end > self.data.nbytes:
            raise WireError(f"{self.whose}: {where} is cut off")
        part = self.data[self.at : end]
        self.at = end
        if not count:
            return torch.empty(shape, dtype=dtype)
        return from_bytes(part, shape, dtype)
