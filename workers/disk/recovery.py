"""Where a run goes on after it was ended, however it was ended.

The journal's record of a commit is written when the round's ledger rows are in the file, and the checkpoint
after that record. So a checkpoint that can be read has its rows, and the record says where they end. What
comes after the newest such commit is cut off and computed again, with the same bits: tasks are pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.errors import DiskError, WireError
from fedsim.learning.gaussian import Gaussian, Point
from fedsim.problem import Problem
from fedsim.rounds import evaluates
from workers.coordination.scoreboard import RoundRecord
from workers.disk.journal import read_journal
from workers.disk.store import Checkpoint, disk_errors, read_checkpoint

NOTHING = -1


@dataclass(frozen=True)
class Recovery:
    """epoch: how often the run has been started, this time included. checkpoint: of the last commit, None
    if there is none. commits: the journal's records up to it, by round. unscored: rounds up to it that
    metrics.jsonl has no line of, with their models. kept: the readable checkpoints up to it. skipped: why
    newer ones could not be used.
    """

    epoch: int
    checkpoint: Checkpoint[Any] | None
    commits: Mapping[int, Mapping[str, Any]]
    unscored: tuple[RoundRecord, ...]
    kept: tuple[Checkpoint[Any], ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def round(self) -> int:
        """The last committed one; 0 of a set-up; NOTHING."""
        return self.checkpoint.round if self.checkpoint else NOTHING

    @property
    def ledger_bytes(self) -> int:
        """Where ledger.csv ends; 0: nothing of it stays."""
        return int(self.commits[self.round]["ledger"]) if self.checkpoint else 0


def recover(folder: Path, problem: Problem) -> Recovery:
    """Errors: DiskError if a file cannot be read at all."""
    e = problem.experiment
    journal = folder / "journal"
    records = read_journal(journal) if journal.exists() else []
    epoch = 1 + sum(r["what"] == "start" for r in records)
    commits = {r["round"]: r for r in records if r["what"] == "commit" and "ledger" in r}
    with disk_errors(folder / "ledger.csv"):
        ledger = (folder / "ledger.csv").stat().st_size if (folder / "ledger.csv").exists() else 0
    scored = {line["round"] for line, _ in metrics_lines(folder / "metrics.jsonl")}
    skipped: list[str] = []
    for path in sorted((folder / "checkpoints").glob("[0-9]*.checkpoint"), reverse=True):
        try:
            checkpoint = _usable(path, problem, commits, ledger)
            past = {r: commits[r] for r in sorted(commits) if r <= checkpoint.round}
            rounds = set(range(checkpoint.round + 1)) - scored
            due = (r for r in sorted(rounds) if evaluates(r, e.rounds, e.eval_every, problem.chunks))
            unscored = tuple(_unscored(r, folder, problem, past) for r in due)
        except (WireError, DiskError) as e:
            skipped.append(str(e))
            continue
        kept = tuple(_readable(folder, problem, checkpoint.round))
        return Recovery(epoch, checkpoint, past, unscored, kept, tuple(skipped))
    return Recovery(epoch, None, {}, (), (), tuple(skipped))


def _readable(folder: Path, problem: Problem, last: int) -> Iterator[Checkpoint[Any]]:
    """In ascending order."""
    for path in sorted((folder / "checkpoints").glob("[0-9]*.checkpoint")):
        if int(path.stem) <= last:
            with suppress(WireError, DiskError):
                yield read_checkpoint(path, problem.algorithm.server_type)


def _usable(path: Path, problem: Problem, commits: Mapping[int, Any], ledger: int) -> Checkpoint[Any]:
    checkpoint: Checkpoint[Any] = read_checkpoint(path, problem.algorithm.server_type)
    if len(checkpoint.versions) != len(problem.clients):
        given = len(checkpoint.versions)
        raise WireError(f"{path} is of {given} clients; this run has {len(problem.clients)}")
    if checkpoint.round not in commits or commits[checkpoint.round]["ledger"] > ledger:
        raise WireError(f"{path}: journal and ledger do not reach to round {checkpoint.round}")
    return checkpoint


def _unscored(round: int, folder: Path, problem: Problem, commits: Mapping[int, Any]) -> RoundRecord:
    """What is known of a committed round, and the model that is still to be evaluated."""
    algorithm = problem.algorithm
    server, path = algorithm.server_init(problem.context(0, 0)), checkpoint_path(folder, round)
    if round:
        server = read_checkpoint(path, algorithm.server_type).server
    model: Point | Gaussian = algorithm.model(server, problem.context(0, 0))
    return RoundRecord.restored(commits[round]["about"] if round in commits else {"number": 0}, model)


def checkpoint_path(folder: Path, round: int) -> Path:
    return folder / "checkpoints" / f"{round:06d}.checkpoint"


def metrics_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The whole lines of metrics.jsonl and where each ends, until one is damaged."""
    at = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if not line.endswith(b"\n"):
            return
        at += len(line)
        try:
            read = json.loads(line)
        except ValueError:
            return
        if not isinstance(read, dict) or not isinstance(read.get("round"), int):
            return
        yield read, at
