"""A user's files: reading of text, checks of paths, and the syntax of tables.

This module imports no large packages, because options are resolved before the fork server imports NumPy.
"""

from __future__ import annotations

import gzip
import io
import tomllib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from fedsim.errors import DataError
from fedsim.foreign_files import NESTED, opened

TABLES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
"""File name extensions that --dataset reads as tables (fedsim.data.readers.table_files)."""

_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


@contextmanager
def opened_text(path: Path) -> Iterator[TextIO]:
    """Open a UTF-8 text file, with or without a byte order mark; line ends are kept, .gz is decompressed.

    Another encoding or a truncated .gz raises a DataError, also inside the block. A file that does not open
    or is no .gz raises an OSError.
    """
    try:
        refuse_utf_16(path)
        with _opened(path) as file:
            yield io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    except UnicodeDecodeError as e:
        raise DataError(
            f"{path}: this is no text in UTF-8 (byte {e.object[e.start]:#04x}: {e.reason}); save it as UTF-8"
        ) from None
    except (EOFError, zlib.error) as e:
        raise DataError(f"{path} is no whole .gz file: {e}") from None


def read_text(path: Path) -> str:
    """Read the whole text of a file, with line ends as \\n; the errors are those of `opened_text`."""
    with opened_text(path) as file:
        return file.read().replace("\r\n", "\n")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; raise DataError if it is none, and the errors of `opened_text`."""
    try:
        return tomllib.loads(read_text(path))
    except ValueError as e:  # no TOML, or a number of too many digits
        raise DataError(f"{path}: {e}") from None
    except RecursionError:
        raise DataError(f"{path}: {NESTED}") from None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    with opened(path, links=True) as file:
        yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if path.suffix.lower() == ".gz" else file


def refuse_utf_16(path: Path) -> None:
    """Refuse a file that begins like UTF-16; the error says how to save the file."""
    with _opened(path) as file:
        beginning = file.read(2)
    if beginning in _UTF_16 or b"\0" in beginning:
        raise DataError(
            f"{path}: this is a text in UTF-16; save it as UTF-8 (spreadsheets: CSV UTF-8, comma delimited)"
        )


def other_separator(first_line: str) -> str:
    """Return the error message for a CSV file with semicolons or tabs between columns; else ''."""
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        if separator in first_line and "," not in first_line:
            return f"its columns are separated by {name}; save it with commas between them"
    return ""


# ---- paths


def no_folder(path: Path) -> str:
    """Return the reason why a path is no readable folder, such as 'does not exist'; '' if it is one."""
    return _wrong(path, folder=True)


def no_file(path: Path) -> str:
    """Return the reason why a path is no readable file; '' if it is one."""
    return _wrong(path, folder=False)


def _wrong(path: Path, folder: bool) -> str:
    try:
        if path.is_dir():
            if not folder:
                return "is a folder, not a file"
            next(path.iterdir(), None)
        elif not path.exists():
            return (
                f"is a link to {path.readlink()}, which does not exist"
                if path.is_symlink()
                else _absent(path)
            )
        elif folder:
            return "is a file, not a folder"
        else:
            opened(path, links=True).close()
    except OSError as e:
        return f"cannot be read: {e.strerror}"
    return ""


def _absent(path: Path) -> str:
    """Return 'does not exist', and name the file that is in place of a parent folder, if there is one."""
    parent = next((p for p in path.parents if p.exists()), path)
    return "does not exist" if parent.is_dir() else f"does not exist: {parent} is a file"


# ---- tables


def is_table(spec: str) -> bool:
    """Return whether a data set is FILE.csv[,KEY=VALUE,...], or another of TABLES."""
    return spec.partition(",")[0].lower().endswith(TABLES)


def absolute_table(spec: str) -> str:
    """Return the same spec with an absolute path, valid in every working directory, if its file exists.

    Otherwise return it unchanged: the file is in the data folder, which may differ between machines.
    """
    path = Path(spec.partition(",")[0]).expanduser()
    return moved_table(spec, path) if path.exists() else spec


def moved_table(spec: str, file: Path) -> str:
    """Return the same spec with the absolute path of another file."""
    _, comma, rest = spec.partition(",")
    return f"{file.expanduser().resolve()}{comma}{rest}"


def short_table(spec: str) -> str:
    """Return a spec for display, without the folders of its file."""
    file, comma, rest = spec.partition(",")
    return f"{Path(file).name}{comma}{rest}"
