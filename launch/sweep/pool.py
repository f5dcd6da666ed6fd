"""The folders of a sweep's runs: one per configuration, shared by all recipes, so that none runs twice."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedsim.errors import DataError
from launch.runs.folder import DONE, INTERRUPTED, KILLED, SUMMARY, RunFolder, json_or_empty
from launch.runs.source_commit import commit
from workers.storage.atomic_files import disk_errors


class Named(Protocol):
    """A trial, or its task on another machine."""

    @property
    def id(self) -> str:
        """Trial.id, the name of its folder."""


@dataclass(frozen=True)
class Pool:
    """Run folders POOL/<algorithm>-<digest of the experiment>; sweep.json in them has commit and seconds."""

    path: Path
    keeps_states: bool = True
    """Keep clients' states after the end of a run; those of a hundred may have half a gigabyte."""

    def folder(self, trial: Named) -> Path:
        return self.path / trial.id

    def done(self, trial: Named) -> bool:
        return self.run(trial).status == DONE and (self.folder(trial) / "sweep.json").is_file()

    def run(self, trial: Named) -> RunFolder:
        """The folder of a trial's run, which need not be there."""
        return RunFolder(self.folder(trial))

    def error(self, trial: Named) -> str:
        summary = json_or_empty(self.folder(trial) / SUMMARY)
        return str(summary.get("error") or self.signed(trial).get("error") or "no summary was written")

    def claim(self, trial: Named) -> int | None:
        """A descriptor that holds this run for one sweep until release(), or None: another has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        return _locked(self._lock(trial), os.O_CREAT)

    def release(self, trial: Named, claim: int) -> None:
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

    def _lock(self, trial: Named) -> Path:
        return self.path / f".{trial.id}.lock"

    def begun(self, trial: Named) -> bool:
        """Return whether a run can be resumed from what an earlier attempt has left; else remove that. A run
        that was carried here from another machine is unpacked first."""
        folder, packed = self.folder(trial), self._packed(trial)
        if packed.is_file() and not folder.exists():
            try:
                with tarfile.open(packed, "r:") as archive:
                    archive.extractall(folder, filter="data")
            except (tarfile.TarError, OSError) as e:
                self.clear(trial)
                why = f"{packed} cannot be unpacked ({e}); remove it to begin the run anew"
                raise DataError(why) from None
        packed.unlink(missing_ok=True)
        stopped = self.run(trial).status in (INTERRUPTED, KILLED)
        if stopped and any((folder / "checkpoints").glob("*.checkpoint")):
            return True
        self.clear(trial)
        return False

    def clear(self, trial: Named) -> None:
        """Remove what an earlier attempt has left."""
        shutil.rmtree(self.folder(trial), ignore_errors=True)

    def pack(self, trial: Named) -> Path:
        """Write a file from which a stopped run can be resumed by the same sweep on another machine of the
        same kind: its folder, in one file beside it."""
        packed = self._packed(trial)
        with disk_errors(packed), tarfile.open(packed, "w") as archive:
            archive.add(self.folder(trial), ".", filter=lambda m: None if m.name == "./lock" else m)
        return packed

    def _packed(self, trial: Named) -> Path:
        return self.path / f"{trial.id}.tar"

    def sign(self, trial: Named, seconds: float) -> None:
        """Record from what a run came and how long it took, and remove its states if it has ended and they do
        not stay. Seconds of several attempts are added up."""
        before = self.signed(trial).get("seconds", 0.0)
        label = {"seconds": round(before + seconds, 1), "commit": commit()}
        (self.folder(trial) / "sweep.json").write_text(json.dumps(label) + "\n")
        if not self.keeps_states and self.run(trial).status == DONE:
            shutil.rmtree(self.folder(trial) / "state", ignore_errors=True)

    def signed(self, trial: Named) -> dict[str, Any]:
        return json_or_empty(self.folder(trial) / "sweep.json")


def _locked(path: Path, create: int = 0) -> int | None:
    """A descriptor of a locked file, or None: another process has it, or it is not there. A lock's file is
    removed before its release. A file that was removed meanwhile locks nothing."""
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
