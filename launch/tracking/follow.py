"""The process of one tracker: python -m launch.tracking.follow RUN TRACKER. It does not import torch.

Every start of a run makes the tracker's folder, RUN/tracking/TRACKER, again, with all rounds of the run's
files, so nothing has to be known about an earlier start. New rounds are written as they come. When standard
input ends, the run has ended or the coordinator was killed; the process then writes the last rounds and ends.
Its output is the tracker's log, whose last line is the reason if it fails.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedsim.experiment import dotted
from launch.runs.documents import Manifest
from launch.runs.folder import SUMMARY, document, document_or_empty
from launch.runs.growing import GrowingLines
from launch.runs.manifest import MANIFEST
from launch.tracking.adapters import ADAPTERS, Tracker, Value
from workers.storage.growing_file import LEDGER, METRICS
from workers.storage.metrics_file import line_of

FOLDER = "tracking"
"""The folder in a run folder for the trackers' folders."""
INTERVAL = 5.0
"""The number of seconds between two reads of the run's files, in which the tracker does not compute."""
NICENESS = 10
"""The niceness of this process: workers have priority."""
CLIENTS = {"participants": "asked", "folded": "folded", "late": "late", "refused": "refused"}
"""Lists of clients in metrics.jsonl; a tracker gets the length of each, under the other name."""


class RunRows:
    """The evaluated rounds of a run as flat numbers, read from its files while these grow."""

    def __init__(self, folder: Path) -> None:
        self._metrics, self._ledger = (GrowingLines(folder / name) for name in (METRICS, LEDGER))
        self._bytes = Counter[int]()
        """The algorithm's bytes, by rounds that metrics.jsonl does not have yet."""
        self._so_far = 0

    def new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the rounds that were evaluated since the last call, with their numbers."""
        lines = [line_of(line) for line in self._metrics.new()]
        # a round's bytes are written to the ledger before its line in metrics.jsonl
        for row in self._ledger.new() if lines else ():
            if row.startswith(b"algorithm,"):
                _, number, *_, size = row.split(b",")[:12]
                self._bytes[int(number)] += int(size)
        for line in lines:
            yield int(line["round"]), self._numbers(line)

    def _numbers(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Return all numbers of a line of metrics.jsonl, and the algorithm's bytes up to its round."""
        for earlier in [r for r in self._bytes if r <= line["round"]]:
            self._so_far += self._bytes.pop(earlier)
        result = {"bytes/so_far": float(self._so_far)}
        for key, x in finite({k: v for k, v in line.items() if k != "round"}).items():
            side = key.removeprefix("bytes_")
            result[f"bytes/{side}" if side != key else key.replace(".", "/")] = x
        return result | {f"participation/{to}": len(line[key]) for key, to in CLIENTS.items() if key in line}


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a nested mapping by dotted name, without booleans."""
    return {
        key: float(value)
        for key, value in dotted(values)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def config(manifest: Mapping[str, Any]) -> dict[str, Value]:
    """Return the run's parameters by dotted name: hyperparameters, algorithm, data, versions and the digest.
    Lists and empty values are left out."""
    others = {key: manifest.get(key) for key in ("experiment_sha256", "run", "commit", "versions")}
    values = dotted({**manifest.get("experiment", {}), **others})
    return {key: value for key, value in values if isinstance(value, Value) and value != ""}


def follow(folder: Path, name: str, tracker: Tracker, ended: Callable[[float], bool]) -> None:
    """Write a run's rounds to a tracker until the run has ended.

    ended: a function that waits for a number of seconds, or until the run has ended, and returns whether the
    run has ended.
    """
    own, rows, round, over = folder / FOLDER / name, RunRows(folder), 0, False
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    tracker.start(folder.resolve().name, own, config(document(folder / MANIFEST, Manifest)))
    while not over:
        over = ended(INTERVAL)
        for round, numbers in rows.new():
            tracker.log(round, numbers)
    summary = document_or_empty(folder / SUMMARY)
    at_the_end = {f"summary/{key}": x for key, x in summary.items() if not isinstance(x, Mapping)}
    tracker.log(round, finite(at_the_end))
    tracker.finish(str(summary.get("status", "killed")))


def input_closed(seconds: float) -> bool:
    """Wait `seconds`, or until standard input is closed; return whether it is closed."""
    return bool(select.select([0], [], [], seconds)[0]) and not os.read(0, 1)


def main(folder: Path, name: str) -> int:
    """Follow a run; return the exit code."""
    try:
        (folder / FOLDER).mkdir(exist_ok=True)
        with (folder / FOLDER / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the process of an earlier start may still be writing
            follow(folder, name, ADAPTERS[name](), input_closed)
    except (Exception, SystemExit) as e:
        traceback.print_exc()
        text = " ".join(str(e).split())[:200]
        print(f"{type(e).__name__}: {text}" if text else type(e).__name__, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    code = main(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # does not wait for a tracker's threads
