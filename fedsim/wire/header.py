"""The header of an envelope: its types, and functions that write a header and read an untrusted one.

frame   = 8 bytes xxh3_64 of the rest | msgpack array [version, kind, run, numbers, fields]
numbers = binary ">8q": epoch, round, exchange, client, base, folds, asked, micros
field   = [name, codec, dtype, shape as binary ">q" per dimension, parts]
part    = [layer, binary ">qQ": bytes, xxh3_64]

Every integer except the version has a fixed width, so the size of a header depends only on the schema, not on
the values. Otherwise the ledger would vary from run to run.

msgpack reads a header value by value, following this layout and within limits, so that a hostile header
cannot create large objects. msgspec then checks the types, and the numbers are checked against their ranges.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Annotated, Any

import msgpack
import msgspec
import xxhash
from msgspec import Meta

from fedsim.errors import WireError
from fedsim.printable import one_line

VERSION = 3
MAX_HEADER = 64 * 1024
MAX_NAME = 64
MAX_FIELDS = 64
MAX_PARTS = 8
MAX_DIMS = 8
NONE = -1
"""'No client' or 'no round' in a header."""

Buffer = bytes | memoryview
_Name = Annotated[str, Meta(max_length=MAX_NAME)]
_NUMBERS = struct.Struct(">8q")
_SIZE_AND_DIGEST = struct.Struct(">qQ")
_ARRAYS = frozenset({*range(0x90, 0xA0), 0xDC, 0xDD})
"""The first bytes of a msgpack array."""


class PartHeader(msgspec.Struct, frozen=True):
    """One frame of a field: its layer ('values' or 'indices'), size and checksum."""

    layer: str
    nbytes: int
    digest: int


class FieldHeader(msgspec.Struct, frozen=True):
    """One field: its name, encoding and shape, and its frames."""

    name: str
    codec: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[PartHeader, ...]


class Header(msgspec.Struct, frozen=True):
    """The subject of an envelope, and the headers of its fields.

    `base` is the version of the client's state that the task starts from. `micros` is the sender's computing
    time in microseconds. `folds` is the number of rounds so far with at least one aggregated upload. `asked`
    is the number of clients that get the round's broadcast.
    """

    version: int
    kind: str
    run: str
    epoch: int = 1
    round: int = NONE
    exchange: int = NONE
    client: int = NONE
    base: int = NONE
    micros: int = 0
    fields: tuple[FieldHeader, ...] = ()
    folds: int = 0
    asked: int = 0


class _WirePart(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A part in the msgpack layout. _WireField is the same for a field, and _WireHeader for a header."""

    layer: _Name
    numbers: Annotated[bytes, Meta(min_length=_SIZE_AND_DIGEST.size, max_length=_SIZE_AND_DIGEST.size)]


