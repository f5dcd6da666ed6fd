"""Reading of files while a run appends to them."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import lexists
from pathlib import Path
from typing import Any, TextIO, TypeVar, get_type_hints

from fedsim.errors import DataError
from fedsim.foreign_files import DOCUMENT, MOST_DIGITS, opened
from fedsim.wire.ledger_rows import Entry
from workers.coordinator.task_timeline import Span
from workers.storage.atomic_files import disk_errors

BLOCK = 1 << 20
SIDES = ("down", "up")
LONGEST = 1e12
"""The bound of a number of seconds."""
T = TypeVar("T", Entry, Span)


@dataclass
class GrowingLines:
    """The complete lines of a file that another process appends to; the next line begins at byte `at`."""

    path: Path
    at: int = 0

    def new(self) -> Iterator[bytes]:
        """Yield the lines since the last call, without line ends. A missing file has no lines.
        A file that has become shorter was cut by a resume, and is read from its beginning."""
        if not lexists(self.path):
            return
        with disk_errors(f"cannot read {self.path}"), opened(self.path) as file:
            if os.fstat(file.fileno()).st_size < self.at:
                self.at = 0
            file.seek(self.at)
            rest = b""
            while block := file.read(BLOCK):
                *whole, rest = (rest + block).split(b"\n")
                if len(rest) > DOCUMENT:
                    raise DataError(f"{self.path} is damaged: a line has no end")
                for line in whole:
                    self.at += len(line) + 1
                    yield line


def rows_of(path: Path, kind: type[T], last: int | None = None) -> Iterator[T]:
    """Yield the rows of a ledger.csv (Entry) or timeline.csv (Span) up to the round `last`, or all rows.
    An incomplete last row is left out."""
    for row in _rows(path, kind):
        result = kind(*row)
        if isinstance(result, Entry) and result.direction not in SIDES:
            raise DataError(f"{path} is damaged: a direction is {result.direction!r}")
        if last is None or result.round <= last:
            yield result


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(text)
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not abs(value) < LONGEST:
        raise ValueError(text)
    return value


READ: Mapping[Any, Callable[[str], Any]] = {int: _whole, float: _finite, str: str}


def _lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a file; raise ValueError for one that is longer than a row can be."""
    while line := file.readline(BLOCK):
        if len(line) == BLOCK:
            raise ValueError
        yield line


def _rows(path: Path, kind: type[Any]) -> Iterator[list[Any]]:
    """Yield each row's values, converted to the types of the fields. Fields with defaults may be missing."""
    columns: Sequence[str] = kind._fields
    needed = len(columns) - len(kind._field_defaults)
    types, number = [READ[get_type_hints(kind)[name]] for name in columns], 0
    try:
        with disk_errors(f"cannot read {path}"), io.TextIOWrapper(opened(path), "utf-8", newline="") as file:
            whole = (line for line in _lines(file) if line.endswith("\n"))
            for number, row in enumerate(csv.reader(whole), 1):
                if number > 1:
                    yield [read(x) for read, x in zip(types, row, strict=True)]
                elif tuple(row) in (tuple(columns), tuple(columns[:needed])):
                    types = types[: len(row)]
                else:
                    raise DataError(f"{path} has the columns {', '.join(row)}; {', '.join(columns)} are due")
    except (ValueError, csv.Error):
        raise DataError(f"{path} is damaged: line {number or 1} or the one after it is no row") from None
