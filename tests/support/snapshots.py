"""Copies of a run's folder while the run goes on, at an instant that a test names."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.session.recorder import Recorder
from tests.support.commands import DEADLINE


@contextmanager
def at(when: str, round: int, do: Callable[[], None]) -> Iterator[None]:
    """Call `do` when a round of a run of this process was committed or evaluated."""
    method = getattr(Recorder, when)

    def watched(self: Recorder, what: Any, *more: Any) -> Any:
        result = method(self, what, *more)
        if (what["round"] if when == "evaluated" else what.round) == round:
            do()
        return result

    setattr(Recorder, when, watched)
    try:
        yield
    finally:
        setattr(Recorder, when, method)


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
