"""One coordinator per run folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedsim.errors import DiskError, UsageError


class RunLock:
    """Held from construction until release, or until this process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            UsageError: if another process carries this run out.
            DiskError: if the disk cannot be read or written.
        """
        path = folder / "lock"
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise DiskError(f"cannot open {path}: {e.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise UsageError(
                f"{folder} is being run by process {holder}; a run has one coordinator"
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@contextmanager
def at_rest(folder: Path) -> Iterator[None]:
    """A block in which nobody goes on with the run; a folder that cannot be written is at rest anyway.

    Raises:
        UsageError: if another process carries it out.
    """
    lock = None
    if (folder / "lock").exists():
        with suppress(DiskError):
            lock = RunLock(folder)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
