"""Files that somebody else may have made: only regular files are opened, and decoded within bounds.

A pipe or a device could block a reader or be endless, a link could lead to any file, a sparse file could
claim any size, and JSON may have a nesting or numbers beyond what Python can handle.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec

DOCUMENT = 1 << 26
"""The largest size of a JSON document in bytes."""
LARGEST = max(1 << 31, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
"""The largest size of another file that is read as a whole: a quarter of the memory, but at least 2 GiB."""
DEEPEST, MOST_DIGITS = 24, 18
"""The largest nesting of JSON, and the largest number of digits of its whole numbers."""
NESTED = "it is nested too deeply"


def opened(path: Path, most: int | None = None, links: bool = False) -> BufferedReader:
    """Open a regular file for reading. most: the largest size in bytes. links: follow a link to the file.

    Raises:
        OSError: if the file cannot be opened, is no regular file, or is larger.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
    except OSError as e:
        link = not links and _is_link(e, path)
        raise (OSError(e.errno, "it is a link; put the file itself there") if link else e) from None
    status, wrong = os.fstat(number), None
    if not stat.S_ISREG(status.st_mode):
        wrong = OSError(errno.EINVAL, "it is no regular file but a folder, a pipe or a device")
    elif most is not None and status.st_size > most:
        wrong = OSError(errno.EFBIG, f"it has {status.st_size:,} bytes; at most {most:,} are read")
    if wrong is not None:
        os.close(number)
        raise wrong
    return os.fdopen(number, "rb")


def _is_link(error: OSError, path: Path) -> bool:
    return error.errno == errno.ELOOP and path.is_symlink()


def read(path: Path, most: int = LARGEST, links: bool = False) -> bytes:
    """Return the content of a regular file; the arguments and errors are those of `opened`."""
    with opened(path, most, links) as file:
        return file.read(most)


def sha256(path: Path, most: int | None = LARGEST) -> str:
    """Return the hexadecimal digest of a user's file, of which a link may be the last part."""
    with opened(path, most, links=True) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_value(data: bytes | str) -> Any:
    """Return the value of a JSON text; raise ValueError with the reason if it is none, or beyond the bounds.
    NaN and Infinity are accepted, because the scores of a run that diverged are written so."""
    try:
        value = json.loads(data, parse_int=_whole)
    except RecursionError:
        raise ValueError(NESTED) from None
    except json.JSONDecodeError as e:
        raise ValueError(f"line {e.lineno} is not JSON") from None
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for part in level for inner in _inside(part)]
    if level:
        raise ValueError(NESTED)
    return value


def checked(value: Any, kind: Any, name: str = "") -> Any:
    """Return a decoded value, called `name`, as it is; raise ValueError if it is not of the type `kind`."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        raise ValueError(f"{name} {e}".strip().replace(" - at `$.", " at `")) from None
    return value


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
