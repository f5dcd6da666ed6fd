"""Temporary folders that end with their process.

Nobody removes the folder of a process that was killed -9. So whoever makes one holds a lock on it, which the
kernel gives up with the process, and first removes those of its kind whose lock nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from fedsim.errors import DiskError

YOUNG_SECONDS = 60.0
"""A younger one is left alone: its maker may not have locked it yet."""


class Scratch:
    """A folder that only this user can enter, until remove()."""

    def __init__(self, kind: str, parent: str | None = None) -> None:
        """kind: what its name begins with.

        Raises:
            DiskError: if the disk cannot be read or written.
        """
        parent = parent or tempfile.gettempdir()
        _sweep(Path(parent), kind)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=kind, dir=parent))
            self._lock = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as e:
            raise DiskError(f"cannot make a temporary folder in {parent}: {e.strerror}") from None

    def remove(self) -> None:
        """Also a second time."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sweep(parent: Path, kind: str) -> None:
    """Remove what killed processes of this user have left."""
    for path in parent.glob(f"{kind}*"):
        with suppress(OSError):  # somebody else's, or gone by now
            record = path.lstat()
            if record.st_uid != os.getuid() or time.time() - record.st_mtime < YOUNG_SECONDS:
                continue
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)
