"""The coordinator's records: the journal, ledger rows, checkpoints, and a metrics line per round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedsim.learning.client_scores import LabelShares, OwnTestRows
from fedsim.learning.gaussian import Model, Normalised, Point, taken_apart
from fedsim.learning.likelihoods import Likelihood
from fedsim.problem import Problem
from fedsim.round_events import Commit, Open, evaluates
from fedsim.virtual_clock import ExchangeCost
from fedsim.wire.ledger_rows import Entry
from workers.coordinator.aggregation import Fold
from workers.coordinator.broadcasts import Dispatch
from workers.coordinator.commands import RoundRecords
from workers.coordinator.task_timeline import Span
from workers.storage.checkpoints import Checkpoints
from workers.storage.growing_file import FileDigest
from workers.storage.journal import Journal
from workers.storage.recovery import Recovery
from workers.storage.round_record import RoundRecord


class RecordCallbacks(Protocol):
    """Callbacks that record and display the events of a run."""

    def committed(self, commit: Commit, entries: list[Entry]) -> tuple[FileDigest, ...]:
        """Append a round's ledger rows; return the new digests of the growing files."""

    def evaluated(self, metrics: Mapping[str, Any]) -> None: ...

    def spans(self, spans: list[Span]) -> None: ...


@dataclass(frozen=True)
class Storage:
    """The files of a run.

    recovery: the state of an earlier start of the run. experiment: the digest of the manifest's experiment.
    """

    checkpoints: Checkpoints
    journal: Journal
    recovery: Recovery | None = None
    experiment: str = ""

    @property
    def folder(self) -> Path:
        return self.checkpoints.folder.parent


@dataclass(frozen=True)
class RunIdentity:
    """The run's name, and the value of time.time() at the start of this process."""

    name: str
    started: float


class RoundLog:
    """The records of rounds. Each exists from the first broadcast until its metrics line is reported."""

    def __init__(
        self,
        chunks: int,
        report: Callable[[Mapping[str, Any]], None],
        measure: Likelihood,
        scoring: LabelShares | OwnTestRows | None = None,
    ) -> None:
        self.chunks, self._report, self._measure, self._scoring = chunks, report, measure, scoring
        self._records: dict[int, RoundRecord] = {}

    def open(self, round: int, participants: tuple[int, ...]) -> RoundRecord:
        """Return the record of a round, or a new one if there is none."""
        return self._records.setdefault(round, RoundRecord(round, participants))

    def restore(self, record: RoundRecord) -> None:
        """Add the record of a round that an earlier start has committed."""
        self._records[record.number] = record

    @property
    def oldest(self) -> int | None:
        """The first round whose line is not reported yet."""
        return min(self._records, default=None)

    def __getitem__(self, round: int) -> RoundRecord:
        return self._records[round]

    def drop(self, round: int) -> None:
        """Forget a round that is not evaluated."""
        del self._records[round]

    def accuracy(self, round: int) -> float | None:
        """Return a round's test accuracy; None while a chunk is not evaluated, or if the measure has none."""
        return self._records[round].accuracy(self.chunks, self._measure)

    def flush(self) -> None:
        """Report complete rounds in ascending order, up to the first incomplete round."""
        while self._records:
            first = self._records[min(self._records)]
            if not first.committed or len(first.scores) < self.chunks:
                return
            self._report(first.line(self.chunks, self._measure, self._scoring))
            del self._records[first.number]


