"""A file that a command writes: whole, or as it was before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fedsim.errors import UsageError
from workers.storage.atomic_files import disk_errors


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file under another name, and rename it when the block has ended without an error.

    A pipe or a device is written to and stays what it is, and so does a link.

    Raises:
        UsageError: if the path is a folder.
        DiskError: if it cannot be written.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file")
    with disk_errors(f"cannot write {path}"):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                yield file
            return
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                yield file
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
