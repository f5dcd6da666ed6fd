"""fedsim watch: show a run's progress in another terminal, from small files, without a lock or torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from fedsim import plugins
from fedsim.errors import DataError, FedsimError, Interrupted, UsageError
from launch.commands.errors import Command
from launch.commands.shared import run_argument
from launch.numbers import counted, percentage
from launch.progress_display import ProgressDisplay
from launch.runs.documents import Summary
from launch.runs.folder import (
    DAMAGED,
    DONE,
    KILLED,
    MISSING,
    RUNNING,
    SUMMARY,
    RunFolder,
    document_or_empty,
    is_run,
    run_folders,
)
from launch.runs.growing import GrowingLines
from workers.storage.growing_file import METRICS
from workers.storage.metrics_file import line_of

EXIT = {"done": 0, "interrupted": Interrupted.exit_code, "killed": 137}
"""The exit code for a run's status; other statuses, such as failed, give 1."""
GRACE = 5.0
"""Seconds until a run without a coordinator counts as killed, and a sweep without a running run as ended."""

SHOWN = {"round", "seconds", "test_accuracy", "test_nll", "bytes_down", "bytes_up"}
"""The numbers of a round that are shown."""


@click.command(cls=Command)
@run_argument
@click.option(
    "--interval",
    type=click.FloatRange(min=0.05),
    metavar="SECONDS",
    default=1.0,
    help="Between two looks.  [1]",
)
def watch(run: Path, interval: float) -> None:
    """Print RUN's evaluated rounds until it ends, on any machine that sees its folder; for a folder of
    runs, print a line when each one ends.

    Reads files and takes no lock. Ctrl-C ends the watch, not the run. Exit code: 0 if the run is done, 1
    failed, 130 interrupted, 137 killed; for several runs, the first code that is not 0.
    """
    sys.exit(follow(run, interval))


@dataclass
class WatchedRun:
    """The part of a run that has been read.

    shown: the last round that look() has yielded, -1 for none. spent: the algorithm's bytes in the rounds so
    far; None after a round that was not evaluated, because metrics.jsonl lacks its bytes. seconds: the
    duration of the evaluated rounds. status: RunFolder.status once the run has ended, '' before.
    """

    path: Path
    shown: int = -1
    spent: int | None = 0
    seconds: float = 0.0
    last: Mapping[str, Any] = field(default_factory=dict)
    status: str = ""
    error: str = ""
    _gone: float | None = None

    def __post_init__(self) -> None:
        self._lines = GrowingLines(self.path / METRICS)

    def look(self, now: float) -> Iterator[dict[str, Any]]:
        """Yield new lines of rounds, with `spent` and `seconds` updated for each; then update the status.
        now: seconds of a monotonic clock."""
        status = RunFolder(self.path).status  # read first: a run that has ended has written all of its lines
        for line in self._new():
            if line["round"] > self.shown:
                whole = self.spent is not None and line["round"] == self.shown + 1
                size = sum(int(line.get(f"bytes_{side}") or 0) for side in ("down", "up"))
                self.spent = (self.spent or 0) + size if whole else None
                self.seconds += float(line.get("seconds") or 0)
                self.shown, self.last = line["round"], line
                yield line
        if status != KILLED:
            self._gone = None
        elif self._gone is None:
            self._gone = now
        starting = self._gone is not None and now - self._gone < GRACE
        self.status = "" if status == RUNNING or starting else status
        self.error = (
            str(document_or_empty(self.path / SUMMARY, Summary).get("error") or "") if self.status else ""
        )

    def update(self, now: float) -> str:
        """Call look() and return the status, without the lines."""
        for _ in self.look(now):
            pass
        return self.status

    @property
    def outcome(self) -> str:
        """A text that describes how the run ended."""
        accuracy = self.last.get("test_accuracy")
        score = f", test accuracy {percentage(accuracy)}" if accuracy is not None else ""
        why = f": {self.error}" if self.error else ""
        return f"{self.status} after {counted(max(0, self.shown), 'evaluated round')}{score}{why}"

    def _new(self) -> Iterator[dict[str, Any]]:
        for text in self._lines.new():
            try:
                line = line_of(text)
            except ValueError:
                line = {}
            if not line.keys() >= SHOWN:
                if self._lines.at == len(text) + 1:
                    raise DataError(
                        f"{self._lines.path} is damaged: its first line is not the record of a round"
                    )
                self._lines.at = 0  # the file was truncated and has grown again; `shown` prevents repeats
                return
            yield line


def follow(folder: Path, interval: float = 1.0) -> int:
    """Show a run, or the runs in a folder, every `interval` s until they end; return the exit code."""
    if not folder.exists():
        raise UsageError(f"there is no folder {folder}: a run makes it in its first second")
    if not is_run(folder) and _run_folders(folder):
        return _watch_all(folder, interval)
    experiment, watched = RunFolder.open(folder, begun=False).experiment, WatchedRun(folder)
    display = ProgressDisplay(int(experiment["rounds"]))
    algo, dataset = (plugins.short(str(experiment[key])) for key in ("algo", "dataset"))
    display.header([f"{folder}, {algo} on {dataset}"])
    try:
        while True:
            for line in watched.look(time.monotonic()):
                display.committed(line["round"], watched.seconds)
                display.evaluated(line, watched.spent)
            if watched.status:
                break
            time.sleep(interval)
    finally:
        display.stop()
    more = "; its folder was removed" if watched.status == MISSING else f"; fedsim resume {folder} continues"
    more = "" if watched.status in (DONE, DAMAGED) else more
    display.console.print(watched.outcome + more, soft_wrap=True)
    return EXIT.get(watched.status, FedsimError.exit_code)


def _watch_all(folder: Path, interval: float) -> int:
    """Print a line for each run that ends, until no run has been running for GRACE seconds."""
    known: dict[Path, WatchedRun] = {}
    display = ProgressDisplay(0)
    idle_since: float | None = None
    while True:
        now = time.monotonic()
        for path in _run_folders(folder):
            watched = known.setdefault(path, WatchedRun(path))
            if not watched.status and watched.update(now):
                display.status("")
                line = f"{path.name}: {watched.outcome}"
                display.console.print(line, soft_wrap=True)
        running = [w for w in known.values() if not w.status]
        idle_since = None if running else now if idle_since is None else idle_since
        if idle_since is not None and now - idle_since >= GRACE:
            break
        display.status(_progress(running, len(known))[: display.console.width - 1])
        time.sleep(interval)
    display.status("")
    codes = [EXIT.get(watched.status, FedsimError.exit_code) for watched in known.values()]
    return next((code for code in codes if code), 0)


def _progress(running: Sequence[WatchedRun], runs: int) -> str:
    rounds = ", ".join(f"{w.path.name} round {max(0, w.shown)}" for w in running)
    return f"{runs - len(running)} of {counted(runs, 'run')} ended" + (f"; {rounds}" if rounds else "")


def _run_folders(folder: Path) -> list[Path]:
    return [path for path in run_folders(folder) if is_run(path)]
