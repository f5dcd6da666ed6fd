"""Chaos: one run under seeded faults of real processes, against the bits of an undisturbed run.

    python -m tests.chaos --faults 100 --seed 0      by hand; prints what happened

Each fault is drawn from the seed: kill -9 or SIGSTOP of a random worker, kill -9 of the coordinator (then the
run is resumed, sometimes with another number of workers), or Ctrl-C, a random while after a report or a
start, so also while processes start. One seed replays one plan; when exactly a fault hits depends on the
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.support.commands import DEADLINE, Command, fedsim, start
from tests.support.process_tree import alive
from tests.support.reproducible import without_seconds

EXPERIMENT = (
    *("--algo", "fedlap_cov", "--clients", "6", "--model", "logistic"),
    *("--participation", "0.7+lost:0.2", "--set", "local.epochs=20"),
)
FAULTS = ("kill worker", "kill worker", "stop worker", "kill coordinator", "kill coordinator", "interrupt")
EARLY = 0.4
"""The share of first faults after a start that come within 1.5 seconds, whatever the run does then."""
GONE_WITHIN = 60.0
"""Seconds in which no process of a killed coordinator may be left."""


@dataclass
class Outcome:
    """What happened to a run, and what came of it."""

    hit: list[str] = field(default_factory=list)
    identical: bool = False
    left: list[int] = field(default_factory=list)
    """Processes that outlived their coordinator."""

    def __str__(self) -> str:
        end = "identical" if self.identical else "DIFFERENT"
        return f"{', '.join(self.hit) or 'nothing hit'}; {end}; left over: {self.left or 0}"


def rounds_for(faults: int) -> int:
    """Return how many rounds a run has: more than it can do between its faults."""
    return 4 * faults + 20


def facts(folder: Path) -> dict[str, Any]:
    """Read all that must be the same: digests, who took part, metrics."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    keys = ("status", "rounds", "model_sha256", "clients_sha256", "took_part", "folded")
    keys += ("bytes_up", "bytes_down")
    return {key: summary[key] for key in keys} | {"metrics": without_seconds(lines)}


def disturbed(seed: int, faults: int, home: Path) -> Outcome:
    """Carry a run out in peace, and one from its launch to its end through so many faults."""
    draw, rounds, outcome, folder = Random(seed), rounds_for(faults), Outcome(), home / "disturbed"
    experiment = (*EXPERIMENT, "--rounds", str(rounds))
    fedsim("launch", *experiment, "--workers", "0", "--out", str(home / "undisturbed"))
    while not _done(folder):
        workers = ("--workers", str(draw.choice((1, 2, 2, 3))), "--lease", "2")
        known = (folder / "manifest.json").exists()
        words = ("resume", str(folder)) if known else ("launch", *experiment, "--out", str(folder))
        running = start(*words, *workers)
        early = draw.random() < EARLY
        while len(outcome.hit) < faults and _waited(running, draw, early):
            outcome.hit.append(_inject(draw, running, folder))
            early = False
        if running.process.poll() is None:
            running.wait()
        outcome.left += _left_over(folder)
        running.process.wait(DEADLINE)
        running.kill()
    outcome.identical = _done(folder) and facts(folder) == facts(home / "undisturbed")
    return outcome


def _done(folder: Path) -> bool:
    """Look whether the run has ended by itself, as its summary says."""
    path = folder / "summary.json"
    return path.exists() and bool(json.loads(path.read_text())["status"] == "done")


def _waited(running: Command, draw: Random, early: bool) -> bool:
    """Wait for the next fault's instant, reading on so that the run never waits; False if it has ended."""
    del running.lines[:-1]
    if early:
        running.listen(draw.uniform(0.0, 1.5))
    else:
        with suppress(AssertionError):  # it has ended before
            running.wait_for("round ")
        running.listen(draw.uniform(0.0, 0.3))
    return running.process.poll() is None


def _inject(draw: Random, running: Command, folder: Path) -> str:
    """Let a fault happen, and say which."""
    what = draw.choice(FAULTS)
    if what == "kill coordinator":
        running.process.kill()
        running.process.wait(DEADLINE)
    elif what == "interrupt":
        running.process.send_signal(signal.SIGINT)
        running.process.wait(DEADLINE)
    else:
        victims = [p["pid"] for p in _processes(folder) if p["role"] == "worker" and not p["ended"]]
        if not victims:
            return f"{what} (none yet)"
        number = signal.SIGKILL if what == "kill worker" else signal.SIGSTOP
        with suppress(ProcessLookupError):
            os.kill(draw.choice(victims), number)
    return what


def _left_over(folder: Path) -> list[int]:
    """Return the processes that are still there when all should have ended."""
    until = time.monotonic() + GONE_WITHIN
    pids = [p["pid"] for p in _processes(folder)]
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def _processes(folder: Path) -> list[dict[str, Any]]:
    path = folder / "processes.json"
    return list(json.loads(path.read_text())) if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    selected = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcome = disturbed(selected.seed, selected.faults, Path(folder))
    print(f"{outcome}, in {time.monotonic() - began:.0f} s")
    raise SystemExit(bool(outcome.left) or not outcome.identical)


if __name__ == "__main__":
    main()
