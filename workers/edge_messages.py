"""Pack and read the messages between edge servers and the root, each in an envelope.

root -> edge server      state, relayed, close, account
edge server -> root      uploaded, draft, sums, account, and the messages of its workers
root -> edge's workers   assign (or assign_gone) instead of task (or gone)

If sums have codecs, `state` brings the edge server's remainder before the broadcast, and `draft`
returns the next one before the sums (fedsim.compressed_sums). In a real federation an edge server keeps its
remainder, so both are simulation traffic.

A function that reads an envelope raises WireError if the envelope is malformed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from fedsim.round_events import Open
from fedsim.wire.envelope import VERSION, Envelope, Header, Payload, blob, pack
from fedsim.wire.header import read_header
from fedsim.wire.ledger_rows import Entry
from workers.protocol_messages import answer
from workers.transport.handshake import read_json

_Count = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]


class _Residual(msgspec.Struct, forbid_unknown_fields=True):
    """Bytes by direction."""

    down: _Count
    up: _Count


ASSIGNMENTS = {"assign": False, "assign_gone": True}
"""The kinds of tasks for a worker behind an edge server, which adds the broadcast to the task. The value is
True if the client drops out."""


def assignment(task: Envelope) -> Envelope:
    """Return a task without its broadcast, for a worker behind an edge server."""
    kind = "assign_gone" if task.header.kind == "gone" else "assign"
    return pack(msgspec.structs.replace(task.header, kind=kind, fields=()))


def uploaded(upload: Envelope) -> Envelope:
    """Return the message with an upload's header; the edge server keeps the upload itself."""
    return answer("uploaded", upload.header, *blob("head", upload.head), upload.header.micros)


def read_uploaded(envelope: Envelope) -> Envelope:
    """Return the upload, without its frames."""
    head = bytes(envelope.frames[0]) if envelope.frames else b""
    return Envelope(read_header(head, "the header of an upload behind an edge server"), head, ())


def close(run: str, epoch: int, opened: Open, uploads: Sequence[tuple[int, int]]) -> Envelope:
    """Return the message that tells an edge server which uploads count. uploads: pairs of a client and the
    worker that sent its upload, in ascending order of the clients."""
    fields, frames = blob("uploads", msgspec.json.encode(list(uploads)))
    return pack(Header(VERSION, "close", run, epoch, opened.round, opened.exchange, fields=fields), frames)


def read_uploads(envelope: Envelope) -> list[tuple[int, int]]:
    """Return the clients in a close message, each with its worker."""
    return read_json(envelope, list[tuple[int, int]], repr(envelope.header.kind))


def ask_account(run: str) -> Envelope:
    """Return the message that asks an edge server for the remaining rows of its ledger."""
    return pack(Header(VERSION, "account", run))


def account(
    run: str, round: int, exchange: int, rows: Sequence[Entry], residual: Mapping[str, int] | None
) -> Envelope:
    """Return the message with an edge server's rows. residual: the kernel's count minus the ledger's."""
    fields, frames = blob("rows", msgspec.json.encode([[tuple(row) for row in rows], residual]))
    return pack(Header(VERSION, "account", run, round=round, exchange=exchange, fields=fields), frames)


def read_account(envelope: Envelope) -> tuple[list[Entry], dict[str, int] | None]:
    """Return the rows and the residual of an account."""
    rows, residual = read_json(envelope, tuple[list[Entry], _Residual | None], repr(envelope.header.kind))
    return rows, None if residual is None else msgspec.structs.asdict(residual)


def relayed(run: str, epoch: int, opened: Open, payload: Payload) -> Envelope:
    """Return the message with an exchange's broadcast, sent to an edge server once for all its clients."""
    counts = {"folds": opened.folded_rounds, "asked": opened.asked}
    which = (epoch, opened.round, opened.exchange)
    return pack(Header(VERSION, "relayed", run, *which, fields=payload.fields, **counts), payload.frames)


def sums(run: str, epoch: int, opened: Open, payload: Payload) -> Envelope:
    """Return the message with sums that an edge server sends instead of its clients' uploads."""
    return _of_exchange("sums", run, epoch, opened, payload)


def state(run: str, epoch: int, opened: Open, payload: Payload) -> Envelope:
    """Return the message with the remainder that an edge server has before an exchange."""
    return _of_exchange("state", run, epoch, opened, payload)


def draft(run: str, epoch: int, opened: Open, payload: Payload) -> Envelope:
    """Return the message with the remainder that an edge server has after an exchange."""
    return _of_exchange("draft", run, epoch, opened, payload)


def _of_exchange(kind: str, run: str, epoch: int, opened: Open, payload: Payload) -> Envelope:
    header = Header(VERSION, kind, run, epoch, opened.round, opened.exchange, fields=payload.fields)
    return pack(header, payload.frames)
