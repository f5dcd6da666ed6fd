"""Temporary folders that are removed once their process has ended.

A process that is killed by SIGKILL cannot remove its folder. So each process locks its folder, and the kernel
releases the lock when the process ends. A process that makes a folder or starts a run removes the folders
that are not locked. A folder gets its final name after it is locked, so a folder with a final name and no
lock belongs to no process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fedsim.errors import DiskError

KINDS = tuple(f"fedsim-{use}-" for use in ("listener", "worker", "node", "verify", "codecs", "sweep"))
"""The prefixes of this program's folders."""
SHORT = "/tmp"  # noqa: S108 - mkdtemp makes a new folder in it
"""The parent of a folder of sockets if the usual path is too long."""
YOUNG_SECONDS = 60.0
"""A younger folder without its final name is not removed: its process may not have locked it yet."""


def parent_of_sockets() -> str:
    """Return a short enough parent for a folder of sockets: a socket's path has at most 107 bytes."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) < 60 else SHORT


class Scratch:
    """A folder that only this user can enter. Call remove(), or use a with block, to remove it."""

    def __init__(self, kind: str, parent: str | None = None) -> None:
        """Make a folder whose name begins with `kind`.

        Raises:
            DiskError: If the folder cannot be made.
        """
        parent = parent or tempfile.gettempdir()
        remove_left((kind, *KINDS), (parent,))
        try:
            unnamed = tempfile.mkdtemp(prefix=f".{kind}", dir=parent)
            self._lock = os.open(unnamed, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.path = Path(unnamed).with_name(Path(unnamed).name[1:])
            os.rename(unnamed, self.path)
        except OSError as e:
            raise DiskError(f"cannot make a temporary folder in {parent}: {e.strerror}") from None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder; a second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_left(kinds: Sequence[str] = KINDS, parents: Sequence[str] = ()) -> None:
    """Remove the folders that killed processes of this user have left.

    kinds: prefixes of names. parents: the folders to search; by default those of this process's own folders.
    """
    now = time.time()
    for parent in parents or dict.fromkeys((tempfile.gettempdir(), SHORT)):
        with suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:
                if entry.name.removeprefix(".").startswith(tuple(kinds)):
                    _remove(Path(entry.path), now)


def _remove(path: Path, now: float) -> None:
    with suppress(OSError):  # the folder is another user's, locked, or already removed
        record = path.lstat()
        nameless = path.name.startswith(".")
        if record.st_uid != os.getuid() or (nameless and now - record.st_mtime < YOUNG_SECONDS):
            return
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(handle)
