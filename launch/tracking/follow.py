"""The process of one tracker: python -m launch.tracking.follow RUN TRACKER. It does not import torch.

The process reads the run's files and writes new rounds to the tracker. When its standard input ends, the run
has ended or the coordinator was killed; the process then writes the last rounds and ends. Its output is the
tracker's log, whose last line is the reason if it fails.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsim.experiment import dotted
from launch.runs.folder import SUMMARY, json_of, json_or_empty
from launch.runs.growing import GrowingLines
from launch.runs.manifest import MANIFEST
from launch.tracking.adapters import ADAPTERS, Row, TrackedRun, Tracker, Value
from workers.storage.atomic_files import RunLock, is_locked, write_atomically
from workers.storage.growing_file import LEDGER, METRICS

FOLDER = "tracking"
"""The folder in a run folder for the state of all trackers, and for the data of local trackers."""
INTERVAL = 1.0
"""The minimum number of seconds between two reads of the run's files."""
SHARE = 0.01
"""This process's share of a core during a run: it waits t / SHARE seconds after t seconds of computing."""
PATIENCE = 60.0
"""The seconds to wait for the process of an earlier start, which may still be writing."""
NICENESS = 10
"""The niceness of this process: workers have priority."""
CLIENTS = {"participants": "asked", "folded": "folded", "late": "late", "refused": "refused"}
"""Lists of clients in metrics.jsonl; a tracker gets the length of each, under the other name."""


class RunRows:
    """The evaluated rounds of a run as flat numbers, read from its files while these grow."""

    def __init__(self, folder: Path) -> None:
        self._metrics, self._ledger = (GrowingLines(folder / name) for name in (METRICS, LEDGER))
        self._bytes: dict[int, Counter[str]] = {}
        """The algorithm's bytes by direction and field, of rounds that metrics.jsonl does not have yet."""
        self._so_far = 0

    def new(self) -> list[Row]:
        """Return the rounds that were evaluated since the last call."""
        lines = [json.loads(line) for line in self._metrics.new()]
        if lines:
            self._read_ledger()  # a round's bytes are written there before its line in metrics.jsonl
        return [Row(int(line["round"]), self._numbers(line)) for line in lines]

    def _read_ledger(self) -> None:
        for line in self._ledger.new():
            if line.startswith(b"algorithm,"):
                _, number, _, _, _, direction, _, name, layer, _, _, size, *_ = line.decode().split(",")
                part = f"{name} {layer}" if name and layer != "values" else name or layer
                self._bytes.setdefault(int(number), Counter())[f"{direction}.{part}"] += int(size)

    def _numbers(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Return all numbers of a line of metrics.jsonl, and the ledger's numbers of the same round."""
        number = int(line["round"])
        fields = self._bytes.get(number, Counter())
        for earlier in [r for r in self._bytes if r <= number]:
            self._so_far += self._bytes.pop(earlier).total()
        plain = {k: v for k, v in line.items() if k != "round" and not isinstance(v, list)}
        result = {
            f"bytes/{key.removeprefix('bytes_')}" if key.startswith("bytes_") else key.replace(".", "/"): x
            for key, x in finite(plain).items()
        }
        result["bytes/so_far"] = self._so_far
        result |= {f"bytes/field/{key}": n for key, n in sorted(fields.items())}
        result |= {f"participation/{to}": len(line[key]) for key, to in CLIENTS.items() if key in line}
        return {key: float(x) for key, x in result.items()}


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a nested mapping by dotted name, without booleans."""
    return {
        key: float(value)
        for key, value in dotted(values)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def config(manifest: Mapping[str, Any]) -> dict[str, Value]:
    """Return the run's parameters by dotted name: hyperparameters, algorithm, data, versions and the digest.
    Lists and empty values are left out; trackers keep the manifest, which has them."""
    others = {key: manifest.get(key) for key in ("experiment_sha256", "run", "commit", "versions")}
    values = dotted({**manifest.get("experiment", {}), **others})
    return {key: value for key, value in values if isinstance(value, Value) and value != ""}


class Follower:
    """A run folder, and the tracker to which its rounds are written."""

    def __init__(self, folder: Path, name: str, tracker: Tracker) -> None:
        """Start the tracker's run, or resume the one that an earlier start of the same run has begun."""
        self._folder, self._tracker, self._rows = folder, tracker, RunRows(folder)
        manifest, state = json_of(folder / MANIFEST), folder / FOLDER / f"{name}.json"
        known = json_or_empty(state)
        run = TrackedRun(folder.resolve().name, state.with_suffix(""), config(manifest))
        if known.get("of") == manifest["run"]:  # otherwise a failed start has left the state in this folder
            run = replace(run, id=str(known["run"]), last=int(known["last"]))
        run.folder.mkdir(parents=True, exist_ok=True)
        self._final, self._run = Row(max(0, run.last), {}), replace(run, id=tracker.start(run))
        self._keep()

    def write(self) -> None:
        """Write the rounds that the tracker does not have; a resumed run computes some rounds again."""
        rows = self._rows.new()
        self._final = Row(max([self._final.round, *(row.round for row in rows)]), {})
        if new := [row for row in rows if row.round > self._run.last]:
            self._tracker.log(new)
            self._run = replace(self._run, last=new[-1].round)
            self._keep()

    def end(self) -> None:
        """Write the numbers of summary.json at the last round, and close the tracker's run."""
        summary = json_or_empty(self._folder / SUMMARY)
        numbers = finite({key: value for key, value in summary.items() if not isinstance(value, Mapping)})
        final = self._final._replace(numbers={f"summary/{key}": x for key, x in numbers.items()})
        files = [path for path in (self._folder / SUMMARY, self._folder / MANIFEST) if path.is_file()]
        self._tracker.finish(str(summary.get("status", "killed")), final, files)

    def _keep(self) -> None:
        """Store the tracker's id of the run and the last logged round, atomically."""
        run = self._run
        known = {"of": run.config.get("run"), "run": run.id, "last": run.last}
        write_atomically(run.folder.with_suffix(".json"), [json.dumps(known).encode()])


def follow(follower: Follower, ended: Callable[[float], bool]) -> None:
    """Write a run's rounds until it has ended.

    ended: a function that waits for a number of seconds, or until the run has ended, and returns whether the
    run has ended.
    """
    pause = 0.0
    while not ended(pause):
        before = time.process_time()
        follower.write()
        pause = max(INTERVAL, (time.process_time() - before) / SHARE)
    follower.write()
    follower.end()


def input_closed(seconds: float) -> bool:
    """Wait `seconds`, or until standard input is closed; return whether it is closed."""
    return bool(select.select([0], [], [], seconds)[0]) and not os.read(0, 1)


def main(folder: Path, name: str) -> int:
    """Follow a run; return the exit code."""
    try:
        own = folder / FOLDER / name
        own.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + PATIENCE
        while is_locked(own) and time.monotonic() < until:  # by the process of an earlier start
            time.sleep(0.1)
        lock = RunLock(own)
        follow(Follower(folder, name, ADAPTERS[name]()), input_closed)
        lock.release()
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
