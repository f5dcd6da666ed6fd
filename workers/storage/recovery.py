"""Where a run goes on after it was ended, however it was ended.

The journal's record of a commit is written when the round's ledger rows are in the file, and the checkpoint
after that record. So a checkpoint that can be read has its rows, and says where they end. What comes after
the newest such commit is cut off and computed again, with the same bits: tasks are pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.errors import DiskError, WireError
from fedsim.learning.gaussian import Gaussian, Point
from fedsim.problem import Problem
from fedsim.round_events import evaluates, reaches
from workers.storage.atomic_files import disk_errors
from workers.storage.checkpoints import Checkpoint, read_checkpoint
from workers.storage.client_states import ClientStates
from workers.storage.journal import read_journal
from workers.storage.metrics_file import metrics_lines
from workers.storage.round_record import RoundRecord

NOTHING = -1


@dataclass(frozen=True)
class Recovery:
    """epoch: how often the run has been started, this time included. checkpoint: of the last commit, None
    if there is none. commits: the journal's records up to it, by round. unscored: rounds up to it that
    metrics.jsonl has no line of, with their models. kept: the readable checkpoints up to it. skipped: why
    newer ones could not be used. target_reached: a round up to it has reached the target accuracy.
    """

    epoch: int
    checkpoint: Checkpoint[Any] | None
    commits: Mapping[int, Mapping[str, Any]]
    unscored: tuple[RoundRecord, ...]
    kept: tuple[Checkpoint[Any], ...] = ()
    skipped: tuple[str, ...] = ()
    target_reached: bool = False

    @property
    def round(self) -> int:
        """The last committed one; 0 of a set-up; NOTHING."""
        return self.checkpoint.round if self.checkpoint else NOTHING

    @property
    def ledger_bytes(self) -> int:
        """Where ledger.csv ends; 0: nothing of it stays."""
        return self.checkpoint.ledger if self.checkpoint else 0


def recover(folder: Path, problem: Problem) -> Recovery:
    """Find the newest round from which a run can go on.

    Raises:
        DiskError: if a file cannot be read at all.
    """
    journal = folder / "journal"
    records = read_journal(journal) if journal.exists() else []
    epoch = 1 + sum(r["what"] == "start" for r in records)
    commits = {r["round"]: r for r in records if r["what"] == "commit"}
    with disk_errors(folder / "ledger.csv"):
        ledger = _sound(folder / "ledger.csv") if (folder / "ledger.csv").exists() else 0
    lines = [line for line, _ in metrics_lines(folder / "metrics.jsonl")]
    scored, until = {line["round"] for line in lines}, problem.experiment.until
    kept, skipped = _readable(folder, problem)
    for last in sorted(kept, reverse=True):
        past = {r: commits[r] for r in sorted(commits) if r <= last}
        try:
            _check(kept[last], problem, commits, ledger)
            _check_states(kept[last], folder, problem)
            unscored = tuple(_unscored(problem, last, scored, kept, past))
        except (WireError, DiskError) as e:
            skipped.append(str(e))
            continue
        usable = tuple(kept[r] for r in sorted(kept) if r <= last)
        reached = any(
            reaches(line["round"], line.get("test_accuracy"), until)
            for line in lines
            if line["round"] <= last
        )
        return Recovery(epoch, kept[last], past, unscored, usable, tuple(skipped), reached)
    return Recovery(epoch, None, {}, (), (), tuple(skipped))


def _readable(folder: Path, problem: Problem) -> tuple[dict[int, Checkpoint[Any]], list[str]]:
    """By round; and why others cannot be read, the newest first."""
    kept: dict[int, Checkpoint[Any]] = {}
    skipped = []
    for path in sorted((folder / "checkpoints").glob("[0-9]*.checkpoint"), reverse=True):
        try:
            kept[int(path.stem)] = read_checkpoint(path, problem.algorithm.server_type)
        except (WireError, DiskError) as e:
            skipped.append(str(e))
    return kept, skipped


def _check(checkpoint: Checkpoint[Any], problem: Problem, commits: Mapping[int, Any], ledger: int) -> None:
    """Check that the other files of the run reach as far as a checkpoint.

    Raises:
        WireError: if it is of another run, or the other files do not reach so far.
    """
    r, supplied = checkpoint.round, len(checkpoint.versions)
    if supplied != len(problem.clients):
        raise WireError(
            f"the checkpoint of round {r} is of {supplied} clients; this run has {len(problem.clients)}"
        )
    if r not in commits or checkpoint.ledger > ledger:
        raise WireError(f"the checkpoint of round {r}: journal and ledger do not reach so far")


def _check_states(checkpoint: Checkpoint[Any], folder: Path, problem: Problem) -> None:
    """After a power cut a checkpoint that was not synced may be there, and a state that it names not.

    Raises:
        WireError: if it is damaged or does not fit.
        DiskError: if the disk cannot be read or written.
    """
    states = ClientStates(folder / "state", problem.algorithm.client_type)
    for k, version in enumerate(checkpoint.versions.tolist()):
        if version:
            states.load(k, version)


def _sound(path: Path) -> int:
    """How far a file of text goes. After a power cut it may have its length, and zeros for what was not
    synced."""
    at = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            if (zero := block.find(b"\0")) >= 0:
                return at + zero
            at += len(block)
    return at


def _unscored(
    problem: Problem,
    last: int,
    scored: set[int],
    kept: Mapping[int, Checkpoint[Any]],
    commits: Mapping[int, Any],
) -> Iterator[RoundRecord]:
    """What is known of committed rounds that were not evaluated, with the models to evaluate.

    Raises:
        WireError: if one is not known any more.
    """
    algorithm, e, ctx = problem.algorithm, problem.experiment, problem.context(0, 0)
    for r in range(last + 1):
        if r in scored or not evaluates(r, e.rounds, e.eval_every, problem.chunks):
            continue
        if r and (r not in kept or r not in commits):
            raise WireError(f"round {r} was not evaluated, and its model or its record is lost")
        server = kept[r].server if r else algorithm.server_init(ctx)
        model: Point | Gaussian = algorithm.model(server, ctx)
        yield RoundRecord.restored(commits[r]["about"] if r in commits else {"number": 0}, model)


def checkpoint_path(folder: Path, round: int) -> Path:
    return folder / "checkpoints" / f"{round:06d}.checkpoint"
