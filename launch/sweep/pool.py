"""The folders of sweep runs. All recipes share one folder per configuration, so no run is computed twice."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.errors import DataError
from launch.runs.documents import Attempt, Summary
from launch.runs.folder import (
    DONE,
    INTERRUPTED,
    KILLED,
    RUNNING,
    SUMMARY,
    RunFolder,
    document_or_empty,
    folder_name,
)
from launch.runs.source_commit import commit
from launch.sweep.recipe import Task
from workers.storage.atomic_files import disk_errors, is_locked, write_atomically

ATTEMPT = "attempt.json"
"""A file in an unfinished run's folder with the seconds and the last error of its attempts."""


@dataclass(frozen=True)
class Pool:
    """Run folders POOL/<algorithm>-<digest of the experiment>, with commit and seconds in sweep.json.

    keeps_states: keep clients' states after the end of a run. Those of 100 clients may need half a gigabyte.
    """

    path: Path
    keeps_states: bool = True

    def folder(self, trial: Task) -> Path:
        return self.path / folder_name(trial.id)

    def done(self, trial: Task) -> bool:
        return self.run(trial).status == DONE and "commit" in self.signed(trial)

    def run(self, trial: Task) -> RunFolder:
        """Return the folder of a trial's run; the folder need not exist."""
        return RunFolder(self.folder(trial))

    def error(self, trial: Task) -> str:
        summary = document_or_empty(self.folder(trial) / SUMMARY, Summary)
        return str(summary.get("error") or self._attempt(trial).get("error") or "no summary was written")

    def claim(self, trial: Task) -> int | None:
        """Lock a run until release(). Return a descriptor, or None if another sweep has the lock."""
        with disk_errors(f"cannot make the folder {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
        return _locked(self._lock(trial), os.O_CREAT)

    def release(self, trial: Task, claim: int) -> None:
        """Let other sweeps claim the run."""
        self._lock(trial).unlink(missing_ok=True)
        os.close(claim)

    def remove_left(self) -> None:
        """Remove the locks of killed sweeps."""
        for path in self.path.glob(".*.lock"):
            claim = _locked(path)
            if claim is not None:
                path.unlink(missing_ok=True)
                os.close(claim)

    def _lock(self, trial: Task) -> Path:
        return self.path / f".{self.folder(trial).name}.lock"

    def resumable(self, trial: Task) -> bool:
        """Return True if a claimed run was stopped after a committed round.

        A run whose coordinator was on another machine has the status RUNNING until it has a summary. It was
        stopped if its lock is free, because the caller's claim keeps other sweeps from computing it.
        """
        folder, status = self.folder(trial), self.run(trial).status
        stopped = status in (INTERRUPTED, KILLED) or (status == RUNNING and not is_locked(folder))
        return stopped and any((folder / "checkpoints").glob("*.checkpoint"))

    def begun(self, trial: Task) -> bool:
        """Return True if a claimed run can be resumed from earlier attempts; else remove their files.

        A packed run that was copied here from another machine is unpacked first.

        Raises:
            DataError: If the run cannot be unpacked.
        """
        folder, packed = self.folder(trial), self._packed(trial)
        if packed.is_file() and not folder.exists():
            whole = self.path / f".{folder.name}.unpacking"
            shutil.rmtree(whole, ignore_errors=True)
            try:
                with tarfile.open(packed, "r:") as archive:
                    archive.extractall(whole, filter="data")
            except (tarfile.TarError, OSError) as e:
                shutil.rmtree(whole, ignore_errors=True)
                why = f"{packed} cannot be unpacked ({e}); remove it to begin the run anew"
                raise DataError(why) from None
            whole.rename(folder)
        packed.unlink(missing_ok=True)
        if self.resumable(trial):
            return True
        shutil.rmtree(folder, ignore_errors=True)
        return False

    def pause(self, trial: Task, seconds: float) -> None:
        """Record the seconds of a stopped run, and pack its folder into one file, with which the sweep can
        resume the run on another machine of the same kind.

        Raises:
            DiskError: If the disk is full.
        """
        attempts = {"seconds": self._attempt(trial).get("seconds", 0.0) + seconds}
        packed, part = self._packed(trial), self.path / f".{self.folder(trial).name}.packing"
        with disk_errors(packed):
            write_atomically(self.folder(trial) / ATTEMPT, [json.dumps(attempts).encode()])
            with tarfile.open(part, "w") as archive:
                archive.add(self.folder(trial), ".", filter=lambda m: None if m.name == "./lock" else m)
            part.replace(packed)

    def _packed(self, trial: Task) -> Path:
        return self.path / f"{self.folder(trial).name}.tar"

    def _attempt(self, trial: Task) -> dict[str, Any]:
        return document_or_empty(self.folder(trial) / ATTEMPT, Attempt)

    def sign(self, trial: Task, seconds: float) -> None:
        """Record the commit and the seconds of a finished run, including stopped attempts. Remove clients'
        states unless `keeps_states` is set.

        Raises:
            DiskError: If the disk is full.
        """
        seconds += self._attempt(trial).get("seconds", 0.0)
        label = {"seconds": round(seconds, 1), "commit": commit()}
        write_atomically(self.folder(trial) / "sweep.json", [f"{json.dumps(label)}\n".encode()])
        (self.folder(trial) / ATTEMPT).unlink(missing_ok=True)
        if not self.keeps_states:
            shutil.rmtree(self.folder(trial) / "state", ignore_errors=True)

    def signed(self, trial: Task) -> dict[str, Any]:
        return document_or_empty(self.folder(trial) / "sweep.json", Attempt)


def _locked(path: Path, create: int = 0) -> int | None:
    """Lock a file; return its descriptor, or None if another process has the lock or the file does not exist.
    The lock of a removed file is not valid, because a file is removed before its lock is released."""
    while True:
        try:
            held = os.open(path, create | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(held), path.stat()):
                return held
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(held)
            return None
        os.close(held)
