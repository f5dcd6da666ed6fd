"""Handle workers' responses: uploads, absences, drafts of states, and scores.

A response counts once, if it comes from the worker that holds the task and answers this start of the run.
Correct workers may also send a response twice, or answer a task that was taken back from them or was given in
an earlier start of the run. These responses are dropped and counted. Any other response is a
ProtocolViolation. Tasks are pure, so all uploads of a task must have the same bits; later ones are checked.
"""

from __future__ import annotations

from collections import Counter

from fedsim.errors import TaskError, WireError
from fedsim.learning.gaussian import Point, taken_apart
from fedsim.problem import Problem
from fedsim.round_events import Arrived, ChunkId, Event, Rejected, Scored, TaskId, WorkItem, reaches
from fedsim.round_machine import MAX_EVALUATIONS_BEHIND, RoundMachine
from fedsim.wire.envelope import Envelope
from fedsim.wire.ledger import stream_bytes
from workers.coordinator.aggregation import why_invalid
from workers.coordinator.broadcasts import Dispatch
from workers.coordinator.failures import ProtocolViolation as ProtocolViolation
from workers.coordinator.run_records import RoundLog
from workers.protocol_messages import task_of, unpack_score
from workers.storage.journal import Journal
from workers.storage.upload_spool import Spool

REMEMBERED = MAX_EVALUATIONS_BEHIND + 2
"""The number of rounds, including the current one, whose assignments are remembered."""


def piece_of(envelope: Envelope) -> WorkItem:
    """Return the task or chunk that an envelope answers."""
    h = envelope.header
    return ChunkId(h.round, h.exchange) if h.kind == "score" else task_of(envelope)


class ResponseFilter:
    """A filter for duplicate and stale responses.

    epoch: the number of this start of the run. dropped: the number of dropped envelopes, by kind.
    """

    def __init__(self, epoch: int, machine: RoundMachine) -> None:
        self.epoch, self.machine = epoch, machine
        self.dropped: Counter[str] = Counter()
        self._sent_to: dict[int, set[tuple[int, WorkItem]]] = {}
        """The work sent to each worker in this start, by round."""
        self._answers: dict[int, dict[WorkItem, tuple[int, ...]]] = {}
        """The checksums of accepted uploads, by round."""

    def gave(self, worker: int, piece: WorkItem) -> None:
        """Record that a worker is given a task or a chunk."""
        round = piece.round
        if round not in self._sent_to:
            for old in [r for r in self._sent_to if r <= round - REMEMBERED]:
                del self._sent_to[old], self._answers[old]
            self._sent_to[round], self._answers[round] = set(), {}
        self._sent_to[round].add((worker, piece))

    def accepts(self, worker: int, envelope: Envelope) -> bool:
        """Return whether a response counts. Any other one is a duplicate or stale, and is dropped.

        Raises:
            ProtocolViolation: If the message breaks the protocol.
            TaskError: If two uploads of a task differ; the error names client and round.
        """
        h, piece = envelope.header, piece_of(envelope)
        if h.epoch > self.epoch:
            raise ProtocolViolation(f"answers to start {h.epoch} of this run, which is in start {self.epoch}")
        if h.epoch == self.epoch:
            if self.machine.holds(worker, piece):
                dropout = isinstance(piece, TaskId) and self.machine.is_dropout(piece)
                if (h.kind == "absent") != dropout:
                    raise ProtocolViolation(f"answers {piece} with an envelope of kind {h.kind!r}")
                return True
            if not self._had(worker, piece, h.round):
                raise ProtocolViolation(
                    f"answers {piece}, which it was not given, with an envelope of kind {h.kind!r}"
                )
            if h.kind == "upload":
                self._compare(worker, envelope)
        self.dropped[h.kind] += 1
        return False

    def _had(self, worker: int, piece: WorkItem, round: int) -> bool:
        """Return whether a worker was given this work; True for rounds that are no longer remembered."""
        if round in self._sent_to:
            return (worker, piece) in self._sent_to[round]
        return 0 <= round <= self.machine.round - REMEMBERED

    def answered(self, envelope: Envelope) -> None:
        """Store the checksums of an upload that counts."""
        self._answers[envelope.header.round][piece_of(envelope)] = checksums(envelope)

    def _compare(self, worker: int, envelope: Envelope) -> None:
        task = piece_of(envelope)
        first = self._answers.get(envelope.header.round, {}).get(task)
        if first is not None and first != checksums(envelope):
            raise TaskError(
                f"worker {worker} has computed {task} anew, and its upload is not that which was accepted: "
                "the client's code is not deterministic (fedsim verify finds out where)"
            )


