"""MLflow: a run in RUN/tracking/mlflow, or at MLFLOW_TRACKING_URI if it is set."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

from fedsim.extras import needed
from launch.tracking import PROJECT, Ending, Row, TrackedRun

AT_ONCE = 1000
"""The number of metrics that MLflow accepts in one call."""
PARAMS_AT_ONCE = 100
STATUS = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "killed": "KILLED"}


class MlflowTracker:
    """A tracker that writes with MLflow's client.

    Without MLFLOW_TRACKING_URI it writes files, because mlflow-skinny has no database, and a database for
    every run would take seconds to set up.
    """

    def __init__(self) -> None:
        for name in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "MLFLOW_ALLOW_FILE_STORE"):
            os.environ.setdefault(name, "true")
        self._mlflow = needed("mlflow", "--track mlflow", "mlflow")
        self._entities = needed("mlflow.entities", "--track mlflow", "mlflow")

    def start(self, run: TrackedRun) -> str:
        """Create a run with its parameters, or reopen the run with run.id."""
        where = os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "mlruns").resolve().as_uri()
        self._client = self._mlflow.MlflowClient(tracking_uri=where)
        if run.id:
            self._client.update_run(run.id, status="RUNNING")
            self._run = run.id
        else:
            self._run = str(self._client.create_run(self._experiment(), run_name=run.name).info.run_id)
            params = (self._entities.Param(_safe(key), str(value)) for key, value in run.config.items())
            while some := list(islice(params, PARAMS_AT_ONCE)):
                self._client.log_batch(self._run, params=some)
        return self._run

    def log(self, rows: Sequence[Row]) -> None:
        """Write the metrics of rounds, with the round as step."""
        now = int(time.time() * 1000)
        metrics = (
            self._entities.Metric(_safe(key), value, now, row.round)
            for row in rows
            for key, value in row.numbers.items()
        )
        while some := list(islice(metrics, AT_ONCE)):
            self._client.log_batch(self._run, metrics=some)

    def finish(self, ending: Ending) -> None:
        """Write the final numbers as metrics, keep the files as artefacts, and end the run."""
        self.log([ending.final])
        for path in ending.files:
            self._client.log_artifact(self._run, str(path))
        self._client.set_terminated(self._run, status=STATUS[ending.status])

    def _experiment(self) -> Any:
        """Return the id of the experiment that the run belongs to; create it if it does not exist."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        known = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if known is None else known.experiment_id


def _safe(name: str) -> str:
    """Replace the characters that MLflow does not accept in a name."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)