class RunRecords(RoundRecords):
    """The records of rounds that are opened, folded, committed and evaluated.

    clock: returns seconds, for the durations of rounds.
    """

    def __init__(
        self,
        problem: Problem,
        identity: RunIdentity,
        storage: Storage,
        callbacks: RecordCallbacks,
        dispatch: Dispatch,
        clock: Callable[[], float],
    ) -> None:
        self.problem, self.storage, self.callbacks = problem, storage, callbacks
        self.ledger, self.timeline = dispatch.endpoint.ledger, dispatch.timeline
        self.round_log = RoundLog(
            problem.evaluation.chunks,
            callbacks.evaluated,
            problem.evaluation.measure,
            problem.evaluation.client_scoring,
        )
        self.seconds_rounds: list[float] = []
        self.seconds_to_first_round = 0.0
        self._started, self._clock = identity.started, clock
        self._round_began = clock()

    def restore(self, server: Any) -> None:
        """Restore the rounds that are not evaluated yet. A new run begins with the start model."""
        recovery, setup = self.storage.recovery, self.problem.algorithm.setup
        for record in recovery.unscored if recovery else ():
            self.round_log.restore(record)
        if recovery is None or recovery.checkpoint is None:
            start = self.round_log.open(0, tuple(range(len(self.problem.clients))) if setup else ())
            start.model, start.committed = self._model(server), not setup

    def begin(self, epoch: int) -> None:
        """Start counting seconds, when all workers have joined."""
        self._round_began = self._clock()
        self.timeline.start()
        self.storage.journal.append("start", epoch=epoch)

    def opened(self, command: Open, spent: ExchangeCost | None) -> None:
        """Record that an exchange is opened. spent: the virtual clock's cost of the previous exchange."""
        if command.exchange == 1:
            record = self.round_log.open(command.round, command.participants)
            record.staleness = self.problem.rounds.policy.staleness(command.round)
        else:
            self._add_simulated(command.round, spent)
        label = {"round": command.round, "exchange": command.exchange}
        self.storage.journal.append("open", **label, participants=list(command.participants))

    def dropped(self, round: int, client: int) -> None:
        self.storage.journal.append("lost", round=round, client=client)

    def folded(self, round: int, fold: Fold) -> None:
        """Record the aggregated scalars of an exchange's uploads, and the limits of its messages."""
        self.round_log[round].report(fold.scalars)
        self.round_log[round].limits = fold.limits

    def committed(self, command: Commit, server: Any, spent: ExchangeCost | None) -> None:
        """Record a round's numbers. spent: the virtual clock's cost of the round's last exchange."""
        r, now = command.round, self._clock()
        record = self.round_log.open(r, command.participants)
        record.folded = command.folded
        self._add_simulated(r, spent)
        record.seconds, self._round_began = now - self._round_began, now
        if r:
            self.seconds_rounds.append(record.seconds)
        if r and not self.seconds_to_first_round:
            self.seconds_to_first_round = time.time() - self._started
        ctx = self.problem.context(r, 0, asked=len(command.participants))
        record.report(self.problem.algorithm.report(server, ctx))
        if r:  # round 0 (set-up) keeps the start model, which is being evaluated
            record.model = self._model(server)

    def written(self, commit: Commit, server: Any, broadcast: tuple[Any, int]) -> None:
        """Write a round's files in the order that workers.storage.recovery relies on.

        The order is: spans, ledger rows, the journal's record, and the checkpoint with the files' digests.
        """
        r, log, ledger, storage = commit.round, self.round_log, self.ledger, self.storage
        record = log[r]
        record.bytes_down, record.bytes_up = ledger.rounds[r, "down"], ledger.rounds[r, "up"]
        if self.problem.rounds.tree is not None:
            record.edge_bytes = ledger.edge_rounds[r, "down"], ledger.edge_rounds[r, "up"]
        self.callbacks.spans(self.timeline.take())
        files = self.callbacks.committed(commit, ledger.close(r))
        storage.journal.append("commit", round=r, about=record.known())
        origins = self.problem.rounds.policy.origins(r + 1) if r else ()
        needed = [first for first in (log.oldest, *origins) if first is not None]
        storage.checkpoints.commit(
            r,
            server,
            commit.versions,
            commit.folded,
            min(needed, default=None),
            commit.folded_rounds,
            (*files, storage.journal.digest),
            storage.experiment,
            broadcast,
        )
        record.committed = True
        experiment = self.problem.experiment
        if not evaluates(r, experiment.rounds, experiment.eval_every, self.problem.evaluation.chunks):
            log.drop(r)
        log.flush()

    def model(self, round: int) -> Model | None:
        return self.round_log[round].model

    def _add_simulated(self, round: int, spent: ExchangeCost | None) -> None:
        record = self.round_log[round]
        if spent is None:
            return
        record.simulated = (record.simulated or 0.0) + spent.seconds
        if spent.joules is not None:
            record.joules = (record.joules or 0.0) + spent.joules

    def _model(self, server: Any) -> Model:
        """Return the model to evaluate, in float32, with a precision only if it is sampled."""
        model = self.problem.algorithm.model(server, self.problem.context(0, 0))
        if self.problem.evaluation.samples:
            return model
        mean, (_, statistics) = Point(model.mean.float()), taken_apart(model)
        return mean if statistics is None else Normalised(mean, statistics)
