"""Find the round after which a run continues.

A commit writes the round's ledger rows, then the journal's record, then the checkpoint, which has digests of
the files at that moment. A run continues after the newest round whose checkpoint can be read and whose files
still match. Everything later is cut off and computed again, with the same bits: tasks are pure functions.
Damaged lines of metrics.jsonl are computed again if the models still exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsim.errors import DataError, DiskError, MismatchError, WireError
from fedsim.learning.gaussian import Model
from fedsim.problem import Problem
from fedsim.round_events import evaluates, reaches
from workers.storage.atomic_files import disk_errors
from workers.storage.checkpoints import Checkpoint, read_checkpoint
from workers.storage.client_states import ClientStates
from workers.storage.growing_file import JOURNAL, LEDGER, METRICS, TIMELINE
from workers.storage.journal import read_journal
from workers.storage.metrics_file import metrics_lines
from workers.storage.round_record import RoundRecord

NOTHING = -1


@dataclass(frozen=True)
class Recovery:
    """The point from which a run resumes.

    Attributes:
        epoch: The number of starts of the run, including this one.
        checkpoint: The checkpoint of the last commit; None if there is none.
        commits: The journal's records of commits up to the checkpoint, by round.
        unscored: The rounds up to the checkpoint without a valid line in metrics.jsonl, with their models.
        kept: The readable checkpoints up to `checkpoint`.
        ends: The lengths to which growing files are cut, by name; other files are kept whole.
        notes: Messages for the user: why newer checkpoints are not used, and which file begins again.
        target_reached: True if a round up to the checkpoint has reached the target accuracy.
    """

    epoch: int
    checkpoint: Checkpoint[Any] | None
    commits: Mapping[int, Mapping[str, Any]]
    unscored: tuple[RoundRecord, ...]
    kept: tuple[Checkpoint[Any], ...] = ()
    ends: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    target_reached: bool = False

    @property
    def round(self) -> int:
        """The last committed round: 0 for the set-up, NOTHING if there is none."""
        return self.checkpoint.round if self.checkpoint else NOTHING


def recover(folder: Path, problem: Problem, experiment: str = "", run: str = "") -> Recovery:
    """Find the newest round after which a run can continue.

    experiment: the digest of the manifest's experiment. run: the run's name. An empty text is not compared.

    Raises:
        MismatchError: if a checkpoint is of another experiment, or all checkpoints are of another run.
        DataError: if no checkpoint can be used, and more rounds would be lost than in a power cut.
        DiskError: if a file cannot be read.
    """
    records = read_journal(folder / JOURNAL) if (folder / JOURNAL).exists() else []
    epoch = 1 + sum(r["what"] == "start" for r in records)
    kept, skipped = _readable(folder, problem)
    _check_experiment(folder, kept.values(), experiment)
    skipped += _drop_foreign(folder, kept, run)
    states = ClientStates(folder / "state", problem.algorithm.client_type, run)
    lines = _sound_lines(folder, kept.values())
    for last in sorted(kept, reverse=True):
        checkpoint = kept[last]
        try:
            commits = _commits(folder, checkpoint, problem)
            _check_states(checkpoint, states)
            _check_origins(last, kept, problem)
            metrics = {number: line for number, line in lines.items() if number <= last}
            unscored = tuple(_unscored(problem, last, set(metrics), kept, commits))
        except (WireError, DiskError) as e:
            skipped.append(str(e))
            continue
        usable = tuple(kept[r] for r in sorted(kept) if r <= last)
        ends = {METRICS: max((end for end, _ in metrics.values()), default=0)}
        ends |= {name: end for name, end in checkpoint.ends().items() if name in (LEDGER, TIMELINE)}
        notes = [f"not used: {why}" for why in skipped]
        if _is_empty(folder / TIMELINE):
            ends[TIMELINE] = 0
            notes.append(f"{folder / TIMELINE} was not there: it begins again with round {last + 1}")
        past = {r: commits[r] for r in sorted(commits) if r <= last}
        until = problem.experiment.until
        reached = any(reaches(number, accuracy, until) for number, (_, accuracy) in metrics.items())
        return Recovery(epoch, checkpoint, past, unscored, usable, ends, tuple(notes), reached)
    if not _from_the_start(folder, problem):
        raise DataError(
            f"{folder} cannot go on after any round that it has a checkpoint of: {skipped[-1]}. "
            "Put the file back as it was, or start a new run"
        )
    start = {LEDGER: 0, METRICS: 0, TIMELINE: 0}
    return Recovery(epoch, None, {}, (), (), start, tuple(f"not used: {why}" for why in skipped))


def _from_the_start(folder: Path, problem: Problem) -> bool:
    """Return whether a run may start again: it has no checkpoint, or none was ever removed.

    A checkpoint is removed only after a later one is durable, so no more is lost than in a power cut.
    """
    first = 0 if problem.algorithm.setup else 1
    rounds = [int(path.stem) for path in _checkpoints(folder)]
    return not rounds or min(rounds) <= first


def _checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("[0-9]*.checkpoint"), reverse=True)


def _readable(folder: Path, problem: Problem) -> tuple[dict[int, Checkpoint[Any]], list[str]]:
    """Return the readable checkpoints by round, and the errors of the others, newest first."""
    kept: dict[int, Checkpoint[Any]] = {}
    skipped = []
    for path in _checkpoints(folder):
        try:
            kind: type[Any] = problem.algorithm.server_type
            read = read_checkpoint(path, kind, problem.messages.broadcast_type)
            if read.round != int(path.stem):  # a power cut may leave old bytes in an overwritten file
                raise WireError(f"checkpoint {path} holds round {read.round}")
            kept[read.round] = read
        except (WireError, DiskError) as e:
            skipped.append(str(e))
    return kept, skipped


def _is_empty(path: Path) -> bool:
    return not path.exists() or not path.stat().st_size


def _check_experiment(folder: Path, kept: Iterable[Checkpoint[Any]], experiment: str) -> None:
    for checkpoint in kept:
        if experiment and checkpoint.experiment not in ("", experiment):
            raise MismatchError(
                f"{folder / 'manifest.json'} describes another experiment than the checkpoint of round "
                f"{checkpoint.round} belongs to: put this run's own manifest back, or start a new run"
            )


def _drop_foreign(folder: Path, kept: dict[int, Checkpoint[Any]], run: str) -> list[str]:
    """Remove the checkpoints of other runs from `kept`; return a message for each."""
    foreign = [r for r, checkpoint in kept.items() if run and checkpoint.run not in ("", run)]
    if foreign and len(foreign) == len(kept):
        raise MismatchError(
            f"{folder / 'manifest.json'} is of run {run}, the checkpoints are of run {kept[foreign[0]].run}: "
            "put this run's own manifest back, or start a new run"
        )
    return [f"{checkpoint_path(folder, r)} is of run {kept.pop(r).run}, not {run}" for r in foreign]


def _check_origins(last: int, kept: Mapping[int, Checkpoint[Any]], problem: Problem) -> None:
    """Check that the broadcasts that an asynchronous run still uses can be encoded again."""
    first = 0 if problem.algorithm.setup else 1
    for origin in problem.rounds.policy.origins(last + 1) if last else ():
        if origin >= first and origin not in kept:
            raise WireError(
                f"after round {last} clients compute from the broadcast behind round {origin}, whose "
                "checkpoint cannot be read"
            )


def _commits(folder: Path, checkpoint: Checkpoint[Any], problem: Problem) -> Mapping[int, Mapping[str, Any]]:
    """Check the run's files against a checkpoint; return the journal's records of commits, by round."""
    r, supplied, due = checkpoint.round, len(checkpoint.versions), len(problem.clients)
    if supplied != due:
        raise WireError(f"the checkpoint of round {r} is of {supplied} clients; this run has {due}")
    journal = checkpoint.ends().get(JOURNAL)
    for file in checkpoint.files:
        path = folder / file.name
        if file.name == METRICS or (file.name == TIMELINE and _is_empty(path)):
            continue  # lines can be computed again; nothing depends on the timeline
        if not file.matches(path):
            cure = " (if this file is removed, the run goes on)" if file.name == TIMELINE else ""
            raise WireError(f"{path} is not what it was when round {r} was committed{cure}")
    records = read_journal(folder / JOURNAL, journal) if (folder / JOURNAL).exists() else []
    commits = {record["round"]: record for record in records if record["what"] == "commit"}
    if r not in commits:
        raise WireError(f"the checkpoint of round {r}: the journal does not reach so far")
    return commits


def _check_states(checkpoint: Checkpoint[Any], states: ClientStates) -> None:
    """Check the states that a checkpoint names, because they may be missing after a power cut."""
    for k, version in enumerate(checkpoint.versions.tolist()):
        if version:
            checkpoint.load_state(states, k)


def _sound_lines(folder: Path, kept: Iterable[Checkpoint[Any]]) -> dict[int, tuple[int, float | None]]:
    """Return the end and the test accuracy of each sound line of metrics.jsonl, by round: of each line that a
    matching digest covers."""
    path = folder / METRICS
    files = [file for c in kept for file in c.files if file.name == METRICS]
    newest_first = sorted(files, key=lambda file: file.bytes, reverse=True)
    size = next((file.bytes for file in newest_first if file.matches(path)), 0)
    with disk_errors(path):
        return {
            line["round"]: (end, line.get("test_accuracy"))
            for line, end in metrics_lines(path)
            if end <= size
        }


def _unscored(
    problem: Problem,
    last: int,
    scored: set[int],
    kept: Mapping[int, Checkpoint[Any]],
    commits: Mapping[int, Any],
) -> Iterator[RoundRecord]:
    algorithm, e, ctx = problem.algorithm, problem.experiment, problem.context(0, 0)
    for r in range(last + 1):
        if r in scored or not evaluates(r, e.rounds, e.eval_every, problem.evaluation.chunks):
            continue
        if r and (r not in kept or r not in commits):
            raise WireError(
                f"{METRICS} has no sound line of round {r}, and the model to evaluate it again is not kept: "
                f"the checkpoint of round {last} is of no use"
            )
        server = kept[r].server if r else algorithm.server_init(ctx)
        model: Model = algorithm.model(server, ctx)
        yield RoundRecord.restored(commits[r]["about"] if r in commits else {"number": 0}, model)


def checkpoint_path(folder: Path, round: int) -> Path:
    return folder / "checkpoints" / f"{round:06d}.checkpoint"