class _WireField(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    name: _Name
    codec: _Name
    dtype: _Name
    shape: Annotated[bytes, Meta(max_length=8 * MAX_DIMS)]
    parts: Annotated[tuple[_WirePart, ...], Meta(max_length=MAX_PARTS)]


class _WireHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    version: int
    kind: _Name
    run: _Name
    numbers: Annotated[bytes, Meta(min_length=_NUMBERS.size, max_length=_NUMBERS.size)]
    fields: Annotated[tuple[_WireField, ...], Meta(max_length=MAX_FIELDS)]


_packer = msgpack.Packer(use_bin_type=True)


def _plain(field: FieldHeader) -> list[Any]:
    """Convert a field's header to the lists, strings and binaries that msgpack carries."""
    parts = [[p.layer, _SIZE_AND_DIGEST.pack(p.nbytes, p.digest)] for p in field.parts]
    shape = struct.pack(f">{len(field.shape)}q", *field.shape)
    return [field.name, field.codec, field.dtype, shape, parts]


@lru_cache(maxsize=8)
def _encoded_fields(fields: tuple[FieldHeader, ...]) -> bytes:
    """Encode the headers of fields; cached, because many envelopes contain the same broadcast."""
    encoded: bytes = _packer.pack([_plain(f) for f in fields])
    return encoded


def digest(data: Buffer) -> int:
    return xxhash.xxh3_64_intdigest(data)


def write_header(header: Header) -> bytes:
    """Encode a header as its frame."""
    h = header
    numbers = _NUMBERS.pack(h.epoch, h.round, h.exchange, h.client, h.base, h.folds, h.asked, h.micros)
    start = [_packer.pack(value) for value in (h.version, h.kind, h.run, numbers)]
    body = b"".join((_packer.pack_array_header(5), *start, _encoded_fields(h.fields)))
    return struct.pack(">Q", digest(body)) + body


def read_header(head: bytes, owner: str) -> Header:
    """Decode the header in an untrusted frame; the caller has checked the size of the frame."""
    if len(head) < 9 or struct.unpack(">Q", head[:8])[0] != digest(head[8:]):
        raise WireError(f"{owner}: the header's checksum does not match; it was damaged on the way")
    try:
        return _read(head[8:], owner)
    except (ValueError, msgpack.UnpackException, msgspec.ValidationError) as e:
        reason = str(e) or type(e).__name__
        raise WireError(f"{owner}: the header is not of this format: {reason}") from None


class _Reader:
    """Reads the msgpack of one header value by value.

    The caller specifies where an array is allowed. Elsewhere, the first byte of an array is refused, so that
    nested arrays are never built: 64 KiB of them would become megabytes of objects. Maps and extensions must
    be empty. Every method raises ValueError for malformed bytes, and msgpack.OutOfData for truncated bytes.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._unpacker = msgpack.Unpacker(
            max_buffer_size=MAX_HEADER,
            max_str_len=4 * MAX_NAME,  # bytes of UTF-8
            max_bin_len=max(_NUMBERS.size, 8 * MAX_DIMS),
            max_array_len=MAX_FIELDS,
            max_map_len=0,
            max_ext_len=0,
            strict_map_key=True,
            raw=False,
        )
        self._unpacker.feed(body)

    def value(self) -> Any:
        """Read the next value, which must not be an array."""
        at = self._unpacker.tell()
        if at < len(self._body) and self._body[at] in _ARRAYS:
            raise ValueError(f"an array at byte {at}, where a single value belongs")
        return self._unpacker.unpack()

    def array(self, most: int) -> range:
        """Read the length of an array, and return the range of its indices; the items follow."""
        length = self._unpacker.read_array_header()
        if length > most:
            raise ValueError(f"an array of {length} items, where at most {most} may stand")
        return range(length)

    def exactly(self, expected: int) -> None:
        if len(self.array(expected)) != expected:
            raise ValueError(f"an array shorter than its {expected} items")

    def field(self) -> list[Any]:
        self.exactly(5)
        start = [self.value() for _ in range(4)]
        return [*start, [self.part() for _ in self.array(MAX_PARTS)]]

    def part(self) -> list[Any]:
        self.exactly(2)
        return [self.value(), self.value()]

    def end(self) -> None:
        if self._unpacker.tell() != len(self._body):
            raise ValueError(f"{len(self._body) - self._unpacker.tell()} bytes behind its end")


def _read(body: bytes, owner: str) -> Header:
    reader = _Reader(body)
    length = len(reader.array(MAX_FIELDS))
    version = reader.value() if length else None
    if type(version) is int and version != VERSION:
        raise WireError(f"{owner}: wire format {version}; this side speaks {VERSION}")
    if length != 5:
        raise ValueError(f"an array of {length} items instead of 5")
    start = [reader.value() for _ in range(3)]
    fields = [reader.field() for _ in reader.array(MAX_FIELDS)]
    reader.end()
    wire = msgspec.convert([version, *start, fields], _WireHeader, strict=True, builtin_types=(bytes,))
    return _checked(wire)


def _checked(wire: _WireHeader) -> Header:
    epoch, round, exchange, client, base, folds, asked, micros = _NUMBERS.unpack(wire.numbers)
    if min(folds, asked, micros) < 0:
        raise ValueError(f"{folds} folds, {asked} asked and {micros} micros; none is ever negative")
    names = (s for f in wire.fields for s in (f.name, f.codec, f.dtype, *(p.layer for p in f.parts)))
    for name in (wire.kind, wire.run, *names):  # names appear in the ledger and in error messages
        if one_line(name) != name:
            raise ValueError(f"{name!r} has control characters")
    fields = tuple(_checked_field(f) for f in wire.fields)
    if len({f.name for f in fields}) != len(fields):
        raise ValueError("two of its fields have the same name")
    return Header(
        wire.version, wire.kind, wire.run, epoch, round, exchange, client, base, micros, fields, folds, asked
    )


def _checked_field(wire: _WireField) -> FieldHeader:
    if len(wire.shape) % 8:
        raise ValueError(f"field {wire.name!r} has a shape of {len(wire.shape)} bytes")
    shape = struct.unpack(f">{len(wire.shape) // 8}q", wire.shape)
    parts = []
    least = min(shape, default=0)
    for part in wire.parts:
        nbytes, checksum = _SIZE_AND_DIGEST.unpack(part.numbers)
        least = min(least, nbytes)
        parts.append(PartHeader(part.layer, nbytes, checksum))
    if least < 0:
        raise ValueError(f"field {wire.name!r} has a negative size")
    return FieldHeader(wire.name, wire.codec, wire.dtype, shape, tuple(parts))
