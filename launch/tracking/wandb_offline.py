"""Weights & Biases: an offline run in RUN/tracking/wandb, for `wandb sync`. WANDB_MODE changes the mode."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence

from fedsim.extras import needed
from launch.tracking import PROJECT, Ending, Row, TrackedRun


class WandbTracker:
    """A tracker that uses wandb's own process, and records no machine statistics, source code or output."""

    def __init__(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._wandb = needed("wandb", "--track wandb", "wandb")

    def start(self, run: TrackedRun) -> str:
        """Begin a run with a new id, or continue the run with id run.id."""
        name = run.id or secrets.token_hex(4)
        settings = self._wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
        )
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=run.name,
            id=name,
            resume="allow",
            dir=str(run.folder),
            mode=os.environ.get("WANDB_MODE") or "offline",
            config=dict(run.config),
            settings=settings,
        )
        return name

    def log(self, rows: Sequence[Row]) -> None:
        """Write rounds, with the round's number as step."""
        for row in rows:
            self._run.log(dict(row.numbers), step=row.round)

    def finish(self, ending: Ending) -> None:
        """Write the final numbers to the run's summary, keep the files, and close."""
        self._run.summary.update(dict(ending.final.numbers))
        for path in ending.files:  # copied, because save() only links files from outside the run's folder
            kept = shutil.copy(path, self._run.dir)
            self._run.save(str(kept), base_path=self._run.dir, policy="now")
        self._run.finish(exit_code=0 if ending.status == "done" else 1)
