"""Compute the bytes of an envelope from its schema, the model's layout and the codecs, without encoding it.

ZMTP 3.1 adds bytes to every frame. docs/wire.md and docs/references/bytes.md have the formulas, and compare
them with the bytes that a relay counts; they agree exactly. The formulas are the same for ipc and tcp.
Connections have no routing id.

The size is exact for codecs whose size does not depend on the values (dense, bf16, f16, log8, csr). For other
codecs, and for parts of a message that may be absent or shorter, it is an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fedsim.learning.params import Layout
from fedsim.wire.codecs import codec
from fedsim.wire.envelope import VERSION, FieldHeader, Header, PartHeader, field_spec, pack
from fedsim.wire.schema import Dims, Field, all_fields, optional_group

RUN_NAME = "0" * 16
"""A stand-in with the length of a run's name."""


@dataclass(frozen=True)
class Mechanism:
    """A security mechanism of ZMTP, NULL or CURVE.

    Attributes:
        per_frame: Bytes that encryption adds to a frame's content.
        handshake: Bytes of a new connection (greeting and commands), by direction; up is from the worker.
    """

    name: str
    per_frame: int
    handshake: Mapping[str, int]

    def framing(self, frame_bytes: Iterable[int]) -> int:
        """Return the overhead of a message: per frame, encryption, a flag byte and a 1 or 8 byte length."""
        extra = self.per_frame
        return sum(extra + (2 if n + extra <= 255 else 9) for n in frame_bytes)


NULL = Mechanism("NULL", 0, MappingProxyType({"up": 107, "down": 107}))
CURVE = Mechanism("CURVE", 33, MappingProxyType({"up": 567, "down": 301}))
"""The handshake has a worker's HELLO and INITIATE, and the coordinator's WELCOME and READY."""

framing = NULL.framing


@dataclass(frozen=True)
class EnvelopeSize:
    """The size of an envelope. rows: bytes by (field, layer); the field is '' for header and framing."""

    rows: Mapping[tuple[str, str], int]
    exact: bool

    @property
    def total(self) -> int:
        return sum(self.rows.values())


def envelope_size(
    message: type,
    codecs: Mapping[str, str],
    dims: Dims,
    layout: Layout,
    *,
    kind: str,
    run: str,
    stored: str = "f32",
) -> EnvelopeSize:
    """Return the size of an envelope of this kind ('task', 'upload') with all fields of a message.

    message: the class of the message. codecs: codecs by field; others are dense. run: the name of the run,
    which the header contains. stored: the dtype of fields that are sent as they are stored.
    """
    headers, exact = field_headers(message, codecs, dims, layout, stored)
    envelope = pack(Header(VERSION, kind, run, fields=headers))
    rows: dict[tuple[str, str], int] = {}
    for h in headers:
        for p in h.parts:
            rows[h.name, p.layer] = rows.get((h.name, p.layer), 0) + p.nbytes
    rows["", "header"], rows["", "framing"] = len(envelope.head), framing(envelope.sizes)
    return EnvelopeSize(rows, exact)


def field_headers(
    message: type, codecs: Mapping[str, str], dims: Dims, layout: Layout, stored: str = "f32"
) -> tuple[tuple[FieldHeader, ...], bool]:
    """Return the headers of all fields of a message, without checksums, and whether their sizes are exact.

    The arguments are those of envelope_size.
    """
    headers, exact = [], optional_group(message) is None
    for f in all_fields(message):
        dtype = stored if f.kind.stored else f.kind.dtype
        header, fixed = _field(f, codecs.get(f.name, "dense"), dims, layout, dtype)
        headers.append(header)
        exact = exact and fixed and not f.kind.elastic
    return tuple(headers), exact


def _field(f: Field, name: str, dims: Dims, layout: Layout, dtype: str) -> tuple[FieldHeader, bool]:
    """Return the field's header, and whether its sizes are exact."""
    shape = f.shape(dims)
    spec, selected = field_spec(f, shape, dtype, layout), codec(name)
    bounds = selected.bounds(spec)
    fixed = all(b.least == b.most for b in bounds)
    if sum(b.most for b in bounds) > spec.dense_bytes:  # the sender would use dense instead
        selected = codec("dense")
        bounds = selected.bounds(spec)
    parts = tuple(PartHeader(b.layer, b.most, 0) for b in bounds)
    return FieldHeader(f.name, selected.name, dtype, shape, parts), fixed
