"""Chaos: real processes under seeded faults, against the bits of an undisturbed run.

    python -m tests.chaos --trials 200 --seed 0      by hand; prints every trial's plan and outcome

A plan is drawn from its seed: kill -9 or SIGSTOP of a random worker, kill -9 of the coordinator (then the run
is resumed, sometimes with another number of workers), Ctrl-C, each after a random while, also while processes
start. One seed replays one plan; when exactly a fault hits depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.commands import DEADLINE, Command, fedsim, start

EXPERIMENT = (
    *("--algo", "fedlap_cov", "--clients", "6", "--rounds", "10", "--model", "logistic"),
    *("--participation", "0.7+lost:0.2", "--set", "local.epochs=20"),
)
ROUNDS = 10
FAULTS = ("kill worker", "kill worker", "stop worker", "kill coordinator", "kill coordinator", "interrupt")
GONE_WITHIN = 5.0
"""Seconds in which no process of a killed coordinator may be left."""


@dataclass(frozen=True)
class Fault:
    """round: hits so many seconds after this round was reported; None: after the last fault, or the start."""

    what: str
    round: int | None
    seconds: float


def plan(seed: int) -> tuple[list[Fault], list[int]]:
    """Faults in order, and how many workers each start has."""
    rng = random.Random(seed)
    rounds = sorted(rng.randrange(ROUNDS) for _ in range(rng.randint(2, 4)))
    faults = [
        Fault(rng.choice(FAULTS), None, rng.uniform(0.0, 3.0))
        if rng.random() < 0.25
        else Fault(rng.choice(FAULTS), r, rng.uniform(0.0, 0.3))
        for r in rounds
    ]
    return faults, [rng.choice((1, 2, 2, 3)) for _ in range(len(faults) + 1)]


@dataclass
class Trial:
    seed: int
    faults: list[Fault]
    hit: list[str] = field(default_factory=list)
    """What happened really: a plan may outlast its run."""
    identical: bool = False
    left: list[int] = field(default_factory=list)
    """Processes that outlived their coordinator."""

    @property
    def good(self) -> bool:
        return self.identical and not self.left

    def __str__(self) -> str:
        end = "identical" if self.identical else "DIFFERENT"
        return f"seed {self.seed}: {', '.join(self.hit) or 'nothing hit'}; {end}; left over: {self.left or 0}"


def facts(folder: Path) -> dict[str, Any]:
    """All that must be the same: digests, who took part, metrics."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    keys = (
        "status",
        "rounds",
        "model_sha256",
        "clients_sha256",
        "took_part",
        "folded",
        "bytes_up",
        "bytes_down",
    )
    return {key: summary[key] for key in keys} | {
        "metrics": [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines]
    }


def undisturbed(folder: Path) -> dict[str, Any]:
    fedsim("launch", "--workers", "0", "--out", str(folder), *EXPERIMENT)
    return facts(folder)


def trial(seed: int, folder: Path, expected: dict[str, Any]) -> Trial:
    """One run from its launch to its end, through the plan of `seed`."""
    faults, sizes = plan(seed)
    made, pending = Trial(seed, faults), list(faults)
    for size in sizes:
        workers = ("--workers", str(size), "--lease", "2")
        known = (folder / "manifest.json").exists()
        options = ("resume", str(folder)) if known else ("launch", "--out", str(folder), *EXPERIMENT)
        running = start(*options, *workers)
        while pending and _reached(running, pending[0]):
            _strike(made, running, folder, pending.pop(0).what)
        if not pending:
            running.wait()
        _note_orphans(made, folder)
        ended = running.process.wait(DEADLINE)
        running.kill()
        if ended == 0:
            break
    made.identical = (folder / "summary.json").exists() and facts(folder) == expected
    return made


def _reached(running: Command, fault: Fault) -> bool:
    """Whether the coordinator still runs when this fault is due; reads on, so that it never waits for us."""
    if fault.round is not None:
        with suppress(AssertionError):  # it has ended before, or a resumed run is past it already
            running.wait_for(f" {fault.round}/{ROUNDS} ")
    running.listen(fault.seconds)
    return running.process.poll() is None


def _strike(made: Trial, running: Command, folder: Path, what: str) -> None:
    made.hit.append(what)
    if what == "kill coordinator":
        running.process.kill()
    elif what == "interrupt":
        running.process.send_signal(signal.SIGINT)
    else:
        victims = [p["pid"] for p in _processes(folder) if p["role"] == "worker" and not p["ended"]]
        if not victims:
            made.hit[-1] += " (none yet)"
            return
        number = signal.SIGKILL if what == "kill worker" else signal.SIGSTOP
        with suppress(ProcessLookupError):
            os.kill(random.Random(made.seed + len(made.hit)).choice(victims), number)


def _note_orphans(made: Trial, folder: Path) -> None:
    until = time.monotonic() + GONE_WITHIN
    pids = [p["pid"] for p in _processes(folder)]
    while (left := [pid for pid in pids if _exists(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    made.left += left


def _processes(folder: Path) -> list[dict[str, Any]]:
    path = folder / "processes.json"
    return list(json.loads(path.read_text())) if path.exists() else []


def _exists(pid: int) -> bool:
    """A zombie is gone: it only waits for its parent to read its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; then one more each")
    chosen = parser.parse_args()
    good = faults = 0
    with tempfile.TemporaryDirectory() as folder:
        expected = undisturbed(Path(folder) / "undisturbed")
        for seed in range(chosen.seed, chosen.seed + chosen.trials):
            made = trial(seed, Path(folder) / str(seed), expected)
            good, faults = good + made.good, faults + len(made.hit)
            print(made, flush=True)
    print(f"{good} of {chosen.trials} identical with nothing left over, {faults} faults")
    raise SystemExit(good < chosen.trials)


if __name__ == "__main__":
    main()
