"""Connections to trackers. Nothing leaves the machine unless the user sets the tracker's own variable.

An adapter may raise any error: the run continues without its tracker. It imports the tracker's package when
a run starts, because these packages start threads, install hooks and take seconds to import.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

PROJECT = "fedsim"
"""The default project, for trackers that have one."""
Value = str | int | float | bool


class Tracker(Protocol):
    """A connection to a tracker, for one run."""

    def start(self, name: str, folder: Path, config: Mapping[str, Value]) -> None:
        """Begin a run. name: of the run folder. folder: the tracker's own, which is empty. config: the run's
        parameters; run is its unique name."""

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Write a round so that it remains if this process is killed afterwards."""

    def finish(self, status: str) -> None:
        """Close the run. status: of summary.json, or "killed"."""


class Tensorboard:
    """Event files in RUN/tracking/tensorboard, by TensorBoard's own writer, because torch's imports torch."""

    def start(self, name: str, folder: Path, config: Mapping[str, Value]) -> None:
        self._event = import_module("tensorboard.compat.proto.event_pb2")
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        writer = import_module("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(str(folder))
        # a TensorBoard that is open forgets what it has read of an earlier start
        self._add(0, session_log=self._event.SessionLog(status=self._event.SessionLog.START))
        hparams = import_module("tensorboard.plugins.hparams.summary_v2")
        self._add(0, summary=hparams.hparams_pb(dict(config), trial_id=name))
        self._writer.flush()

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=key, simple_value=x) for key, x in numbers.items()]
        self._add(round, summary=self._summary(value=values))
        self._writer.flush()

    def finish(self, status: str) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **content))


class Mlflow:
    """A run in RUN/tracking/mlflow, or at MLFLOW_TRACKING_URI. Locally these are files, because mlflow-skinny
    has no database, and a database for every run would take seconds to set up."""

    def start(self, name: str, folder: Path, config: Mapping[str, Value]) -> None:
        for variable in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "MLFLOW_ALLOW_FILE_STORE"):
            os.environ.setdefault(variable, "true")
        os.environ.setdefault("MLFLOW_TRACKING_URI", (folder / "mlruns").resolve().as_uri())
        self._mlflow = import_module("mlflow")
        self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)
        self._mlflow.start_run(run_name=name, log_system_metrics=False)
        for key, value in config.items():
            self._mlflow.log_param(_safe(key), value)

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({_safe(key): x for key, x in numbers.items()}, step=round, synchronous=True)

    def finish(self, status: str) -> None:
        self._mlflow.end_run({"done": "FINISHED", "failed": "FAILED"}.get(status, "KILLED"))


def _safe(name: str) -> str:
    """Replace the characters that MLflow does not accept in a name."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)


class Wandb:
    """An offline run in RUN/tracking/wandb, for `wandb sync`; WANDB_MODE changes the mode. No machine
    statistics, source code or output are recorded."""

    def start(self, name: str, folder: Path, config: Mapping[str, Value]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb = import_module("wandb")
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=name,
            id=str(config["run"]),
            resume="allow",
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE") or "offline",
            config=dict(config),
            settings=settings,
        )

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=round)

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "done" else 1)


class Trackio:
    """A run in RUN/tracking/trackio, in TRACKIO_DIR, or on a server that TRACKIO_SPACE_ID or
    TRACKIO_SERVER_URL names. Trackio's thread writes every half second."""

    def start(self, name: str, folder: Path, config: Mapping[str, Value]) -> None:
        online = any(map(os.environ.get, ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")))
        os.environ.setdefault("TRACKIO_DIR", str(folder.resolve()))  # read when trackio is imported
        os.environ.setdefault("HF_HUB_OFFLINE", "0" if online else "1")
        project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = import_module("trackio").init(project=project, name=name, config=dict(config), **quiet)

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=round)

    def finish(self, status: str) -> None:
        self._run.finish()


ADAPTERS: Mapping[str, type[Tracker]] = {
    "tensorboard": Tensorboard,
    "mlflow": Mlflow,
    "wandb": Wandb,
    "trackio": Trackio,
}
