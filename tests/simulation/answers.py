"""What workers answer in simulated histories: computed once by a real worker, and remembered.

A task is pure: the same envelope gives the same answer, in whatever history. So thousands of histories cost a
few dozen tasks; and a broadcast that was not the same bits as in an undisturbed run would be computed, and
found out by the end.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from fedsim.problem import Problem
from fedsim.wire.envelope import Envelope, pack
from workers.coordinator.responses import checksums
from workers.worker.runtime import WorkerRuntime

Key = tuple[object, ...]


class Answers:
    def __init__(self, problem: Problem, folder: Path) -> None:
        self.problem = problem
        self._runtime = WorkerRuntime(problem, folder, "run", 0)
        self._uploads: dict[Key, tuple[bytes, Envelope]] = {}
        self._models: dict[Key, Envelope] = {}
        self._scores: dict[Key, Envelope] = {}

    def upload(self, envelope: Envelope) -> tuple[bytes, Envelope]:
        """The client's next state as its file has it, and the upload."""
        h = envelope.header
        key = (h.round, h.exchange, h.client, h.base, *checksums(envelope))
        if key not in self._uploads:
            reply = self._runtime.handle(envelope)
            assert reply.header.kind == "upload", bytes(reply.frames[0])
            state = self._runtime.states.read(h.client, self.problem.messages.version(h.round, h.exchange))
            self._uploads[key] = state, _kept(reply)
        state, reply = self._uploads[key]
        return state, _to(envelope, reply)

    def model(self, envelope: Envelope) -> tuple[int, ...]:
        """Which model comes with an envelope to evaluate; () if it brings none."""
        key = checksums(envelope)
        if key:
            self._models.setdefault(key, _kept(envelope))
        return key

    def score(self, envelope: Envelope, model: tuple[int, ...]) -> Envelope:
        h = envelope.header
        assert model, "it has no model to score"
        key = (h.round, h.exchange, model)
        if key not in self._scores:
            brought = self._models[model]
            whole = msgspec.structs.replace(h, fields=brought.header.fields)
            reply = self._runtime.handle(pack(whole, brought.frames))
            assert reply.header.kind == "score", bytes(reply.frames[0])
            self._scores[key] = _kept(reply)
        return _to(envelope, self._scores[key])


def _kept(envelope: Envelope) -> Envelope:
    """With bytes of its own."""
    return Envelope(envelope.header, envelope.head, tuple(bytes(frame) for frame in envelope.frames))


def _to(asked: Envelope, answer: Envelope) -> Envelope:
    """The answer in the start of the run that asks."""
    return pack(msgspec.structs.replace(answer.header, epoch=asked.header.epoch), answer.frames)
