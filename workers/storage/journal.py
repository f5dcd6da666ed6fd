"""The journal of the coordinator's decisions and accepted uploads, in order, for resume and inspection.

A record is length (u32) | xxh3_64 of the payload | payload, a msgpack map. Each record is appended
with one write, so it survives kill -9. It survives a power cut once a later checkpoint is durable, because
the journal is synced first (workers.storage.durability). Opening the journal cuts off an incomplete end;
reading it skips damaged records without losing others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from os.path import lexists
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import xxhash

from fedsim.foreign_files import checked, read
from workers.storage.atomic_files import disk_errors
from workers.storage.growing_file import FileDigest, GrowingFile
from workers.storage.metrics_file import Count, Limits, Number

_PREFIX = struct.Struct(">IQ")
_FIRST = b"\xa4what"
"""The first key of every record, behind one byte of its map."""
_REREAD = 64
"""How many times its own size a journal is read at most for the checksums of damaged records."""


class Round(msgspec.Struct, forbid_unknown_fields=True):
    """What is known of a committed round (workers.coordinator.run_records.RoundRecord)."""

    participants: list[Count]
    folded: list[Count]
    bytes_down: Count
    bytes_up: Count
    number: Count = 0
    late: list[Count] = []
    unchanged: list[Count] = []
    refused: list[Count] = []
    simulated: Number | None = None
    joules: Number | None = None
    staleness: list[Count] = []
    limits: Limits = {}
    seconds: Number = 0
    seconds_clients: Number = 0
    edge_bytes: tuple[Count, Count] | None = None
    reported: dict[str, float | None] = {}


Committed = TypedDict("Committed", {"round": Count, "about": Round})  # noqa: UP013 (the file's own word)
"""The record of a committed round."""


class Upload(TypedDict):
    """The record of an accepted upload."""

    round: Count
    exchange: Count
    client: Count
    xxh3: list[int]


KINDS: Mapping[Any, Any] = {"commit": Committed, "upload": Upload}
"""The types of the records on which something depends, by `what`."""


def _records(data: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield whole records and the positions of their ends."""
    at, left = 0, _REREAD * len(data)
    while 0 <= at <= len(data) - _PREFIX.size and left >= 0:
        record, end = _record(data, at)
        if record is None:  # the length may also be damaged, so the next whole record may begin anywhere
            left -= end - at
            at = data.find(_FIRST, at + _PREFIX.size + 2) - _PREFIX.size - 1
        else:
            at = end
            yield record, end


def _record(data: bytes, at: int) -> tuple[dict[str, Any] | None, int]:
    """Return the record that begins at `at`, or None, and the position of its end."""
    length, digest = _PREFIX.unpack_from(data, at)
    start, end = at + _PREFIX.size, at + _PREFIX.size + length
    if end > len(data):
        return None, at
    if xxhash.xxh3_64_intdigest(memoryview(data)[start:end]) != digest:
        return None, end
    try:
        record = msgspec.msgpack.decode(data[start:end], type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None, end
    return (record if isinstance(record.get("what"), str) else None), end


def journal_records(path: Path, size: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield all whole records, oldest first; one of other types than KINDS is as good as damaged.

    size: the number of bytes to read from the start; None for all.
    """
    with disk_errors(f"journal {path}"):
        data = read(path)
    for record, _ in _records(data[:size]):
        with suppress(ValueError):
            yield checked(record, KINDS.get(record["what"], Any))


def read_journal(path: Path, size: int | None = None) -> list[dict[str, Any]]:
    """Return the records that journal_records yields, as a list."""
    return list(journal_records(path, size))


class Journal:
    """A file of records that only grows; every record has the key `what`."""

    def __init__(self, path: Path) -> None:
        """Open the file for appending, and cut off an incomplete end."""
        self.path = path
        self._file = GrowingFile(path)
        with disk_errors(f"cannot open the journal {path}"):
            ends = [end for _, end in _records(read(path) if lexists(path) else b"")]
        self._file.cut(ends[-1] if ends else 0, len(ends))

    @property
    def digest(self) -> FileDigest:
        """The digest of the journal's current content."""
        return self._file.digest

    def append(self, what: str, **label: Any) -> None:
        """Append one record."""
        payload = msgspec.msgpack.encode({"what": what, **label})
        self._file.append(_PREFIX.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload, rows=1)

    def close(self) -> None:
        self._file.close()
