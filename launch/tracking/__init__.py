"""--track: a run's numbers in TensorBoard, MLflow, Weights & Biases or Trackio, while it runs.

Every tracker has a process of its own, which reads what the run's recorder writes: metrics.jsonl, ledger.csv
and the manifest. So the coordinator writes nothing twice, imports no tracker and waits for none; a tracker
that raises, hangs or ends its process takes nothing from the run; and a resumed run continues from the last
round that its tracker has. This module imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from fedsim.errors import unknown
from fedsim.extras import not_installed

FOLDER = "tracking"
"""Folder in a run folder: the trackers' state, and the data of those that have no other place."""
NONE = "none"


@dataclass(frozen=True)
class Choice:
    """A tracker that --track names, as its package and extra. title: for completion. adapter: module and
    class."""

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
    """The trackers that a text such as tensorboard,mlflow names; none for "" and "none"."""
    texts = [name.strip() for name in text.split(",") if name.strip()] if text.strip() != NONE else []
    for name in texts:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
    return tuple(TRACKERS[name] for name in dict.fromkeys(texts))


def check_installed(choices: tuple[Choice, ...]) -> None:
    """Refuse trackers whose package is not there, before anything is begun. Imports none."""
    for choice in choices:
        spec = find_spec(choice.name)
        if spec is None or spec.origin is None:  # a folder of this name, such as wandb leaves, is no package
            raise not_installed(choice.name, f"--track {choice.name}", choice.name)
