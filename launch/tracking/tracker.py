"""The interface of a tracker: start or resume a run, log rounds, end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

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

    folder: the tracker's own folder in the run folder. config: every key of the manifest's experiment, by its
    dotted name. id: the tracker's own name of the run, if an earlier start of the run has begun it; otherwise
    "". last: the last round that it has logged; -1 for none.
    """

    name: str
    folder: Path
    config: Mapping[str, Value]
    id: str = ""
    last: int = -1


@dataclass(frozen=True)
class Ending:
    """The end of a run, or of this start of it. status: done, failed, interrupted or killed. last: the last
    evaluated round. numbers: those of summary.json. files: those that are kept with the run: the report, if
    there is one, the summary and the manifest."""

    status: str
    last: int
    numbers: Mapping[str, float]
    files: Sequence[Path]

    @property
    def report(self) -> Path | None:
        """The run's page, if there is one."""
        return next((path for path in self.files if path.suffix == ".html"), None)


class Tracker(Protocol):
    """A connection to a tracker, for one run. It may raise anything: the run continues without it."""

    def start(self, run: TrackedRun) -> str:
        """Begin the run, or resume run.id; returns the id with which a later start resumes it."""

    def log(self, rows: Sequence[Row]) -> None:
        """Write rounds, so that they are there if this process is killed after that.

        Several at once, because many trackers need as long for one transaction as for one row.
        """

    def finish(self, ending: Ending) -> None:
        """Write the end, keep the files, and close."""
