"""What comes in from workers that have joined: uploads, absences, states and scores."""

from __future__ import annotations

from collections.abc import Callable

from fedsim.errors import WireError
from fedsim.learning.gaussian import Gaussian
from fedsim.problem import Problem
from fedsim.round_machine import Arrived, Event, Rejected, Scored, TaskId
from fedsim.wire.envelope import Envelope
from fedsim.wire.ledger import Ledger, stream_bytes
from workers.coordinator.aggregation import read_upload
from workers.coordinator.broadcasts import Dispatch
from workers.coordinator.exchange_clock import ExchangeClock
from workers.coordinator.response_filter import ProtocolViolation, ResponseFilter, checksums
from workers.coordinator.round_log import RoundLog
from workers.storage.client_states import ClientStates
from workers.storage.journal import Journal
from workers.storage.upload_spool import Spool
from workers.worker.runtime import task_of, unpack_score


class UploadHandler:
    """handle: gives the machine an event, and carries out what follows."""

    def __init__(
        self,
        problem: Problem,
        response_filter: ResponseFilter,
        dispatch: Dispatch,
        exchange_clock: ExchangeClock,
        round_log: RoundLog,
        spool: Spool,
        states: ClientStates,
        ledger: Ledger,
        journal: Journal,
        handle: Callable[[Event], None],
    ) -> None:
        self.problem, self.response_filter, self.dispatch, self.exchange_clock = (
            problem,
            response_filter,
            dispatch,
            exchange_clock,
        )
        self.round_log, self.spool, self.states = round_log, spool, states
        self.ledger, self.journal, self._handle = ledger, journal, handle
        self.seconds_clients = 0.0
        self._retried: set[TaskId] = set()
        """Tasks of this exchange that are computed once more (bad_uploads = retry)."""

    def take(self, worker: int, envelope: Envelope) -> bool:
        """False: a duplicate, which was dropped.

        Raises:
            ProtocolViolation: if no worker that keeps to the protocol sends this.
            TaskError: if a task or a worker fails.
            DiskError: if the disk cannot be read or written.
        """
        try:
            counts = self._take(worker, envelope)
        except ProtocolViolation:
            self._does_not_count(worker, envelope)
            raise
        if not counts:
            h = envelope.header
            self.journal.append("echo", kind=h.kind, round=h.round, client=h.client, worker=worker)
            self._does_not_count(worker, envelope)
        return counts

    def _does_not_count(self, worker: int, envelope: Envelope) -> None:
        """An algorithm's rows are of what was folded, or lost by the schedule."""
        if envelope.header.kind == "upload":
            self.ledger.book_as_retry(envelope, worker)

    def _take(self, worker: int, envelope: Envelope) -> bool:
        h = envelope.header
        if h.run != self.dispatch.run:
            raise ProtocolViolation(f"answers for run {h.run!r}, and this is {self.dispatch.run!r}")
        take = {"upload": self._upload, "absent": self._absent, "draft": self._draft, "score": self._score}
        if h.kind not in take:
            raise ProtocolViolation(f"sent an envelope of kind {h.kind!r}")
        if not self.response_filter.accepts(worker, envelope):
            return False
        take[h.kind](worker, envelope)
        return True

    def _upload(self, worker: int, envelope: Envelope) -> None:
        task, h, replicas = task_of(envelope), envelope.header, self.dispatch.replicas
        if replicas is not None and replicas.lacks(worker, task.client, self._makes(task)):
            raise ProtocolViolation(f"uploaded {task} without the state that goes with it")
        self._answered(worker, envelope)
        seconds, record = h.micros / 1e6, self.round_log[task.round]
        record.seconds_clients += seconds
        self.seconds_clients += seconds
        bad, policy = self._unfit(worker, envelope), self.problem.experiment.bad_uploads
        if bad and policy == "retry" and task not in self._retried:
            self._once_more(worker, envelope, bad)
            return
        self._retried.discard(task)
        self.response_filter.answered(envelope)
        self.journal.append(
            "upload",
            round=task.round,
            exchange=task.exchange,
            client=task.client,
            worker=worker,
            xxh3=checksums(envelope),
        )
        self.spool.put(task.client, envelope, worker)
        late = self.exchange_clock.late(task, stream_bytes(envelope))
        skipped = bool(bad) and policy == "skip" and not late
        if late:
            record.late = tuple(sorted({*record.late, task.client}))
        if skipped:
            self.journal.append("refused", round=h.round, exchange=h.exchange, client=h.client, why=bad)
            record.refused = tuple(sorted({*record.refused, h.client}))
        self._handle(Arrived(worker, task, late or skipped))

    def _unfit(self, worker: int, envelope: Envelope) -> str:
        """Why this upload must not be folded, if somebody is to know before the fold; '' otherwise: with
        bad_uploads = stop the fold finds out, and the run stops."""
        if self.problem.experiment.bad_uploads == "stop":
            return ""
        try:
            read_upload(self.problem, envelope, self.dispatch.sent, worker)
        except WireError as e:
            return str(e)
        return ""

    def _once_more(self, worker: int, envelope: Envelope, why: str) -> None:
        """Tasks are pure, so this helps against broken memory and the like, and not against a divergence."""
        task = task_of(envelope)
        self._retried.add(task)
        self._does_not_count(worker, envelope)
        self.journal.append(
            "retried", round=task.round, exchange=task.exchange, client=task.client, worker=worker, why=why
        )
        self._handle(Rejected(worker, task))

    def _draft(self, worker: int, envelope: Envelope) -> None:
        """The state that a remote worker has made, which comes before its upload."""
        task, replicas = task_of(envelope), self.dispatch.replicas
        if replicas is None or len(envelope.frames) != 1:
            raise ProtocolViolation(f"sent a state of {task}, for which nobody asked")
        try:
            self.states.put(task.client, self._makes(task), bytes(envelope.frames[0]))
        except WireError as e:
            raise ProtocolViolation(f"sent an unreadable state of {task}: {e}") from None
        replicas.has(worker, task.client, task.base, self._makes(task))

    def _absent(self, worker: int, envelope: Envelope) -> None:
        """A client that the schedule takes out after the download."""
        task = task_of(envelope)
        self._answered(worker, envelope)
        self.journal.append("gone", round=task.round, client=task.client)
        self._handle(Arrived(worker, task))

    def _score(self, worker: int, envelope: Envelope) -> None:
        h, record = envelope.header, self.round_log[envelope.header.round]
        record.sampled = bool(self.problem.eval_samples) and isinstance(record.model, Gaussian)
        width = self.problem.measure.width(self.problem.dataset.classes)
        try:
            record.scores[h.exchange] = unpack_score(envelope, width, record.sampled)
        except WireError as e:
            raise ProtocolViolation(f"sent an unreadable score of round {h.round}: {e}") from None
        self._answered(worker, envelope)
        self.round_log.flush()
        self._handle(Scored(worker, h.round, h.exchange))

    def _answered(self, worker: int, envelope: Envelope) -> None:
        h = envelope.header
        self.dispatch.timeline.arrived(worker, h.round, h.exchange, h.client, h.micros)

    def _makes(self, task: TaskId) -> int:
        """The version of the client's state that a task makes."""
        return self.problem.version(task.round, task.exchange)
