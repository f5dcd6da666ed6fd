"""Trackio: a run in RUN/tracking/trackio, in TRACKIO_DIR, or on a server that ELSEWHERE's variables name."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fedsim.extras import needed
from launch.tracking import PROJECT, Ending, Row, TrackedRun

ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
"""The environment variables with which a user names a server."""


class TrackioTracker:
    """A tracker that uses Trackio's thread, which writes every half second. Machine statistics are off."""

    def start(self, run: TrackedRun) -> str:
        """Begin a run, or resume the run named run.id."""
        os.environ.setdefault("TRACKIO_DIR", str(run.folder.resolve()))  # read when trackio is imported
        os.environ.setdefault("HF_HUB_OFFLINE", str(int(not any(map(os.environ.get, ELSEWHERE)))))
        self._trackio = needed("trackio", "--track trackio", "trackio")
        self._run = self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=run.id or run.name,
            config=dict(run.config),
            resume="must" if run.id else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return str(self._run.name)

    def log(self, rows: Sequence[Row]) -> None:
        """Pass rounds to Trackio's thread, with the round's number as step."""
        for row in rows:
            self._run.log(dict(row.numbers), step=row.round)

    def finish(self, ending: Ending) -> None:
        """Write the final numbers at the last round, keep the files as artefacts, and wait for the thread."""
        self._run.log(dict(ending.final.numbers), step=ending.final.round)
        for path in ending.files:
            self._run.log_artifact(str(path), name=path.name)
        self._run.finish()
