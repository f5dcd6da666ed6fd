"""The envelopes that begin a connection (hello, refused) or ask a worker to begin a new one (rejoin).

A run's messages (workers.protocol_messages) can follow once a hello is accepted.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from fedsim.errors import WireError
from fedsim.printable import one_line
from fedsim.wire.envelope import VERSION, Envelope, Header, blob, pack

T = TypeVar("T")


class Hello(msgspec.Struct, forbid_unknown_fields=True):
    """A worker's first message. token: the run's token, for workers that the run has started itself."""

    token: str
    index: int
    pid: int
    host: str = ""


def notice(kind: str, run: str, name: str, data: bytes) -> Envelope:
    """Return an envelope that belongs to no task, with one field of plain bytes."""
    fields, frames = blob(name, data)
    return pack(Header(VERSION, kind, run, fields=fields), frames)


def read_json(envelope: Envelope, kind: type[T], what: str) -> T:
    """Return the JSON in an envelope's first frame.

    Raises:
        WireError: if the JSON cannot be read; the message calls it `what`.
    """
    try:
        return msgspec.json.decode(envelope.frames[0], type=kind)
    except (IndexError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise WireError(f"an unreadable {what}: {e}") from None


def hello(worker: Hello) -> Envelope:
    """Return the envelope with which a worker introduces itself."""
    return notice("hello", "", "hello", msgspec.json.encode(worker))


def read_hello(envelope: Envelope) -> Hello:
    """Return the content of a worker's hello."""
    claimed = read_json(envelope, Hello, "hello")
    return msgspec.structs.replace(claimed, host=one_line(claimed.host)[:500])


def refusal(reason: str) -> Envelope:
    """Return the envelope that tells a worker why it must not join."""
    return notice("refused", "", "reason", reason.encode())


def refusal_reason(envelope: Envelope) -> str:
    """Return the reason that a refusal gives."""
    return one_line(bytes(envelope.frames[0]).decode(errors="replace"))


def rejoin() -> Envelope:
    """Return the envelope that tells a worker to connect and introduce itself again."""
    return pack(Header(VERSION, "rejoin", ""))
