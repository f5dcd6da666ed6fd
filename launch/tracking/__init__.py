"""Write a run's numbers to TensorBoard, MLflow, Weights & Biases or Trackio while it runs (--track).

Each tracker has its own process, which reads the files that the run's recorder writes: metrics.jsonl,
ledger.csv and the manifest. The coordinator imports no tracker, and waits for trackers only after the run. A
tracker that raises an error, hangs or ends its process does not affect the run. A resumed run continues from
the last round that its tracker has. This module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol

from fedsim.errors import unknown
from fedsim.extras import not_installed

FOLDER = "tracking"
"""The folder in a run folder for the state of all trackers, and for the data of local trackers."""
NONE = "none"


@dataclass(frozen=True)
class Choice:
    """A tracker. name: its package and extra. title: shown in completions. adapter: its module and class."""

    name: str
    title: str
    adapter: tuple[str, str]


TRACKERS = {
    choice.name: choice
    for choice in (
        Choice("tensorboard", "event files for TensorBoard", ("tensorboard_events", "TensorboardTracker")),
        Choice("mlflow", "a run in MLflow", ("mlflow_client", "MlflowTracker")),
        Choice("wandb", "a run in Weights & Biases, offline", ("wandb_offline", "WandbTracker")),
        Choice("trackio", "a run in Trackio", ("trackio_storage", "TrackioTracker")),
    )
}


def selected(text: str) -> tuple[Choice, ...]:
    """Return the trackers that a text such as tensorboard,mlflow names; () for "" and "none"."""
    texts = [name.strip() for name in text.split(",") if name.strip()] if text.strip() != NONE else []
    for name in texts:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
    return tuple(TRACKERS[name] for name in dict.fromkeys(texts))


def check_installed(choices: tuple[Choice, ...]) -> None:
    """Refuse trackers whose package is not installed, before a run begins. Import no package."""
    for choice in choices:
        spec = find_spec(choice.name)
        if spec is None or spec.origin is None:  # a plain folder of this name, such as wandb creates
            raise not_installed(choice.name, f"--track {choice.name}", choice.name)


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

    folder: the tracker's own folder in the run folder. config: the run's parameters by dotted name
    (run_rows.config). id: the tracker's own name of the run, "" unless an earlier start has begun it.
    last: the last round that the tracker has logged; -1 for none.
    """

    name: str
    folder: Path
    config: Mapping[str, Value]
    id: str = ""
    last: int = -1


@dataclass(frozen=True)
class Ending:
    """The end of a run, or of one start of a run. status: done, failed, interrupted or killed. last: the last
    evaluated round. numbers: the numbers of summary.json. files: the files that the tracker keeps, which are
    the report (if there is one), the summary and the manifest."""

    status: str
    last: int
    numbers: Mapping[str, float]
    files: Sequence[Path]

    @property
    def final(self) -> Row:
        """The summary's numbers, under their names in trackers, at the last round."""
        return Row(max(0, self.last), {f"summary/{key}": x for key, x in self.numbers.items()})


class Tracker(Protocol):
    """A connection to a tracker, for one run. It may raise any error: the run continues without it."""

    def start(self, run: TrackedRun) -> str:
        """Begin the run, or resume run.id; return the id with which a later start resumes the run."""

    def log(self, rows: Sequence[Row]) -> None:
        """Write rounds so that they remain if this process is killed afterwards. Rounds are written together,
        because many trackers need as long for one row as for many."""

    def finish(self, ending: Ending) -> None:
        """Write the end, keep the files, and close."""
