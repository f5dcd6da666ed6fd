"""Copies of a run's folder while the run goes on."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from tests.support.commands import DEADLINE


def snapshot(folder: Path, to: Path) -> Path:
    """Copy a folder as it is at one instant: a file that a thread writes meanwhile makes it begin again.

    A copy of files of several instants is nothing that a killed process leaves behind: it may have a
    checkpoint of rows that its ledger does not have yet.
    """
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        try:
            before = _state(folder)
            shutil.copytree(folder, to)
            if _state(folder) == before:
                return to
        except (FileNotFoundError, shutil.Error):  # a temporary file got its name
            pass
        shutil.rmtree(to, ignore_errors=True)
        time.sleep(0.01)
    raise TimeoutError(f"{folder} was written to for {DEADLINE:.0f} s")


def _state(folder: Path) -> dict[Path, tuple[int, int]]:
    files = {path: path.stat() for path in folder.rglob("*") if not path.is_dir()}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in files.items()}