def checksums(envelope: Envelope) -> tuple[int, ...]:
    """Return the checksums of all frames after the header."""
    return tuple(p.digest for f in envelope.header.fields for p in f.parts)


class ResponseHandler:
    """A handler that stores the content of responses and returns events for the round machine."""

    def __init__(
        self,
        problem: Problem,
        machine: RoundMachine,
        dispatch: Dispatch,
        round_log: RoundLog,
        spool: Spool,
        journal: Journal,
    ) -> None:
        self.problem, self.dispatch, self.round_log = problem, dispatch, round_log
        self.spool, self.journal, self.states = spool, journal, dispatch.states
        self.filter = ResponseFilter(dispatch.epoch, machine)
        self.seconds_clients = 0.0
        """The seconds that workers spent on uploads, without duplicate, stale and repeated ones."""
        self._retried: set[TaskId] = set()
        """Tasks that are repeated because their uploads were invalid (bad_uploads = retry)."""

    def take(self, worker: int, envelope: Envelope) -> list[Event] | None:
        """Handle a response.

        Returns:
            The resulting events; None if the response is a duplicate or stale, and was dropped.

        Raises:
            ProtocolViolation: If no correct worker would send this response.
            TaskError: If two uploads of a task differ.
            DiskError: If the disk cannot be read or written.
        """
        try:
            events = self._take(worker, envelope)
        except ProtocolViolation:
            self._does_not_count(worker, envelope)
            raise
        if events is None:
            h = envelope.header
            self.journal.append("echo", kind=h.kind, round=h.round, client=h.client, worker=worker)
            self._does_not_count(worker, envelope)
        return events

    def _does_not_count(self, worker: int, envelope: Envelope) -> None:
        """Move the ledger rows of an upload that does not count from kind algorithm to kind retry."""
        if envelope.header.kind == "upload":
            self.dispatch.endpoint.ledger.book_as_retry(envelope, worker)

    def _take(self, worker: int, envelope: Envelope) -> list[Event] | None:
        h = envelope.header
        if h.run != self.dispatch.run:
            raise ProtocolViolation(f"answers for run {h.run!r}, and this is {self.dispatch.run!r}")
        take = {"upload": self._upload, "absent": self._absent, "draft": self._draft, "score": self._score}
        if h.kind not in take:
            raise ProtocolViolation(f"sent an envelope of kind {h.kind!r}")
        if not self.filter.accepts(worker, envelope):
            return None
        return take[h.kind](worker, envelope)

    def _upload(self, worker: int, envelope: Envelope) -> list[Event]:
        task, h, replicas = task_of(envelope), envelope.header, self.dispatch.replicas
        if replicas is not None and replicas.lacks(worker, task.client, self._makes(task)):
            raise ProtocolViolation(f"uploaded {task} without the state that goes with it")
        self._answered(worker, envelope)
        bad, policy = self._unfit(worker, envelope), self.problem.experiment.bad_uploads
        if bad and policy == "retry" and task not in self._retried:
            return self._once_more(worker, envelope, bad)
        self._retried.discard(task)
        seconds, record = h.micros / 1e6, self.round_log[task.round]
        record.seconds_clients += seconds
        self.seconds_clients += seconds
        self.filter.answered(envelope)
        label = {"round": task.round, "exchange": task.exchange, "client": task.client}
        self.journal.append("upload", **label, worker=worker, xxh3=checksums(envelope))
        self.spool.put(task.client, envelope, worker)
        late = self.dispatch.exchange_clock.late(task, stream_bytes(envelope))
        skipped = bool(bad) and policy == "skip" and not late
        if self.problem.rounds.policy.withheld(h) and not late:
            record.unchanged = tuple(sorted({*record.unchanged, task.client}))
        if late:
            record.late = tuple(sorted({*record.late, task.client}))
        if skipped:
            self.journal.append("refused", **label, why=bad)
            record.refused = tuple(sorted({*record.refused, task.client}))
        return [Arrived(worker, task, late or skipped)]

    def _unfit(self, worker: int, envelope: Envelope) -> str:
        """Return why an upload is invalid, or '' if it is valid.

        With bad_uploads = stop, return '': the fold checks uploads, and an invalid one stops the run.
        """
        if self.problem.experiment.bad_uploads == "stop":
            return ""
        down = self.dispatch.broadcasts.answered(envelope.header.round, envelope.header.client).decoded
        return why_invalid(self.problem, envelope, down, worker)

    def _once_more(self, worker: int, envelope: Envelope, why: str) -> list[Event]:
        """Repeat a task. Tasks are pure, so this helps against faulty memory but not against divergence."""
        task = task_of(envelope)
        self._retried.add(task)
        self._does_not_count(worker, envelope)
        self.journal.append(
            "retried", round=task.round, exchange=task.exchange, client=task.client, worker=worker, why=why
        )
        return [Rejected(worker, task)]

    def _draft(self, worker: int, envelope: Envelope) -> list[Event]:
        """Store the client state that a remote worker sends before its upload."""
        task, replicas = task_of(envelope), self.dispatch.replicas
        if replicas is None or len(envelope.frames) != 1:
            raise ProtocolViolation(f"sent a state of {task}, for which it was not asked")
        try:
            self.states.put(task.client, self._makes(task), bytes(envelope.frames[0]))
        except WireError as e:
            raise ProtocolViolation(f"sent an unreadable state of {task}: {e}") from None
        replicas.has(worker, task.client, task.base, self._makes(task))
        return []

    def _absent(self, worker: int, envelope: Envelope) -> list[Event]:
        """Record that a client, which the schedule drops after the download, sends no upload."""
        task = task_of(envelope)
        self._answered(worker, envelope)
        self.journal.append("gone", round=task.round, client=task.client)
        return [Arrived(worker, task)]

    def _score(self, worker: int, envelope: Envelope) -> list[Event]:
        """Store a chunk's score, and report the rounds that are now complete."""
        h, record = envelope.header, self.round_log[envelope.header.round]
        assert record.model is not None  # the worker has evaluated it
        point = isinstance(taken_apart(record.model)[0], Point)
        record.sampled = bool(self.problem.evaluation.samples) and not point
        width = self.problem.evaluation.measure.width(self.problem.dataset.classes)
        own = 0 if self.problem.evaluation.test_clients is None else len(self.problem.split)
        try:
            record.scores[h.exchange] = unpack_score(envelope, width, record.sampled, own)
        except WireError as e:
            raise ProtocolViolation(f"sent an unreadable score of round {h.round}: {e}") from None
        self._answered(worker, envelope)
        until = self.problem.experiment.until
        reached = bool(until) and reaches(h.round, self.round_log.accuracy(h.round), until)
        self.round_log.flush()
        return [Scored(worker, ChunkId(h.round, h.exchange), reached)]

    def _answered(self, worker: int, envelope: Envelope) -> None:
        h = envelope.header
        self.dispatch.timeline.arrived(worker, h.round, h.exchange, h.client, h.micros)

    def _makes(self, task: TaskId) -> int:
        """Return the version of the client's state that a task creates."""
        return self.problem.messages.version(task.round, task.exchange)
