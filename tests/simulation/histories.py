"""Histories: a run in a simulated world, with every start that it takes, against an undisturbed one's bits.

    python -m tests.simulation.histories --histories 2000 --seed 0      by hand

A history begins with what goes wrong (tests.simulation.world.Odds), drawn from its seed. When the
coordinator is killed, what was written last is torn; then, and after an error, the run is started again from
its folder. After a few starts nothing goes wrong any more, so that every history ends.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedsim.errors import DataError, FedsimError
from fedsim.participation import schedule
from fedsim.problem import Problem
from fedsim.round_events import Commit
from fedsim.wire.ledger import Ledger
from fedsim.wire.ledger_rows import Entry
from launch.runs.writer import RunDir
from protocols import find
from tests.simulation.answers import Answers
from tests.simulation.workers import Person
from tests.simulation.world import Killed, Odds, World
from tests.support.harness import Recorder, bits_of, play, problem_of
from workers.coordinator.loop import Coordinator, Outcome
from workers.coordinator.membership import Registration, Timeouts, Workers
from workers.coordinator.run_records import RunIdentity, Storage
from workers.protocol_messages import WorkerConfig, WorkerManifest
from workers.storage.checkpoints import Checkpoints
from workers.storage.client_states import ClientStates
from workers.storage.growing_file import LEDGER, FileDigest
from workers.storage.journal import Journal, read_journal
from workers.storage.metrics_file import metrics_lines
from workers.storage.recovery import recover

BITS = ("model", "client states", "server", "versions", "ledger rows", "metrics")
DISTURBED_STARTS = 4
TERMS = {"join_within": 60.0, "lease": 10.0, "patience": 300.0}
EXPERIMENTS: tuple[dict[str, Any], ...] = (
    {
        "algo": "fedlap_cov",
        "participation": "0.7+lost:0.2+gone:0.1+event:norm:150%+quiet:0.3",
        "clients": 4,
        "rounds": 5,
    },
    {"algo": "mime", "clients": 3, "rounds": 3},
    {"algo": "precond_admm", "clients": 3, "rounds": 2, "participation": "2"},
    {"algo": "fedlap_func", "clients": 3, "rounds": 3, "participation": "0.7", "eval_every": 2},
    {
        "algo": "fedavg",
        "clients": 3,
        "rounds": 7,
        "participation": "0.7+lost:0.2",
        "eval_every": 2,
        "until": 0.57,
    },
    {
        "algo": "fedlap_cov",
        "participation": "0.7+lost:0.2+gone:0.1",
        "clients": 4,
        "rounds": 4,
        "tree": "2x2",
    },
)


@dataclass
class Ground:
    """An experiment, its undisturbed bits, and the answers that were computed."""

    problem: Problem
    expected: tuple[Any, ...]
    answers: Answers

    @staticmethod
    def of(described: Mapping[str, Any], folder: Path) -> Ground:
        selected = dict(described)
        problem = problem_of(find(selected.pop("algo")), **selected)
        bits = play(problem, folder / "undisturbed").bits
        return Ground(problem, bits, Answers(problem, folder / "answers"))


@dataclass
class History:
    """What happened, start by start, and how it ended."""

    seed: int
    odds: Odds
    happened: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    starts: int = 0
    refused: int = 0
    """How often the files could not be gone on with, and the run began anew."""
    seconds: float = 0.0
    """Virtual ones."""
    duplicates: int = 0
    dismissed: list[str] = field(default_factory=list)
    """What the coordinator said of workers that left."""
    differs: list[str] = field(default_factory=list)
    """In what, from the undisturbed run."""

    @property
    def identical(self) -> bool:
        return not self.differs

    def __str__(self) -> str:
        end = f"DIFFERENT in {', '.join(self.differs)}" if self.differs else "identical"
        output = "".join(f"\n    {e}" for e in self.errors)
        starts = f"{self.starts} starts, {self.refused} anew"
        return f"seed {self.seed}, {self.odds}: {Counter(self.happened)}, {starts}; {end}{output}"


class Refused(DataError):
    """No checkpoint can be used: _tear has taken what a checkpoint made durable. The run begins anew."""


class Files(Recorder):
    """Writes the files that a later start recovers from."""

    def __init__(self, rundir: RunDir) -> None:
        super().__init__()
        self.rundir = rundir

    def committed(self, commit: Commit, entries: list[Entry]) -> tuple[FileDigest, ...]:
        self.rundir.append_ledger(entries)
        return self.rundir.digests

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        self.rundir.append_metrics(metrics)


def history(ground: Ground, seed: int, folder: Path, odds: Odds | None = None) -> History:
    """Errors: AssertionError, or whatever the coordinator must not raise."""
    rng = random.Random(seed)
    created = History(seed, odds or Odds.drawn(rng))
    outcome: Outcome | None = None
    while outcome is None:
        calm = created.starts >= DISTURBED_STARTS
        try:
            outcome = _start(ground, created, rng, folder, created.odds.calm() if calm else created.odds)
        except Killed:
            _tear(folder, rng)
        except Refused:
            created.refused += 1
            shutil.rmtree(folder)
        except FedsimError as e:
            if calm:
                raise
            created.errors.append(str(e))
    created.duplicates = sum(r["what"] == "echo" for r in read_journal(folder / "journal"))
    bits = _bits(ground.problem, folder, outcome)
    created.differs = [name for name, a, b in zip(BITS, bits, ground.expected, strict=True) if a != b]
    return created


def _start(ground: Ground, created: History, rng: random.Random, folder: Path, odds: Odds) -> Outcome:
    problem, experiment = ground.problem, ground.problem.experiment
    created.starts += 1
    resumed = (folder / LEDGER).exists()
    with ExitStack() as closing:
        rundir = RunDir(folder, resumed=resumed, hops=problem.rounds.tree is not None)
        closing.callback(rundir.close)
        try:
            recovery = recover(folder, problem) if resumed else None
        except DataError as e:
            raise Refused(str(e)) from None
        ledger = Ledger()
        states = ClientStates(folder / "state", problem.algorithm.client_type)
        checkpoints = Checkpoints(folder / "checkpoints", states)
        closing.callback(checkpoints.close)
        if recovery is not None:
            rundir.cut(recovery)
            ledger.restore(rundir.ledger_rows())
            checkpoints.adopt(recovery.kept)
        journal = Journal(folder / "journal")
        closing.callback(journal.close)
        files = Files(rundir)
        world = World(ledger, odds, rng, ground.answers, states, Person)
        coordinator = Coordinator(
            problem,
            schedule(
                experiment.participation,
                clients=experiment.clients,
                seed=experiment.seed,
                sizes=problem.sizes,
            ),
            RunIdentity("run", 0.0),
            Workers(
                world,
                world,
                Registration(WorkerConfig(asdict(experiment)), WorkerManifest("", {}), odds.workers),
                Timeouts(**TERMS, remote=odds.remote),
            ),
            Storage(checkpoints, journal, recovery),
            files,
            world.clock,
        )
        world.watch(coordinator)
        closing.callback(lambda: created.dismissed.extend(n for n in files.news if " left: " in n))
        try:
            return coordinator.run()
        finally:
            created.happened += world.happened
            created.seconds += world.now
            with suppress(FedsimError):
                rundir.append_ledger(ledger.close(experiment.rounds))


def _tear(folder: Path, rng: random.Random) -> None:
    """What may be lost of the last writes: the newest checkpoint, the ends of files that are appended to."""
    newest = max((folder / "checkpoints").glob("[0-9]*.checkpoint"), default=None)
    if newest is not None and rng.random() < 0.5:
        data = newest.read_bytes()
        newest.unlink()
        if rng.random() < 0.5:
            newest.write_bytes(data[: rng.randrange(len(data))])
    for name in ("journal", "ledger.csv", "metrics.jsonl"):
        path = folder / name
        if path.exists() and rng.random() < 0.5:
            size = path.stat().st_size
            with path.open("r+b") as file:
                file.truncate(max(0, size - rng.choice((1, 10, 100, 1000))))


def _bits(problem: Problem, folder: Path, outcome: Outcome) -> tuple[Any, ...]:
    """As tests.support.harness.Run.bits, from the files."""
    rundir = RunDir(folder, resumed=True, hops=problem.rounds.tree is not None)
    rows = list(rundir.ledger_rows())
    rundir.close()
    return bits_of(
        problem, folder, outcome, rows, [line for line, _ in metrics_lines(folder / "metrics.jsonl")]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first; then one more each")
    selected = parser.parse_args()
    bad, faults, errors, virtual, began = 0, Counter[str](), Counter[str](), 0.0, time.monotonic()
    starts = anew = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        grounds = [Ground.of(e, Path(folder) / f"ground-{i}") for i, e in enumerate(EXPERIMENTS)]
        for seed in range(selected.seed, selected.seed + selected.histories):
            at = Path(folder) / str(seed)
            try:
                created = history(grounds[seed % len(grounds)], seed, at)
            except BaseException:
                print(f"seed {seed}:", flush=True)
                raise
            shutil.rmtree(at)
            faults.update(created.happened)
            errors.update(re.sub(r"\d+", "N", e.splitlines()[0]) for e in created.errors)
            virtual += created.seconds
            starts, anew = starts + created.starts, anew + created.refused
            if not created.identical:
                bad += 1
                print(created, flush=True)
    print(f"{selected.histories - bad} of {selected.histories} identical, {sum(faults.values()):,} faults:")
    print(", ".join(f"{n:,} {what}" for what, n in sorted(faults.items())))
    print(f"{anew:,} of {starts:,} starts found files that no checkpoint vouches for, and began anew")
    print(f"{sum(errors.values()):,} starts ended with an error:")
    print("\n".join(f"{n:6,} {what}" for what, n in errors.most_common()))
    print(f"{virtual / 3600:,.0f} virtual hours in {time.monotonic() - began:.0f} s")
    raise SystemExit(bad > 0)


if __name__ == "__main__":
    main()
