"""The envelopes with which a connection begins, or has to begin again: hello, refused, rejoin.

Endpoints exchange them on their own, before a run's messages (workers.protocol_messages) can follow.
"""

from __future__ import annotations

import msgspec

from fedsim.errors import WireError
from fedsim.printable import one_line
from fedsim.wire.envelope import VERSION, Envelope, Header, blob, pack


class Hello(msgspec.Struct, forbid_unknown_fields=True):
    """A worker's first message. The token is that of a worker that the run has started itself."""

    token: str
    index: int
    pid: int
    host: str = ""


def hello(worker: Hello) -> Envelope:
    """Return the envelope with which a worker introduces itself."""
    fields, frames = blob("hello", msgspec.json.encode(worker))
    return pack(Header(VERSION, "hello", "", fields=fields), frames)


def read_hello(envelope: Envelope) -> Hello:
    """Return what a worker's first envelope says.

    Raises:
        WireError: If it cannot be read.
    """
    try:
        claimed = msgspec.json.decode(envelope.frames[0], type=Hello)
    except (IndexError, msgspec.DecodeError, UnicodeDecodeError) as e:
        raise WireError(f"an unreadable hello: {e}") from None
    return msgspec.structs.replace(claimed, host=one_line(claimed.host)[:500])


def refusal(reason: str) -> Envelope:
    """Return the envelope that tells a worker why it must not join."""
    fields, frames = blob("reason", reason.encode())
    return pack(Header(VERSION, "refused", "", fields=fields), frames)


def refusal_reason(envelope: Envelope) -> str:
    """Return the reason that a refusal gives."""
    return one_line(bytes(envelope.frames[0]).decode(errors="replace"))


def rejoin() -> Envelope:
    """Return the envelope that tells a worker to connect and introduce itself again."""
    return pack(Header(VERSION, "rejoin", ""))
