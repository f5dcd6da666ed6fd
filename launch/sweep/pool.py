"""The folders of a sweep's runs: one per configuration, shared by all recipes, so that none runs twice."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from launch.runs.folder import DONE, SUMMARY, RunFolder, json_or_empty
from launch.runs.source_commit import commit


class Named(Protocol):
    """A trial, or its task on another machine."""

    @property
    def id(self) -> str:
        """Trial.id, the name of its folder."""


@dataclass(frozen=True)
class Pool:
    """POOL/<algorithm>-<digest of the experiment>/ is an ordinary run folder, with sweep.json beside its
    files: the commit and the seconds of the run."""

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
        return str(json_or_empty(self.folder(trial) / SUMMARY).get("error") or "no summary was written")

    def claim(self, trial: Named) -> int | None:
        """A descriptor that holds this run for one sweep until release(), or None: another has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        return _locked(self._lock(trial), os.O_CREAT)

    def release(self, trial: Named, claim: int) -> None:
        """Let other sweeps have a run."""
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

    def clear(self, trial: Named) -> None:
        """Remove what an earlier attempt has left."""
        shutil.rmtree(self.folder(trial), ignore_errors=True)

    def sign(self, trial: Named, seconds: float) -> None:
        """Record when and from what a finished run came, and remove its states if they do not stay."""
        label = {"seconds": round(seconds, 1), "commit": commit()}
        (self.folder(trial) / "sweep.json").write_text(json.dumps(label) + "\n")
        if not self.keeps_states:
            shutil.rmtree(self.folder(trial) / "state", ignore_errors=True)

    def signed(self, trial: Named) -> dict[str, Any]:
        return json_or_empty(self.folder(trial) / "sweep.json")


def _locked(path: Path, create: int = 0) -> int | None:
    """A descriptor of a locked file, or None: another process has it, or it is not there.

    A lock's file is removed before its release. A file that was removed meanwhile locks nothing.
    """
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
