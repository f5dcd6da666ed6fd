"""An envelope is what crosses the wire: one header frame and the raw frames of its fields.

fedsim/wire/header.py has the layout of the header. Decoding is strict: a checksum covers every frame, sizes
come from the schema and the layout, and anything unexpected is a WireError before any value is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedsim.errors import WireError
from fedsim.learning.params import Layout
from fedsim.wire.codecs import Spec, codec, pack_or_dense, unpack_checked
from fedsim.wire.header import MAX_HEADER as MAX_HEADER
from fedsim.wire.header import NONE as NONE
from fedsim.wire.header import VERSION as VERSION
from fedsim.wire.header import Buffer as Buffer
from fedsim.wire.header import FieldHeader as FieldHeader
from fedsim.wire.header import Header as Header
from fedsim.wire.header import PartHeader as PartHeader
from fedsim.wire.header import digest as digest
from fedsim.wire.header import read_header, write_header
from fedsim.wire.schema import DTYPES, Dims, Field, optional_group, schema, values_of

M = TypeVar("M")


@dataclass(frozen=True)
class Envelope:
    """header as parsed, head as the bytes of its frame, frames as the buffers of all parts."""

    header: Header
    head: bytes
    frames: tuple[Buffer, ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of every frame: the header's, then the parts' (which the header announces)."""
        return [len(self.head), *(p.nbytes for f in self.header.fields for p in f.parts)]

    def total_bytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class Payload:
    """The encoded fields of a message: encoded once, sent in as many envelopes as there are clients."""

    fields: tuple[FieldHeader, ...]
    frames: tuple[Buffer, ...]


def pack(header: Header, frames: Sequence[Buffer] = ()) -> Envelope:
    """Turn a header and the frames it describes into an envelope."""
    return Envelope(header, write_header(header), tuple(frames))


def unpack(frames: Sequence[Buffer], owner: str) -> Envelope:
    """Parse and check everything that does not need a schema: sizes, version, checksums.

    Raises:
        WireError: beginning with `owner`.
    """
    if not frames:
        raise WireError(f"{owner}: an empty message")
    size = memoryview(frames[0]).nbytes
    if size > MAX_HEADER:
        raise WireError(f"{owner}: a header of {size} bytes; the limit is {MAX_HEADER}")
    head = bytes(frames[0])
    header = read_header(head, owner)
    parts = [(f.name, p) for f in header.fields for p in f.parts]
    if len(parts) != len(frames) - 1:
        raise WireError(f"{owner}: {len(frames) - 1} frames where the header lists {len(parts)}")
    for (name, part), frame in zip(parts, frames[1:], strict=True):
        nbytes = memoryview(frame).nbytes
        if nbytes != part.nbytes:
            raise WireError(f"{owner}: field {name!r} has {nbytes} bytes where the header says {part.nbytes}")
        if digest(frame) != part.digest:
            raise WireError(f"{owner}: field {name!r} fails its checksum; it was damaged on the way")
    return Envelope(header, head, tuple(frames[1:]))


def _as_tensor(value: Any, field: Field) -> Tensor:
    """The field's value in its wire dtype; float64 sums become float32 here and nowhere else."""
    dtype = DTYPES[field.kind.dtype]
    if isinstance(value, Tensor):
        return value if field.kind.stored and value.dtype == torch.uint8 else value.to(dtype)
    if field.members:
        value = [getattr(value, member.name) for member in field.members]
    return torch.tensor(value, dtype=torch.float64).to(dtype)


def references(down: object) -> dict[str, Tensor]:
    """What an upload may refer to: the tensors that every client got in this decoded broadcast."""
    return {f.name: getattr(down, f.name) for f in schema(type(down)) if f.python is Tensor}


def field_spec(f: Field, shape: tuple[int, ...], dtype: str, layout: Layout | None) -> Spec:
    """What both sides know of a field: one over the parameters has the model's layers."""
    layers = layout if f.kind.dims == ("P",) else None
    return Spec.of(shape, DTYPES[dtype], layers, positive=f.kind.positive)


def encode(
    message: object,
    codecs: Mapping[str, str],
    dims: Dims,
    refs: Mapping[str, Tensor] | None = None,
    layout: Layout | None = None,
) -> Payload:
    """Encode every field of a message; `codecs` maps field names to codecs (others are dense).

    refs: of an upload, `references` of its broadcast; layout: the layers of fields (P,), else one.

    Raises:
        WireError: if a tensor's shape is not what its schema and `dims` say (a defect of the algorithm that
            made it).
    """
    headers, frames = [], []
    for f, value in values_of(message):
        tensor = _as_tensor(value, f)
        shape = tuple(tensor.shape)
        if not f.fits(shape, dims):
            raise WireError(
                f"{type(message).__qualname__}.{f.name} has shape {shape}; "
                f"its kind {f.kind.name!r} says {f.shape(dims)}"
            )
        selected = codec(codecs.get(f.name, "dense"))
        dtype = "u8" if tensor.dtype == torch.uint8 else f.kind.dtype
        spec = field_spec(f, shape, dtype, layout)
        name, parts = pack_or_dense(selected, tensor, spec, (refs or {}).get(f.name))
        frames += [data for _, data in parts]
        described = tuple(PartHeader(layer, data.nbytes, digest(data)) for layer, data in parts)
        headers.append(FieldHeader(f.name, name, dtype, shape, described))
    return Payload(tuple(headers), tuple(frames))


