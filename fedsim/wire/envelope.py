"""Envelopes, the messages on the wire: one header frame and the raw frames of the fields.

fedsim/wire/header.py describes the header. Decoding is strict: a checksum covers every frame, sizes come from
the schema and the layout, and anything unexpected raises WireError before any value is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedsim.errors import WireError
from fedsim.learning.params import Layout
from fedsim.wire.codecs import Codec, Spec, codec, pack_or_dense, unpack_checked
from fedsim.wire.header import (
    MAX_HEADER as MAX_HEADER,
    NONE as NONE,
    VERSION as VERSION,
    Buffer as Buffer,
    FieldHeader as FieldHeader,
    Header as Header,
    PartHeader as PartHeader,
    digest as digest,
    read_header,
    write_header,
)
from fedsim.wire.message_context import NOTHING, SCALES, MessageContext, scale_for, scale_of
from fedsim.wire.schema import DTYPES, Dims, Field, all_fields, optional_group, schema, values_of

M = TypeVar("M")


@dataclass(frozen=True)
class Envelope:
    """A parsed header, the bytes of its frame (head), and the buffers of all parts (frames)."""

    header: Header
    head: bytes
    frames: tuple[Buffer, ...]

    @property
    def sizes(self) -> list[int]:
        """The size of every frame in bytes: the header frame, then the parts as announced in the header."""
        return [len(self.head), *(p.nbytes for f in self.header.fields for p in f.parts)]

    def total_bytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class Payload:
    """The encoded fields of a message, which are encoded once and sent in one envelope per client."""

    fields: tuple[FieldHeader, ...]
    frames: tuple[Buffer, ...]


def pack(header: Header, frames: Sequence[Buffer] = ()) -> Envelope:
    """Turn a header and the frames it describes into an envelope."""
    return Envelope(header, write_header(header), tuple(frames))


def unpack(frames: Sequence[Buffer], owner: str) -> Envelope:
    """Parse and check everything that does not need a schema: sizes, version, checksums."""
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


def frames_by_field(fields: Sequence[FieldHeader], frames: Sequence[Buffer]) -> list[tuple[Buffer, ...]]:
    rest = iter(frames)
    return [tuple(islice(rest, len(f.parts))) for f in fields]


def slices_of(data: memoryview, sizes: Iterable[int]) -> list[memoryview]:
    """Split `data` into consecutive parts of these sizes."""
    parts, at = [], 0
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    return parts


def _as_tensor(value: Any, field: Field) -> Tensor:
    """Convert a field's value to its wire dtype. No other code converts float64 sums to float32."""
    dtype = DTYPES[field.kind.dtype]
    if isinstance(value, Tensor):
        return value if field.kind.stored and value.dtype == torch.uint8 else value.to(dtype)
    if field.members:
        value = [getattr(value, member.name) for member in field.members]
    return torch.tensor(value, dtype=torch.float64).to(dtype)


def field_spec(
    f: Field,
    shape: tuple[int, ...],
    dtype: str,
    layout: Layout | None,
    context: MessageContext = NOTHING,
    own: bool = False,
) -> Spec:
    """Return the spec of a field, which both sides know; fields of dims (P,) have the model's layers.

    own: True for a codec with +own.
    """
    layers = layout if f.kind.dims == ("P",) else None
    stream = context.own if own else context.stream
    stream = replace(stream, purpose=f"{stream.purpose} {f.name}") if stream else None
    known = Spec.of(shape, DTYPES[dtype], layers, positive=f.kind.positive)
    return replace(known, scale=scale_for(f.kind, context), stream=stream)


def reference(selected: Codec, name: str, context: MessageContext) -> Tensor | None:
    return (context.last if selected.last else context.fields).get(name)


def scaled(codecs: Mapping[str, str]) -> bool:
    """Return whether any of the codecs needs a precision as its unit (MessageContext.scale)."""
    return any(codec(name).scaled for name in codecs.values())


