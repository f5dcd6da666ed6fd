"""Rows of ledger.csv and timeline.csv one after the other, typed, for files that do not fit into memory."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, get_type_hints

from fedsim.errors import DataError
from fedsim.wire.ledger_rows import Entry
from workers.coordinator.task_timeline import Span
from workers.storage.atomic_files import disk_errors


def ledger_rows(path: Path, last: int | None = None) -> Iterator[Entry]:
    """Rows of a ledger.csv. A last row that is still being written is left out.

    last: the last round whose rows count, None for all (launch.runs.run_state.rows_until).

    Raises:
        DataError: naming the line that is no row.
        DiskError: if the disk cannot be read.
    """
    for row in _rows(path, Entry):
        entry = Entry(*row)
        if last is None or entry.round <= last:
            yield entry


def timeline_rows(path: Path, last: int | None = None) -> Iterator[Span]:
    """Rows of a timeline.csv, as ledger_rows.

    Raises:
        DataError: naming the line that is no row.
        DiskError: if the disk cannot be read.
    """
    for row in _rows(path, Span):
        span = Span(*row)
        if last is None or span.round <= last:
            yield span


def _rows(path: Path, kind: type[Any]) -> Iterator[list[Any]]:
    """The values of each row, with the types of a named tuple's fields; one with a default may be missing."""
    columns: Sequence[str] = kind._fields
    needed = len(columns) - len(kind._field_defaults)
    types, number = [get_type_hints(kind)[name] for name in columns], 0
    try:
        with disk_errors(f"cannot read {path}"), path.open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.reader(_whole_lines(file)), 1):
                if number > 1:
                    yield [read(x) for read, x in zip(types, row, strict=True)]
                elif tuple(row) in (tuple(columns), tuple(columns[:needed])):
                    types = types[: len(row)]
                else:
                    raise DataError(f"{path} has the columns {', '.join(row)}; {', '.join(columns)} are due")
    except (ValueError, csv.Error):
        raise DataError(f"{path} is damaged: line {number or 1} or the one after it is no row") from None


def _whole_lines(file: IO[str]) -> Iterator[str]:
    return (line for line in file if line.endswith("\n"))
