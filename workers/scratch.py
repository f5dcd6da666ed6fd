"""Temporary folders that end with their process.

A process that is killed -9 cannot remove its folder. So a process holds a lock on the folder that it makes,
which the kernel releases with the process, and first removes the folders of this kind that are not locked.
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
"""A younger folder is left alone: its process may not have locked it yet."""


class Scratch:
    """A folder that only this user can enter, until remove()."""

    def __init__(self, kind: str, parent: str | None = None) -> None:
        """Make a folder whose name begins with `kind`.

        Raises:
            DiskError: If it cannot be made.
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
        """Remove the folder; a second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sweep(parent: Path, kind: str) -> None:
    """Remove what killed processes of this user have left."""
    for path in parent.glob(f"{kind}*"):
        with suppress(OSError):  # another user's, or removed meanwhile
            record = path.lstat()
            if record.st_uid != os.getuid() or time.time() - record.st_mtime < YOUNG_SECONDS:
                continue
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)
