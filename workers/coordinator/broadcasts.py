"""What goes out: broadcasts, tasks, models to score, and states on loan."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from fedsim.errors import TaskError
from fedsim.learning.gaussian import Gaussian, Point
from fedsim.problem import Problem
from fedsim.round_machine import Give, Open, ScoreChunk
from fedsim.wire.envelope import NONE, VERSION, Envelope, Header, Payload, decode_own, encode, pack
from fedsim.wire.ledger import stream_bytes
from fedsim.wire.schema import check_values
from workers.coordinator.exchange_clock import ExchangeClock
from workers.coordinator.task_timeline import Timeline
from workers.state_transfer import ReplicaMap, state_envelope
from workers.storage.client_states import ClientStates
from workers.transport.endpoint import Endpoint
from workers.worker.runtime import to_evaluate


class Dispatch:
    """Envelopes to workers. epoch: of this start of the run, in every task; `loans` is of remote workers,
    else None."""

    def __init__(
        self,
        run: str,
        epoch: int,
        problem: Problem,
        endpoint: Endpoint,
        states: ClientStates,
        exchange_clock: ExchangeClock,
        replicas: ReplicaMap | None,
    ) -> None:
        self.run, self.epoch, self.problem = run, epoch, problem
        self.endpoint = endpoint
        self.states, self.exchange_clock, self.replicas = states, exchange_clock, replicas
        self.timeline = Timeline()
        self._payload = Payload((), ())
        self.sent: Any = None
        """The broadcast of this exchange, as clients decode it."""
        self._models_sent: dict[int, int] = {}

    def encode_broadcast(self, server: Any, command: Open) -> Any:
        """Encode the broadcast of an exchange once; returns it as clients will decode it.

        Raises:
            WireError: if the algorithm's message has values that must not be sent.
        """
        problem = self.problem
        down = problem.algorithm.broadcast(server, problem.context(command.round, command.exchange))
        codecs, layout = problem.codecs["down"], problem.net.layout
        self._payload = encode(down, codecs, problem.dims, layout=layout)
        self.sent = decode_own(type(down), self._payload, codecs, problem.dims, layout=layout)
        check_values(self.sent, f"the server's broadcast of round {command.round}")
        return self.sent

    def give(self, server: Any, give: Give) -> None:
        """The broadcast, and behind it what only this client gets."""
        payload, problem, task = self._payload, self.problem, give.task
        kind = "gone" if give.dropout else "task"
        h = Header(VERSION, kind, self.run, self.epoch, task.round, task.exchange, task.client, task.base)
        if not give.dropout:
            self._transfer_state(give.worker, h)
        ctx = problem.context(task.round, task.exchange)
        extra = problem.algorithm.broadcast_to(server, task.client, ctx)
        if extra is not None:
            own = encode(extra, problem.codecs["down"], problem.dims, layout=problem.net.layout)
            payload = Payload(payload.fields + own.fields, payload.frames + own.frames)
        envelope = pack(msgspec.structs.replace(h, fields=payload.fields), payload.frames)
        self.send(give.worker, envelope, give.retry)
        self.exchange_clock.gave(task.client, stream_bytes(envelope))
        self.timeline.gave(give.worker, task.round, task.exchange, task.client, kind)

    def _transfer_state(self, worker: int, of: Header) -> None:
        """Send a remote worker the state that a task starts from, if it does not have it."""
        if self.replicas is not None and self.replicas.lacks(worker, of.client, of.base):
            data = self.states.read(of.client, of.base)
            self.send(worker, state_envelope("state", self.run, of, data))
            self.replicas.has(worker, of.client, of.base)

    def give_score(self, score: ScoreChunk, model: Point | Gaussian | None) -> None:
        """A chunk to score, and before the first of a round its model."""
        payload = Payload((), ())
        if self._models_sent.get(score.worker) != score.round:
            assert model is not None  # taken at the round's commit, before any Score command
            payload = encode(to_evaluate(model, self.problem.eval_samples), {}, self.problem.dims)
            self._models_sent[score.worker] = score.round
        h = Header(VERSION, "evaluate", self.run, self.epoch, score.round, score.chunk, fields=payload.fields)
        self.send(score.worker, pack(h, payload.frames))
        self.timeline.gave(score.worker, score.round, score.chunk, NONE, "evaluate")

    def send(self, worker: int, envelope: Envelope, retry: bool = False) -> None:
        """A worker that is gone gets nothing: its end is about to be known, and others take over."""
        with suppress(TaskError):
            self.endpoint.send(worker, envelope, retry)

    def left(self, worker: int) -> None:
        """A remote worker is gone, and with it what it had been sent."""
        if self.replicas is not None:
            self.replicas.forget(worker)
        self._models_sent.pop(worker, None)
        self.timeline.left(worker)

    def stop(self, workers: int) -> None:
        """Tell all workers that there is no more to do."""
        for worker in range(workers):
            with suppress(TaskError):  # a worker that is gone already has no more to do
                self.endpoint.send(worker, pack(Header(VERSION, "stop", self.run)))
