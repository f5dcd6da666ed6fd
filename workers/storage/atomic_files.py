"""Atomic writes of files, and the lock that allows only one coordinator in a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

from fedsim.errors import DiskError, UsageError

T = TypeVar("T")
Buffer = bytes | memoryview
"""A copy of fedsim.wire.envelope.Buffer, because that module imports torch and `fedsim revoke` must not."""

SPARE = "spare"
"""The name of a folder's spare file: a file that is no longer needed and may be overwritten."""
SPARE_BYTES = 1 << 18
"""Files up to this size are deleted, not kept as spare files."""
PATIENCE = 5.0
"""Seconds for which `patiently` waits for a descriptor."""


@contextmanager
def disk_errors(what: str | Path) -> Iterator[None]:
    """Turn OSErrors in the block into DiskErrors that begin with `what`."""
    try:
        yield
    except OSError as e:
        raise DiskError(f"{what}: {e.strerror}") from None


def patiently(call: Callable[[], T]) -> T:
    """Return the result of `call`. Repeat the call while this process has no file descriptor left.

    Idle connections of other processes may take all descriptors for a moment, until
    workers.transport.ingress_limiter closes them.

    Raises:
        OSError: if `call` raises one; EMFILE only after PATIENCE seconds.
    """
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return call()
        except OSError as e:
            if e.errno != errno.EMFILE or time.monotonic() > until:
                raise
        time.sleep(0.001)


def write_atomically(
    path: Path, chunks: Iterable[Buffer], mode: int = 0o666, spare: Path | None = None
) -> int:
    """Write a file under a temporary name and rename it; return its number of bytes.

    Args:
        path: The file; an existing one is replaced.
        chunks: The content of the file.
        mode: The file's permissions before the process's umask; 0o600 for secrets.
        spare: A file to overwrite and rename, if it exists, instead of making a new file: new pages of the
            page cache can cost more than writing to existing ones.

    Raises:
        DiskError: if the file cannot be written; the message names the path.
    """
    temporary = f"{path.parent}/.{path.name}.{os.getpid()}"
    try:
        how = "wb"
        if spare is not None:
            with suppress(FileNotFoundError):
                os.rename(spare, temporary)
                how = "r+b"
        with patiently(lambda: open(temporary, how, opener=_opener(mode))) as file:
            size = sum(file.write(chunk) for chunk in chunks)
            file.truncate()
        os.rename(temporary, path)
    except OSError as e:
        with suppress(OSError):
            os.unlink(temporary)
        raise DiskError(f"cannot write {path}: {e.strerror}") from None
    return size


def _opener(mode: int) -> Callable[[str, int], int]:
    """Return a function that opens a file, but not through a link."""
    return lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, mode)


def remove_or_spare(path: Path) -> None:
    """Remove a file; a large file without a second hard link becomes the spare file of its folder.

    After a power cut, a file that overwrites the spare file may have the new name but the old bytes.
    Readers must be able to detect this.

    Raises:
        OSError: if the file cannot be removed or renamed.
    """
    with suppress(FileNotFoundError):
        held = os.stat(path)
        if held.st_size > SPARE_BYTES and held.st_nlink == 1:
            os.rename(path, path.parent / SPARE)
        else:
            os.unlink(path)


def remove_temporaries(run: Path) -> None:
    """Remove the temporary files that killed processes have left in a run's folder.

    Call this while the process holds the run's lock and before workers start, when nothing else writes.
    """
    patterns = ["checkpoints/.*.checkpoint.*", "state/*/.*.state.*", "uploads/*/.*.envelope.*"]
    with disk_errors(f"cannot remove a temporary file in {run}"):
        for pattern in (*patterns, ".join.json.*", ".join-here.json.*"):
            for path in run.glob(pattern):
                path.unlink(missing_ok=True)


ATTEMPTS, PAUSE = 5, 0.01
"""The number of attempts to take a lock, and the seconds between them."""


MARK = b"fedsim "
"""The beginning of a lock's content, before the process id; another file of this name does not have it."""
_REGULAR = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags with which no link is followed, and no FIFO waited for."""


class RunLock:
    """A lock on a run's folder, from construction until release() or the end of this process."""

    def __init__(self, folder: Path) -> None:
        """Lock a run's folder.

        Raises:
            UsageError: if another process has locked the folder.
            DiskError: if the disk cannot be read or written.
        """
        path = folder / "lock"
        with disk_errors(f"cannot open {path}"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | _REGULAR, 0o600)
            group = folder.stat().st_mode & 0o020  # whoever may only read the folder must not hold its lock
            with suppress(PermissionError):  # another user's lock
                os.fchmod(self._file, 0o600 | 3 * group)
        try:
            self._acquire()
        except BlockingIOError:
            holder = os.pread(self._file, 32, 0).removeprefix(MARK).decode(errors="replace").strip()
            os.close(self._file)
            raise UsageError(
                f"{folder} is being run by process {holder or 'unknown'}; a run has one coordinator"
            ) from None
        _locks.add(self)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, MARK + f"{os.getpid()}\n".encode(), 0)

    def _acquire(self) -> None:
        """Try a few times, because is_locked in another process holds the lock briefly."""
        for _ in range(ATTEMPTS):
            with suppress(BlockingIOError):
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(PAUSE)
        return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


_locks: WeakSet[RunLock] = WeakSet()
"""The locks of this process. A forked process must not hold them, because it may outlive this one."""


def _let_go() -> None:
    for lock in _locks:
        lock.release()


os.register_at_fork(after_in_child=_let_go)


def is_locked(folder: Path) -> bool:
    """Return whether a process is running the run in a folder; False if the lock cannot be read.

    Another user may not read the lock, but sees it among the machine's locks.
    """
    path = folder / "lock"
    try:
        file = os.open(path, os.O_RDONLY | _REGULAR)
    except PermissionError:
        return is_listed(path)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as e:
        return isinstance(e, BlockingIOError)
    finally:
        os.close(file)
    return False


def is_listed(path: Path) -> bool:
    """Return whether /proc/locks has a lock of a file; its device numbers may differ from those of stat."""
    with suppress(OSError):
        number, lines = path.lstat().st_ino, Path("/proc/locks").read_text().splitlines()
        return any("FLOCK" in line and f":{number} " in line for line in lines)
    return False


@contextmanager
def at_rest(folder: Path) -> Iterator[None]:
    """Keep other processes from running the run in a folder during the block.

    A folder that cannot be written needs no lock.

    Raises:
        UsageError: if another process is running the run.
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
