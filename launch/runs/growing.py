"""Reading of files while a run appends to them."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from fedsim.errors import DataError
from fedsim.wire.ledger_rows import Entry
from workers.coordinator.task_timeline import Span
from workers.storage.atomic_files import disk_errors

BLOCK = 1 << 20
T = TypeVar("T", Entry, Span)


@dataclass
class GrowingLines:
    """The complete lines of a file that another process appends to; the next line begins at byte `at`."""

    path: Path
    at: int = 0

    def new(self) -> Iterator[bytes]:
        """Yield the lines since the last call, without line ends. A missing file has no lines.
        A file that has become shorter was cut by a resume, and is read from its beginning."""
        if not self.path.exists():
            return
        with disk_errors(f"cannot read {self.path}"), self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self.at:
                self.at = 0
            file.seek(self.at)
            rest = b""
            while block := file.read(BLOCK):
                *whole, rest = (rest + block).split(b"\n")
                for line in whole:
                    self.at += len(line) + 1
                    yield line


def rows_of(path: Path, kind: type[T], last: int | None = None) -> Iterator[T]:
    """Yield the rows of a ledger.csv (Entry) or timeline.csv (Span) up to the round `last`, or all rows.
    An incomplete last row is left out."""
    for row in _rows(path, kind):
        result = kind(*row)
        if last is None or result.round <= last:
            yield result


def _rows(path: Path, kind: type[Any]) -> Iterator[list[Any]]:
    """Yield each row's values, converted to the types of the fields. Fields with defaults may be missing."""
    columns: Sequence[str] = kind._fields
    needed = len(columns) - len(kind._field_defaults)
    types, number = [get_type_hints(kind)[name] for name in columns], 0
    try:
        with disk_errors(f"cannot read {path}"), path.open(newline="", encoding="utf-8") as file:
            whole = (line for line in file if line.endswith("\n"))
            for number, row in enumerate(csv.reader(whole), 1):
                if number > 1:
                    yield [read(x) for read, x in zip(types, row, strict=True)]
                elif tuple(row) in (tuple(columns), tuple(columns[:needed])):
                    types = types[: len(row)]
                else:
                    raise DataError(f"{path} has the columns {', '.join(row)}; {', '.join(columns)} are due")
    except (ValueError, csv.Error):
        raise DataError(f"{path} is damaged: line {number or 1} or the one after it is no row") from None
