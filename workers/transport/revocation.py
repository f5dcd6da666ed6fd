"""RUN/revoked.json: remote workers whose keys open nothing any more.

Written by `fedsim revoke` while a run goes on, and read by its coordinator at every handshake and, for the
connections that are open, a few times a second.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fedsim.errors import DataError, DiskError

FORMAT = 1
REVOKED = "revoked.json"


class _Revoked(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    workers: tuple[Annotated[int, Meta(ge=0)], ...]


class Revocations:
    """What the file says; nobody is revoked while there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: frozenset[int] = frozenset()

    def workers(self) -> frozenset[int]:
        """Of this moment. A file that cannot be read takes nothing back: it stays as it was."""
        with suppress(DataError, OSError):
            self._last = self._read()
        return self._last

    def _read(self) -> frozenset[int]:
        """See below.

        Raises:
            DataError: if data is missing or damaged.
            OSError: if the system refuses.
        """
        try:
            result = msgspec.json.decode(self.path.read_bytes(), type=_Revoked)
        except FileNotFoundError:
            return frozenset()
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise DataError(f"{self.path} is damaged: {e}; remove it and revoke again") from None
        if result.format != FORMAT:
            raise DataError(f"{self.path} has format {result.format}; this fedsim reads {FORMAT}")
        return frozenset(result.workers)

    def add(self, workers: Iterable[int]) -> None:
        """Never half of it, and nobody's that does so at the same time is lost.

        Raises:
            DataError: if data is missing or damaged.
            DiskError: if the disk cannot be read or written.
        """
        temporary = self.path.with_name(f".{self.path.name}")
        try:
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                everybody = tuple(sorted({*self._read(), *workers}))
                temporary.write_bytes(msgspec.json.encode(_Revoked(FORMAT, everybody)) + b"\n")
                temporary.rename(self.path)
            finally:
                os.close(folder)
        except OSError as e:
            raise DiskError(f"cannot write {self.path}: {e.strerror}") from None

    def clear(self) -> None:
        """New keys have been made.

        Raises:
            DiskError: if the disk cannot be read or written.
        """
        try:
            self.path.unlink(missing_ok=True)
        except OSError as e:
            raise DiskError(f"cannot remove {self.path}: {e.strerror}") from None
