"""Which answers count.

A task's answer counts once: from the worker that holds the task, and in the start of the run that gave it.
What an honest worker may send besides (an answer twice, one to a task that was taken back from it, one to an
earlier start) is dropped and counted; what no worker sends that keeps to the protocol is ProtocolViolation.
Two answers to one task must be the same bits: tasks are pure, so the second is compared before it is dropped.
"""

from __future__ import annotations

from collections import Counter

from fedsim.errors import TaskError
from fedsim.round_events import ChunkId, TaskId, WorkItem
from fedsim.round_machine import MAX_EVALUATIONS_BEHIND, RoundMachine
from fedsim.wire.envelope import Envelope
from workers.worker.runtime import task_of

REMEMBERED = MAX_EVALUATIONS_BEHIND + 2
"""Rounds of which it is known who was given what, the present one included."""


class ProtocolViolation(Exception):
    """An envelope that no worker sends which keeps to the protocol; its text says what is wrong."""


def piece_of(envelope: Envelope) -> WorkItem:
    """What an envelope answers."""
    h = envelope.header
    return ChunkId(h.round, h.exchange) if h.kind == "score" else task_of(envelope)


class ResponseFilter:
    """epoch: of this start. dropped: envelopes that were dropped, by kind."""

    def __init__(self, epoch: int, machine: RoundMachine) -> None:
        self.epoch, self.machine = epoch, machine
        self.dropped: Counter[str] = Counter()
        self._supplied: dict[int, set[tuple[int, WorkItem]]] = {}
        """Who was given what in this start, by round."""
        self._answers: dict[int, dict[WorkItem, tuple[int, ...]]] = {}
        """The checksums of accepted uploads, by round."""

    def gave(self, worker: int, piece: WorkItem) -> None:
        round = piece.round
        if round not in self._supplied:
            for old in [r for r in self._supplied if r <= round - REMEMBERED]:
                del self._supplied[old], self._answers[old]
            self._supplied[round], self._answers[round] = set(), {}
        self._supplied[round].add((worker, piece))

    def accepts(self, worker: int, envelope: Envelope) -> bool:
        """Whether an answer counts; else it is a duplicate, and dropped.

        Raises:
            ProtocolViolation: if the message breaks the protocol.
            TaskError: naming client and round if two answers to a task are not the same.
        """
        h, piece = envelope.header, piece_of(envelope)
        if h.epoch > self.epoch:
            raise ProtocolViolation(f"answers to start {h.epoch} of this run, which is in start {self.epoch}")
        if h.epoch == self.epoch:
            if self.machine.holds(worker, piece):
                gone = isinstance(piece, TaskId) and self.machine.is_dropout(piece)
                if (h.kind == "absent") != gone:
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
        """Of rounds long ago it is not known any more, and anybody may have."""
        if round in self._supplied:
            return (worker, piece) in self._supplied[round]
        return 0 <= round <= self.machine.round - REMEMBERED

    def answered(self, envelope: Envelope) -> None:
        """Remember an upload that counts."""
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
    """Of every frame behind the header."""
    return tuple(p.digest for f in envelope.header.fields for p in f.parts)