def decode(
    message: type[M],
    envelope: Envelope,
    codecs: Mapping[str, str],
    dims: Dims,
    owner: str,
    refs: Mapping[str, Tensor] | None = None,
    layout: Layout | None = None,
) -> M:
    """The message of an envelope that unpack has checked, against schema, layout and codecs.

    refs and layout as the sender had them. Tensors are views of the received frames: treat them as read-only.

    Raises:
        WireError: beginning with `owner`; no partial message is ever returned.
    """
    expected, part = schema(message), optional_group(message)
    headers = envelope.header.fields
    names = [h.name for h in headers]
    whole = expected + (schema(part.message) if part else ())
    has_part = part is not None and names == [f.name for f in whole]
    if not has_part and names != [f.name for f in expected]:
        raise WireError(
            f"{owner}: fields {names} where {message.__qualname__} has {[f.name for f in expected]}"
        )
    values: dict[str, Any] = {}
    at = 0
    for f, h in zip(whole if has_part else expected, headers, strict=True):
        label = f"{owner}: field {f.name!r}"
        name = codec(codecs.get(f.name, "dense")).name
        if h.codec not in (name, "dense"):  # dense: what its codec would not have made smaller
            raise WireError(f"{label} is encoded as {h.codec!r}; this run uses {name!r}")
        if h.dtype not in f.dtypes:
            raise WireError(f"{label} has dtype {h.dtype!r}; its kind {f.kind.name!r} has {f.kind.dtype!r}")
        if not f.fits(h.shape, dims):
            raise WireError(f"{label} has shape {h.shape}; the model's layout says {f.shape(dims)}")
        frames = envelope.frames[at : at + len(h.parts)]
        at += len(h.parts)
        parts = tuple((p.layer, memoryview(frame)) for p, frame in zip(h.parts, frames, strict=True))
        spec = field_spec(f, h.shape, h.dtype, layout)
        tensor = unpack_checked(h.codec, parts, spec, label, (refs or {}).get(f.name))
        values[f.name] = tensor if f.python is Tensor else _scalar(tensor, f, label)
    _same_rows(expected, values, owner)
    if part is not None and has_part:
        _same_rows(schema(part.message), values, owner)
    if part is not None:
        own = {f.name: values.pop(f.name) for f in schema(part.message)} if has_part else None
        values[part.name] = None if own is None else part.message(**own)
    return message(**values)


def _same_rows(fields: tuple[Field, ...], values: Mapping[str, Any], owner: str) -> None:
    """Elastic fields of one message that share the name of their first size have it in common."""
    rows: dict[str, tuple[str, int]] = {}
    for f in fields:
        if f.kind.elastic:
            count = len(values[f.name])
            first, expected = rows.setdefault(f.kind.dims[0], (f.name, count))
            if count != expected:
                raise WireError(f"{owner}: {count} rows of {f.name!r} where {first!r} has {expected}")


def _scalar(tensor: Tensor, field: Field, label: str) -> Any:
    """A group, a float or a bool; a flag is one byte with two values, or it would not encode to itself."""
    if field.members:
        return field.python(*tensor.tolist())
    value = tensor.item()
    if field.python is bool and value not in (0, 1):
        raise WireError(f"{label} is a flag and has the value {value}")
    return field.python(value)


def decode_own(
    message: type[M],
    payload: Payload,
    codecs: Mapping[str, str],
    dims: Dims,
    refs: Mapping[str, Tensor] | None = None,
    layout: Layout | None = None,
) -> M:
    """What the other side will decode from a payload of ours: both sides compute from that."""
    envelope = Envelope(Header(VERSION, "own", "", fields=payload.fields), b"", payload.frames)
    return decode(message, envelope, codecs, dims, "own message", refs, layout)


def blob(name: str, data: bytes) -> tuple[tuple[FieldHeader, ...], tuple[Buffer, ...]]:
    """One field of plain bytes (JSON of control envelopes)."""
    part = PartHeader("values", len(data), digest(data))
    return (FieldHeader(name, "bytes", "u8", (len(data),), (part,)),), (data,)
