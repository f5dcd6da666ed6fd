"""Files that only grow, with the digest of what they hold.

A run's ledger, metrics, journal and timeline are such files. Their digest is updated with what is appended,
so no round reads a file again. A checkpoint records it (workers.storage.checkpoints), and summary.json does
when the run ends.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from fedsim.errors import DiskError
from workers.storage.atomic_files import disk_errors

LEDGER, METRICS, TIMELINE, JOURNAL = "ledger.csv", "metrics.jsonl", "timeline.csv", "journal"
"""The names of a run's growing files."""
BLOCK = 1 << 20


@dataclass(frozen=True)
class FileDigest:
    """The content of a file from its start.

    Attributes:
        name: The file's name in the run folder.
        bytes: How many bytes it has.
        rows: How many lines without a header, or records.
        sha256: The digest of these bytes, hexadecimal; '' where an earlier fedsim has not recorded it.
    """

    name: str
    bytes: int
    rows: int
    sha256: str

    def matches(self, path: Path) -> bool:
        """Return whether a file begins with these bytes; what comes after them does not matter.

        Raises:
            DiskError: if the file cannot be read.
        """
        if not path.exists():
            return False
        hashed, left = sha256(), self.bytes
        with disk_errors(path), path.open("rb") as file:
            while left and (block := file.read(min(left, BLOCK))):
                hashed.update(block)
                left -= len(block)
        return not left and hashed.hexdigest() == self.sha256


class GrowingFile:
    """A file that rows are appended to. begin() or cut() opens it; nothing is touched before."""

    def __init__(self, path: Path, header: bytes = b"") -> None:
        """Name a file.

        Args:
            path: Where it is, or will be.
            header: Its first line, which is no row.
        """
        self.path, self.header, self._handle = path, header, -1
        self._forget()

    def begin(self) -> None:
        """Let it hold its header and nothing else.

        Raises:
            DiskError: if it cannot be written.
        """
        self._cut(0)
        if self.header:
            self.append(self.header, rows=0)

    def cut(self, size: int, rows: int | None = None) -> None:
        """Keep the first bytes of what an earlier start has written; of 0 bytes, begin anew.

        Args:
            size: So many bytes stay.
            rows: How many rows they are; None: as many as they have lines besides the header.

        Raises:
            DiskError: if it cannot be read or written.
        """
        if not size:
            self.begin()
            return
        self._cut(size)
        lines = 0
        with disk_errors(f"cannot read {self.path}"), self.path.open("rb") as file:
            while block := file.read(BLOCK):
                self._hashed.update(block)
                self._bytes += len(block)
                lines += block.count(b"\n")
        self._rows = lines - bool(self.header) if rows is None else rows

    def append(self, data: bytes, rows: int) -> None:
        """Append whole rows.

        Raises:
            DiskError: if they cannot be written; the file then ends as it did before, if the disk lets it.
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
        """The content now."""
        return FileDigest(self.path.name, self._bytes, self._rows, self._hashed.hexdigest())

    def close(self) -> None:
        """Close the file; its digest stays known."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _cut(self, size: int) -> None:
        with disk_errors(f"cannot write {self.path}"):
            if self._handle < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._handle = os.open(self.path, flags, 0o644)
            os.ftruncate(self._handle, size)
        self._forget()

    def _forget(self) -> None:
        self._hashed, self._bytes, self._rows = sha256(), 0, 0
