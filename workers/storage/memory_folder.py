"""Folders in memory, not on a disk, for the states and checkpoints of a run with durability = none.

During the run, `state` and `checkpoints` in the run folder are links to a folder in the memory file system
(/dev/shm). All processes of the run can read it, so a worker that dies is replaced. If the coordinator dies,
the states are lost; the next run of the same user with durability = none removes the files.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from fedsim.errors import UsageError
from workers.storage.atomic_files import disk_errors

MEMORY = Path("/dev/shm")  # noqa: S108 - folders made in it have mode 0700
FOLDERS = ("state", "checkpoints")


def put_in_memory(run: Path, memory: Path = MEMORY) -> Path:
    """Replace the FOLDERS of a run, which must exist and be empty, by links into a memory file system.

    Return the folder in memory, for `remove`.

    Raises:
        UsageError: if this machine has no memory file system, or the folders are not empty.
        DiskError: if the folders cannot be made.
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
    """Free the memory; the run folder then has empty FOLDERS."""
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
    """Return a process's start time, in ticks since the machine's start; '' if the process has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