def _scaled_last(fields: Sequence[Field], codecs: Mapping[str, str]) -> list[int]:
    """Return the indices of the fields in encoding order: fields with a scaled codec come last."""
    return sorted(range(len(fields)), key=lambda i: codec(codecs.get(fields[i].name, "dense")).scaled)


def encode(
    message: object,
    codecs: Mapping[str, str],
    dims: Dims,
    context: MessageContext = NOTHING,
    layout: Layout | None = None,
) -> Payload:
    """Encode every field of a message; `codecs` maps field names to codecs (others are dense).

    context: the context that the receiver also has. layout: the layers of fields (P,); without it, one layer.

    Raises:
        WireError: If a tensor's shape does not match its schema and `dims`, which is a bug in the algorithm.
    """
    all_values = values_of(message)
    headers: dict[int, FieldHeader] = {}
    frames: dict[int, list[Buffer]] = {}
    scales = scaled(codecs)
    for place in _scaled_last([f for f, _ in all_values], codecs):
        f, value = all_values[place]
        tensor = _as_tensor(value, f)
        shape = tuple(tensor.shape)
        if not f.fits(shape, dims):
            raise WireError(
                f"{type(message).__qualname__}.{f.name} has shape {shape}; "
                f"its kind {f.kind.name!r} says {f.shape(dims)}"
            )
        selected = codec(codecs.get(f.name, "dense"))
        dtype = "u8" if tensor.dtype == torch.uint8 else f.kind.dtype
        if selected.last and f.name not in context.last:
            selected = codec(selected.alone)
        ref = reference(selected, f.name, context)
        spec = field_spec(f, shape, dtype, layout, context, selected.own)
        name, parts = pack_or_dense(selected, tensor, spec, ref)
        if scales and context.scale is None and f.name in SCALES:  # as the receiver will decode it
            seen = codec(name).unpack(tuple(data for _, data in parts), spec, ref)
            context = replace(context, scale=scale_of(f.name, seen))
        frames[place] = [data for _, data in parts]
        described = tuple(PartHeader(layer, data.nbytes, digest(data)) for layer, data in parts)
        headers[place] = FieldHeader(f.name, name, dtype, shape, described)
    ordered = range(len(all_values))
    return Payload(tuple(headers[i] for i in ordered), tuple(b for i in ordered for b in frames[i]))


def decode(
    message: type[M],
    envelope: Envelope,
    codecs: Mapping[str, str],
    dims: Dims,
    owner: str,
    context: MessageContext = NOTHING,
    layout: Layout | None = None,
) -> M:
    """Decode an envelope that unpack has checked; check it against the schema, the layout and the codecs.

    context and layout must equal the sender's. Treat the tensors as read-only, because they may share memory
    with the received frames. A partial message is never returned.
    """
    headers = envelope.header.fields
    expected, part = schema(message), optional_group(message)
    present = _present(message, headers, owner)
    has_part = part is not None and len(present) > len(expected)
    values: dict[str, Any] = {}
    scales = scaled(codecs)
    frames = frames_by_field(headers, envelope.frames)
    for place in _scaled_last(present, codecs):
        f, h = present[place], headers[place]
        label = f"{owner}: field {f.name!r}"
        sent = _agreed(f, h, codecs, dims, label)
        parts = tuple((p.layer, memoryview(frame)) for p, frame in zip(h.parts, frames[place], strict=True))
        spec = field_spec(f, h.shape, h.dtype, layout, context, sent.own)
        ref = reference(sent, f.name, context)
        if sent.last and ref is None:
            raise WireError(f"{label} refers to the last broadcast, which is not here")
        tensor = unpack_checked(h.codec, parts, spec, label, ref)
        if scales and context.scale is None and f.name in SCALES:
            context = replace(context, scale=scale_of(f.name, tensor))
        values[f.name] = tensor if f.python is Tensor else _scalar(tensor, f, label)
    _same_rows(expected, values, owner)
    if part is not None:
        values[part.name] = None
        if has_part:
            _same_rows(schema(part.message), values, owner)
            values[part.name] = part.message(**{f.name: values.pop(f.name) for f in schema(part.message)})
    return message(**values)


