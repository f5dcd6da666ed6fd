"""The process of one tracker: python -m launch.tracking.follow RUN TRACKER. It does not import torch.

The process reads the run's files and writes new rounds to the tracker. When its standard input ends, the run
has ended or the coordinator was killed; the process then writes the last rounds and ends. It prints messages
for the user to standard output, one per line. The tracker's output is logged.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from fedsim.errors import UsageError
from launch.runs.folder import SUMMARY, json_of, json_or_empty
from launch.runs.manifest import MANIFEST
from launch.tracking import FOLDER, TRACKERS, Ending, TrackedRun, Tracker
from launch.tracking.run_rows import RunRows, config, finite
from workers.storage.atomic_files import RunLock, write_atomically

REPORT = "report.html"
INTERVAL = 1.0
"""The minimum number of seconds between two reads of the run's files."""
SHARE = 0.01
"""This process's share of a core during a run: it waits t / SHARE seconds after t seconds of computing."""
PATIENCE = 60.0
"""The seconds to wait for the process of an earlier start, which may still be writing."""
NICENESS = 10
"""The niceness of this process: workers have priority."""
COST = "fedsim: {begun:.3f} s of CPU to begin, {computed:.3f} s during the run"
"""The last line of the log."""


@dataclass
class Followed:
    """A run folder, and the tracker to which its rounds are written. run: the run as the tracker knows it."""

    folder: Path
    name: str
    tracker: Tracker
    run: TrackedRun
    last: int = -1
    """The last evaluated round."""

    @staticmethod
    def begin(folder: Path, name: str, tracker: Tracker) -> Followed:
        """Start or resume the tracker's run."""
        own = folder / FOLDER / name
        own.mkdir(parents=True, exist_ok=True)
        known = json_or_empty(own.with_suffix(".json"))
        manifest = json_of(folder / MANIFEST)
        same = (
            bool(known) and known["of"] == manifest["run"]
        )  # the state may be of an earlier start that failed in this folder
        run = TrackedRun(
            folder.resolve().name,
            own,
            config(manifest),
            str(known["run"]) if same else "",
            int(known["last"]) if same else -1,
        )
        followed = Followed(folder, name, tracker, run)
        followed.run = replace(run, id=tracker.start(run))
        followed._keep()
        return followed

    def write(self, rows: RunRows) -> None:
        """Write the rounds that the tracker does not have; a resumed run computes some rounds again."""
        read = rows.new()
        self.last = max([self.last, *(row.round for row in read)])
        if new := [row for row in read if row.round > self.run.last]:
            self.tracker.log(new)
            self.run = replace(self.run, last=new[-1].round)
            self._keep()

    def end(self) -> None:
        summary = json_or_empty(self.folder / SUMMARY)
        numbers = {key: value for key, value in summary.items() if not isinstance(value, Mapping)}
        paths = [self.folder / name for name in (REPORT, SUMMARY, MANIFEST)]
        files = [path for path in paths if path.is_file()]
        self.tracker.finish(Ending(str(summary.get("status", "killed")), self.last, finite(numbers), files))

    def _keep(self) -> None:
        """Store the tracker's id of the run and the last logged round, atomically."""
        run = self.run
        known = {"of": run.config.get("run"), "run": run.id, "last": run.last}
        write_atomically(run.folder.with_suffix(".json"), [json.dumps(known).encode()])


def tracker_of(name: str) -> Tracker:
    module, kind = TRACKERS[name].adapter
    tracker: Tracker = getattr(import_module(f"launch.tracking.{module}"), kind)()
    return tracker


def follow(followed: Followed, ended: Callable[[float], bool], interval: float = INTERVAL) -> float:
    """Write a run's rounds until it has ended; return the CPU seconds that this took during the run.

    ended: a function that waits for a number of seconds, or until the run has ended, and returns whether the
    run has ended. interval: the minimum number of seconds between two reads of the run's files.
    """
    rows, pause, computed = RunRows(followed.folder), 0.0, 0.0
    while not ended(pause):
        before = time.process_time()
        followed.write(rows)
        seconds = time.process_time() - before
        pause, computed = max(interval, seconds / SHARE), computed + seconds
    followed.write(rows)
    followed.end()
    return computed


def input_closed(seconds: float) -> bool:
    """Wait `seconds`, or until standard input is closed; return whether it is closed."""
    return bool(select.select([0], [], [], seconds)[0]) and not os.read(0, 1)


def locked(folder: Path) -> RunLock:
    """Lock a tracker's folder; wait up to PATIENCE seconds for the process of an earlier start."""
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return RunLock(folder)
        except UsageError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def main(folder: Path, name: str, tell: Callable[[str], Any]) -> int:
    """Follow a run; return the exit code. tell: a function that shows a line to the user."""
    try:
        lock = locked(folder / FOLDER / name)
        followed = Followed.begin(folder, name, tracker_of(name))
        begun = time.process_time()
        computed = follow(followed, input_closed)
        print(COST.format(begun=begun, computed=computed))
        lock.release()
    except (Exception, SystemExit) as e:
        traceback.print_exc()
        tell(reason(e))
        return 1
    return 0


def _say(line: str, file: int) -> None:
    with suppress(OSError):  # the coordinator is gone
        os.write(file, line.encode(errors="replace") + b"\n")


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    messages = os.dup(1)
    os.dup2(2, 1)
    code = main(Path(sys.argv[1]), sys.argv[2], lambda line: _say(line, messages))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # does not wait for a tracker's threads
