"""Files that only grow, with the digest of their content.

These are a run's ledger, metrics, journal and timeline. Each append updates the digest, so no round reads a
file again. Checkpoints record the digest (workers.storage.checkpoints), and so does summary.json at the end.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from os.path import lexists
from pathlib import Path

from fedsim.errors import DiskError
from fedsim.foreign_files import opened
from workers.storage.atomic_files import disk_errors

LEDGER, METRICS, TIMELINE, JOURNAL = "ledger.csv", "metrics.jsonl", "timeline.csv", "journal"
"""The names of a run's growing files."""
BLOCK = 1 << 20


@dataclass(frozen=True)
class FileDigest:
    """The length and digest of the content of a file at some time.

    Attributes:
        name: The file's name in the run folder.
        bytes: The number of bytes.
        rows: The number of records, or of lines without the header.
        sha256: The hexadecimal digest of these bytes.
    """

    name: str
    bytes: int
    rows: int
    sha256: str

    def matches(self, path: Path) -> bool:
        """Return whether a file begins with these bytes; later bytes are ignored."""
        if not lexists(path):
            return False
        hashed, left = sha256(), self.bytes
        with disk_errors(path), opened(path) as file:
            while left and (block := file.read(min(left, BLOCK))):
                hashed.update(block)
                left -= len(block)
        return not left and hashed.hexdigest() == self.sha256


class GrowingFile:
    """A file to which rows are appended. Nothing is written before begin() or cut() opens it."""

    def __init__(self, path: Path, header: bytes = b"") -> None:
        """Prepare a file. header: the first line, which is not counted as a row."""
        self.path, self.header, self._handle = path, header, -1
        self._forget()

    def begin(self) -> None:
        """Write a file with only the header."""
        self._cut(0)
        if self.header:
            self.append(self.header, rows=0)

    def cut(self, size: int, rows: int | None = None) -> None:
        """Keep the first `size` bytes of an existing file; if `size` is 0, write a new file.

        rows: the number of rows in these bytes; None to count the lines without the header.
        """
        if not size:
            self.begin()
            return
        self._cut(size)
        lines = 0
        with disk_errors(f"cannot read {self.path}"), opened(self.path) as file:
            while block := file.read(BLOCK):
                self._hashed.update(block)
                self._bytes += len(block)
                lines += block.count(b"\n")
        self._rows = lines - bool(self.header) if rows is None else rows

    def append(self, data: bytes, rows: int) -> None:
        """Append whole rows.

        Raises:
            DiskError: if the rows cannot be written; the file is then cut to its old length, if possible.
        """
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError as e:
            with suppress(OSError):
                os.ftruncate(self._handle, self._bytes)
            raise DiskError(f"cannot write {self.path}: {e.strerror}") from None
        self._hashed.update(data)
        self._bytes += len(data)
        self._rows += rows

    @property
    def digest(self) -> FileDigest:
        """The digest of the current content."""
        return FileDigest(self.path.name, self._bytes, self._rows, self._hashed.hexdigest())

    def close(self) -> None:
        """Close the file; its digest stays known."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _cut(self, size: int) -> None:
        with disk_errors(f"cannot write {self.path}"):
            if self._handle < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
                self._handle = os.open(self.path, flags, 0o666)
            os.ftruncate(self._handle, size)
        self._forget()

    def _forget(self) -> None:
        self._hashed, self._bytes, self._rows = sha256(), 0, 0
