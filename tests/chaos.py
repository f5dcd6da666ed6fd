"""Chaos: real processes under seeded faults, against the bits of an undisturbed run.

    python -m tests.chaos --trials 200 --seed 0      by hand; prints every trial's plan and outcome

Trials of odd seeds are of remote workers (tests.chaos_remote), the others of workers of this machine;
--local and --remote ask for one kind only, --edges for runs with two edge servers as processes.

A plan is drawn from its seed. Here: kill -9 or SIGSTOP of a random worker or edge server, kill -9 of the
coordinator (then the run is resumed, sometimes with another number of workers), Ctrl-C, each after a
random while, also while processes start. One seed replays one plan; when exactly a fault hits depends on
the machine.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import chaos_remote
from tests.support.commands import DEADLINE, Command, fedsim, start
from tests.support.trials import EXPERIMENT, ROUNDS, Fault, Trial, facts, same

FAULTS = ("kill worker", "kill worker", "stop worker", "kill coordinator", "kill coordinator", "interrupt")


@dataclass(frozen=True)
class Kind:
    """What is disturbed: options of the experiment, options of its launch, faults, and numbers of workers."""

    experiment: tuple[str, ...] = ()
    launch: tuple[str, ...] = ()
    faults: tuple[str, ...] = FAULTS
    sizes: tuple[int, ...] = (1, 2, 2, 3)


LOCAL = Kind()
EDGES = Kind(
    ("--tree", "2x3"),
    ("--edge-processes",),
    (*FAULTS, "kill edge server", "kill edge server", "stop edge server"),
    (2, 2, 3),
)
GONE_WITHIN = 60.0
"""Seconds in which no process of a killed coordinator may be left."""


def plan(seed: int, kind: Kind = LOCAL) -> tuple[list[Fault], list[int]]:
    """Faults in order, and how many workers each start has."""
    rng = random.Random(seed)
    rounds = sorted(rng.randrange(ROUNDS) for _ in range(rng.randint(2, 4)))
    faults = [
        Fault(rng.choice(kind.faults), None, rng.uniform(0.0, 3.0))
        if rng.random() < 0.25
        else Fault(rng.choice(kind.faults), r, rng.uniform(0.0, 0.3))
        for r in rounds
    ]
    return faults, [rng.choice(kind.sizes) for _ in range(len(faults) + 1)]


def undisturbed(folder: Path, kind: Kind = LOCAL) -> dict[str, Any]:
    fedsim("launch", "--workers", "0", "--out", str(folder), *EXPERIMENT, *kind.experiment)
    return facts(folder)


def trial(seed: int, folder: Path, expected: dict[str, Any], kind: Kind = LOCAL) -> Trial:
    """One run from its launch to its end, through the plan of `seed`."""
    faults, sizes = plan(seed, kind)
    first = ("launch", "--out", str(folder), *EXPERIMENT, *kind.experiment, *kind.launch)
    created, pending = Trial(seed, faults), list(faults)
    for size in sizes:
        workers = ("--workers", str(size), "--lease", "2")
        known = (folder / "manifest.json").exists()
        running = start(*(("resume", str(folder)) if known else first), *workers)
        while pending and _reached(running, pending[0]):
            _inject(created, running, folder, pending.pop(0).what)
        if not pending:
            running.wait()
        _note_orphans(created, folder)
        ended = running.process.wait(DEADLINE)
        running.kill()
        if ended == 0:
            break
    created.identical = same(folder, expected)
    return created


def _reached(running: Command, fault: Fault) -> bool:
    """Whether the coordinator still runs when this fault is due; reads on, so that it never waits for us."""
    if fault.round is not None:
        with suppress(AssertionError):  # it has ended before, or a resumed run is past it already
            running.wait_for(f" {fault.round}/{ROUNDS} ")
    running.listen(fault.seconds)
    return running.process.poll() is None


def _inject(created: Trial, running: Command, folder: Path, what: str) -> None:
    created.hit.append(what)
    if what == "kill coordinator":
        running.process.kill()
    elif what == "interrupt":
        running.process.send_signal(signal.SIGINT)
    else:
        verb, role = what.split(" ", 1)
        victims = [p["pid"] for p in _processes(folder) if p["role"] == role and not p["ended"]]
        if not victims:
            created.hit[-1] += " (none yet)"
            return
        number = signal.SIGKILL if verb == "kill" else signal.SIGSTOP
        with suppress(ProcessLookupError):
            os.kill(random.Random(created.seed + len(created.hit)).choice(victims), number)


def _note_orphans(created: Trial, folder: Path) -> None:
    until = time.monotonic() + GONE_WITHIN
    pids = [p["pid"] for p in _processes(folder)]
    while (left := [pid for pid in pids if _exists(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    created.left += left


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
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--local", action="store_true", help="all with workers of this machine")
    one.add_argument("--remote", action="store_true", help="all with remote workers")
    one.add_argument("--edges", action="store_true", help="all with edge servers as processes")
    selected = parser.parse_args()
    good = faults = 0
    with tempfile.TemporaryDirectory() as folder:
        expected: dict[Kind | None, dict[str, Any]] = {}
        for seed in range(selected.seed, selected.seed + selected.trials):
            home, here = Path(folder), selected.local or selected.edges
            kind: Kind | None = EDGES if selected.edges else LOCAL
            if selected.remote or (seed % 2 == 1 and not here):
                kind = None
            if kind not in expected:
                whole = home / f"undisturbed-{seed}"
                expected[kind] = chaos_remote.undisturbed(whole) if kind is None else undisturbed(whole, kind)
            if kind is None:
                created = chaos_remote.trial(seed, home / str(seed), expected[kind])
            else:
                created = trial(seed, home / str(seed), expected[kind], kind)
            good, faults = good + created.good, faults + len(created.hit)
            print(created, flush=True)
    print(f"{good} of {selected.trials} identical with nothing left over, {faults} faults")
    raise SystemExit(good < selected.trials)


if __name__ == "__main__":
    main()
