"""durability = none: a run's states and checkpoints in the machine's memory, and nothing of them on a disk.

They lie in a folder of the memory file system (/dev/shm), to which `state` and `checkpoints` in the run
folder are links while the run lasts. All processes of the machine see them there as ever, so that a worker
that dies is replaced; with the coordinator they are gone. What a coordinator that was killed left is removed
by the next run of the same user with durability = none.

Differs: a dead worker does not end the run, because its clients' states are not its own.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from fedsim.errors import UsageError
from workers.storage.atomic_files import disk_errors

MEMORY = Path("/dev/shm")
FOLDERS = ("state", "checkpoints")


def put_in_memory(run: Path, memory: Path = MEMORY) -> Path:
    """Make the folders of a run links into memory.

    Args:
        run: The run folder; its FOLDERS are there and empty.
        memory: A folder of a memory file system.

    Returns:
        The folder in memory, for `remove`.

    Raises:
        UsageError: If this machine has no memory file system, or the folders are not empty.
        DiskError: If they cannot be made.
    """
    if not os.access(memory, os.W_OK | os.X_OK):
        raise UsageError(f"--durability none keeps states in {memory}, which is not there; use process")
    remove_left(memory)
    folder = memory / f"fedsim-{os.getuid()}-{os.getpid()}-{_begun(os.getpid())}-{run.stat().st_ino}"
    with disk_errors(f"cannot make {folder}"):
        for name in FOLDERS:
            (folder / name).mkdir(parents=True, mode=0o700)
            try:
                (run / name).rmdir()
            except OSError:
                raise UsageError(
                    f"--durability none: {run / name} has files already; choose another --out"
                ) from None
            (run / name).symlink_to(folder / name)
    return folder


def remove(run: Path, folder: Path) -> None:
    """Give the memory back; the run folder has no states and checkpoints from now on."""
    for name in FOLDERS:
        with suppress(OSError):
            if (run / name).is_symlink():
                (run / name).unlink()
                (run / name).mkdir()
    shutil.rmtree(folder, ignore_errors=True)


def remove_left(memory: Path = MEMORY) -> None:
    """Remove the folders of this user's runs whose coordinator is gone."""
    for folder in memory.glob(f"fedsim-{os.getuid()}-*-*-*"):
        pid, begun = folder.name.split("-")[2:4]
        if pid.isdecimal() and _begun(int(pid)) != begun:
            shutil.rmtree(folder, ignore_errors=True)


def _begun(pid: int) -> str:
    """The start of a process, in ticks since the machine's start; '' if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
