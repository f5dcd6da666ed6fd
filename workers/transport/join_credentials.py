"""RUN/join.json: what a worker on another machine needs to come in.

CURVE keys in ZeroMQ's Z85 text, 40 characters. The file holds secrets, so it is 0600, and whoever has it
can take part in the run; keys are never in argv and never in a log.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import zmq
from msgspec import Meta

from fedsim.errors import DataError, DiskError, UsageError

FORMAT = 1
JOIN = "join.json"
Key = Annotated[str, Meta(pattern=r"^[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}$")]


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    public: Key
    secret: Key

    @staticmethod
    def new() -> KeyPair:
        public, secret = zmq.curve_keypair()
        return KeyPair(public.decode(), secret.decode())

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r}, ...)"


class JoinCredentials(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """workers: a key pair per worker, by index. max_frame: the largest frame that anybody sends, bytes."""

    format: int
    run: str
    url: str
    server_key: Key
    max_frame: Annotated[int, Meta(ge=1, le=2**48)]
    workers: Annotated[tuple[KeyPair, ...], Meta(min_length=1, max_length=4096)]

    def write(self, path: Path) -> None:
        """Readable by its owner only, from the first byte on.

        Raises:
            DiskError: if the disk cannot be read or written.
        """
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(handle, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        except OSError as e:
            raise DiskError(f"cannot write {path}: {e.strerror}") from None

    @staticmethod
    def read(path: Path) -> JoinCredentials:
        """See below.

        Raises:
            UsageError: if it is not there or open to others.
            DataError: if it is damaged.
        """
        try:
            data, mode = path.read_bytes(), path.stat().st_mode
        except OSError as e:
            raise UsageError(f"{path}: {e.strerror}") from None
        if mode & 0o077:
            raise UsageError(f"{path}: others can read its keys; chmod 600 {path}")
        try:
            result = msgspec.json.decode(data, type=JoinCredentials)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise DataError(f"{path} is not a join.json of fedsim: {e}") from None
        if result.format != FORMAT:
            raise UsageError(f"{path} has format {result.format}; this fedsim reads {FORMAT}")
        return result