def _present(message: type[Any], headers: Sequence[FieldHeader], owner: str) -> tuple[Field, ...]:
    """Return the fields that a message contains, with or without its optional part."""
    names = [h.name for h in headers]
    for expected in (all_fields(message), schema(message)):
        if names == [f.name for f in expected]:
            return expected
    expected_names = [f.name for f in schema(message)]
    raise WireError(f"{owner}: fields {names} where {message.__qualname__} has {expected_names}")


def _agreed(f: Field, h: FieldHeader, codecs: Mapping[str, str], dims: Dims, label: str) -> Codec:
    """Return the codec of a field; refuse a codec, dtype or shape that differs from those of the run."""
    selected = codec(codecs.get(f.name, "dense"))
    # A sender uses `dense` if the codec does not save bytes, and `alone` if there is no earlier broadcast.
    if h.codec not in (selected.name, "dense", *([selected.alone] if selected.last else [])):
        raise WireError(f"{label} is encoded as {h.codec!r}; this run uses {selected.name!r}")
    if h.dtype not in f.dtypes:
        raise WireError(f"{label} has dtype {h.dtype!r}; its kind {f.kind.name!r} has {f.kind.dtype!r}")
    if not f.fits(h.shape, dims):
        raise WireError(f"{label} has shape {h.shape}; the model's layout says {f.shape(dims)}")
    return codec(h.codec)


def _same_rows(fields: tuple[Field, ...], values: Mapping[str, Any], owner: str) -> None:
    """Check that elastic fields whose first dimension has the same name have equally many rows."""
    rows: dict[str, tuple[str, int]] = {}
    for f in fields:
        if f.kind.elastic:
            count = len(values[f.name])
            first, expected = rows.setdefault(f.kind.dims[0], (f.name, count))
            if count != expected:
                raise WireError(f"{owner}: {count} rows of {f.name!r} where {first!r} has {expected}")


def _scalar(tensor: Tensor, field: Field, label: str) -> Any:
    """Convert a tensor to a group, a float or a bool. Refuse a bool whose byte is neither 0 nor 1."""
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
    context: MessageContext = NOTHING,
    layout: Layout | None = None,
) -> M:
    """Decode a message of this side as the other side does, because both compute with the decoded values."""
    envelope = Envelope(Header(VERSION, "own", "", fields=payload.fields), b"", payload.frames)
    return decode(message, envelope, codecs, dims, "own message", context, layout)


def without_references(payload: Payload, message: object, dims: Dims, layout: Layout | None) -> Payload:
    """Replace fields that refer to the last broadcast by dense fields, for clients without that broadcast.
    All clients then decode the same values. message: the decoded broadcast."""
    if not any(codec(f.codec).last for f in payload.fields):
        return payload
    dense = encode(message, {}, dims, layout=layout)
    own, plain = (zip(p.fields, frames_by_field(p.fields, p.frames), strict=True) for p in (payload, dense))
    headers: list[FieldHeader] = []
    frames: list[Buffer] = []
    for sent, instead in zip(own, plain, strict=True):
        header, parts = instead if codec(sent[0].codec).last else sent
        headers.append(header)
        frames += parts
    return Payload(tuple(headers), tuple(frames))


def blob(name: str, data: bytes) -> tuple[tuple[FieldHeader, ...], tuple[Buffer, ...]]:
    """Return one field of plain bytes, such as the JSON of a control envelope."""
    part = PartHeader("values", len(data), digest(data))
    return (FieldHeader(name, "bytes", "u8", (len(data),), (part,)),), (data,)
