"""Connections to trackers. Nothing leaves the machine unless the user sets the tracker's own variable.

An adapter may raise any error: the run continues without its tracker. It imports the tracker's package when
a run starts, because these packages start threads, install hooks and take seconds to import.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

PROJECT = "fedsim"
"""The default project, for trackers that have one."""
Value = str | int | float | bool


class Row(NamedTuple):
    """An evaluated round and its numbers, all of them finite."""

    round: int
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it.

    name: the name of the run folder. folder: the tracker's own folder in it. config: the run's parameters.
    id: the tracker's own name of the run, "" unless an earlier start has begun it. last: the last round that
    the tracker has; -1 for none.
    """

    name: str
    folder: Path
    config: Mapping[str, Value]
    id: str = ""
    last: int = -1


class Tracker(Protocol):
    """A connection to a tracker, for one run."""

    def start(self, run: TrackedRun) -> str:
        """Begin the run, or resume run.id; return the id with which a later start resumes the run."""

    def log(self, rows: Sequence[Row]) -> None:
        """Write rounds so that they remain if this process is killed afterwards."""

    def finish(self, status: str, final: Row, files: Sequence[Path]) -> None:
        """Write the numbers of the end, keep the files, and close. status: of summary.json, or "killed"."""


class Tensorboard:
    """Event files in RUN/tracking/tensorboard, by TensorBoard's own writer, because torch's imports torch."""

    def start(self, run: TrackedRun) -> str:
        self._event = import_module("tensorboard.compat.proto.event_pb2")
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        writer = import_module("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(str(run.folder))
        if run.id:  # TensorBoard then hides what an earlier start wrote after round run.last
            self._add(run.last + 1, session_log=self._event.SessionLog(status=self._event.SessionLog.START))
        hparams = import_module("tensorboard.plugins.hparams.summary_v2")
        self._add(0, summary=hparams.hparams_pb(dict(run.config), trial_id=run.name))
        self._writer.flush()
        return run.name

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            values = [self._summary.Value(tag=key, simple_value=x) for key, x in row.numbers.items()]
            self._add(row.round, summary=self._summary(value=values))
        self._writer.flush()

    def finish(self, status: str, final: Row, files: Sequence[Path]) -> None:
        self.log([final])  # an event file cannot contain files
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **content))


_MLFLOW_STATUS = {"done": "FINISHED", "failed": "FAILED"}


class Mlflow:
    """A run in RUN/tracking/mlflow, or at MLFLOW_TRACKING_URI. Locally these are files, because mlflow-skinny
    has no database, and a database for every run would take seconds to set up."""

    def start(self, run: TrackedRun) -> str:
        for variable in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "MLFLOW_ALLOW_FILE_STORE"):
            os.environ.setdefault(variable, "true")
        self._entities = import_module("mlflow.entities")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "mlruns").resolve().as_uri()
        self._client = import_module("mlflow").MlflowClient(tracking_uri=uri)
        if run.id:
            self._run = run.id
            self._client.update_run(run.id, status="RUNNING")
            return run.id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        self._run = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        for key, value in run.config.items():
            self._client.log_param(self._run, _safe(key), value)
        return self._run

    def log(self, rows: Sequence[Row]) -> None:
        now = int(time.time() * 1000)
        for round, numbers in rows:
            metrics = [self._entities.Metric(_safe(key), x, now, round) for key, x in numbers.items()]
            self._client.log_batch(self._run, metrics=metrics)

    def finish(self, status: str, final: Row, files: Sequence[Path]) -> None:
        self.log([final])
        for path in files:
            self._client.log_artifact(self._run, str(path))
        self._client.set_terminated(self._run, status=_MLFLOW_STATUS.get(status, "KILLED"))


def _safe(name: str) -> str:
    """Replace the characters that MLflow does not accept in a name."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)


class Wandb:
    """An offline run in RUN/tracking/wandb, for `wandb sync`; WANDB_MODE changes the mode. No machine
    statistics, source code or output are recorded."""

    def start(self, run: TrackedRun) -> str:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb = import_module("wandb")
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=run.name,
            id=run.id or os.urandom(4).hex(),
            resume="allow",
            dir=str(run.folder),
            mode=os.environ.get("WANDB_MODE") or "offline",
            config=dict(run.config),
            settings=settings,
        )
        return str(self._run.id)

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(dict(row.numbers), step=row.round)

    def finish(self, status: str, final: Row, files: Sequence[Path]) -> None:
        self._run.summary.update(dict(final.numbers))
        for path in files:  # copied, because save() only links files from outside the run's folder
            copy = shutil.copy(path, self._run.dir)
            self._run.save(str(copy), base_path=self._run.dir, policy="now")
        self._run.finish(exit_code=0 if status == "done" else 1)


class Trackio:
    """A run in RUN/tracking/trackio, in TRACKIO_DIR, or on a server that TRACKIO_SPACE_ID or
    TRACKIO_SERVER_URL names. Trackio's thread writes every half second."""

    def start(self, run: TrackedRun) -> str:
        online = any(map(os.environ.get, ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")))
        os.environ.setdefault("TRACKIO_DIR", str(run.folder.resolve()))  # read when trackio is imported
        os.environ.setdefault("HF_HUB_OFFLINE", "0" if online else "1")
        self._run = import_module("trackio").init(
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
        for row in rows:
            self._run.log(dict(row.numbers), step=row.round)

    def finish(self, status: str, final: Row, files: Sequence[Path]) -> None:
        self.log([final])
        for path in files:
            self._run.log_artifact(str(path), name=path.name)
        self._run.finish()


ADAPTERS: Mapping[str, type[Tracker]] = {
    "tensorboard": Tensorboard,
    "mlflow": Mlflow,
    "wandb": Wandb,
    "trackio": Trackio,
}
