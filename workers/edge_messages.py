"""The messages between edge servers and the root, as envelopes and back.

root -> edge server      relayed, close, account
edge server -> root      uploaded, sums, account; and whatever its workers say
root -> its workers      assign (or assign_gone) in the place of task (or gone)

What reads an envelope raises WireError if that is not possible.
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
"""Kinds of tasks to a worker behind an edge server, which puts the broadcast behind them: whether the client
is one that drops out."""


def assignment(task: Envelope) -> Envelope:
    """Return a task without its broadcast, for a worker behind an edge server."""
    kind = "assign_gone" if task.header.kind == "gone" else "assign"
    return pack(msgspec.structs.replace(task.header, kind=kind, fields=()))


def uploaded(upload: Envelope) -> Envelope:
    """Return the header of an upload that an edge server keeps."""
    return answer("uploaded", upload.header, *blob("head", upload.head), upload.header.micros)


def read_uploaded(envelope: Envelope) -> Envelope:
    """Return the upload, without its frames."""
    head = bytes(envelope.frames[0]) if envelope.frames else b""
    return Envelope(read_header(head, "the header of an upload behind an edge server"), head, ())


def close(run: str, epoch: int, opened: Open, uploads: Sequence[tuple[int, int]]) -> Envelope:
    """Return the message that says to an edge server which uploads count: (client, worker that has sent it),
    clients ascending."""
    fields, frames = blob("uploads", msgspec.json.encode(list(uploads)))
    return pack(Header(VERSION, "close", run, epoch, opened.round, opened.exchange, fields=fields), frames)


def read_uploads(envelope: Envelope) -> list[tuple[int, int]]:
    """Return the clients in a close message, each with its worker."""
    return read_json(envelope, list[tuple[int, int]], repr(envelope.header.kind))


def ask_account(run: str) -> Envelope:
    """Return the message that asks an edge server for what is left of its ledger."""
    return pack(Header(VERSION, "account", run))


def account(
    run: str, round: int, exchange: int, rows: Sequence[Entry], residual: Mapping[str, int] | None
) -> Envelope:
    """Return an edge server's ledger rows; residual: the kernel's count of its streams minus all of them."""
    fields, frames = blob("rows", msgspec.json.encode([[tuple(row) for row in rows], residual]))
    return pack(Header(VERSION, "account", run, round=round, exchange=exchange, fields=fields), frames)


def read_account(envelope: Envelope) -> tuple[list[Entry], dict[str, int] | None]:
    """Return the rows and the residual of an account."""
    rows, residual = read_json(envelope, tuple[list[Entry], _Residual | None], repr(envelope.header.kind))
    return rows, None if residual is None else msgspec.structs.asdict(residual)


def relayed(run: str, epoch: int, opened: Open, payload: Payload) -> Envelope:
    """Return the broadcast of an exchange as an edge server gets it, once for all its clients."""
    counts = {"folds": opened.folded_rounds, "asked": opened.asked}
    which = (epoch, opened.round, opened.exchange)
    return pack(Header(VERSION, "relayed", run, *which, fields=payload.fields, **counts), payload.frames)


def sums(run: str, epoch: int, opened: Open, payload: Payload) -> Envelope:
    """Return what an edge server sends up in the place of its clients' uploads."""
    header = Header(VERSION, "sums", run, epoch, opened.round, opened.exchange, fields=payload.fields)
    return pack(header, payload.frames)
