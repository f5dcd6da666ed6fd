"""Send broadcasts, tasks, evaluation requests and client states to workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fedsim.errors import TaskError
from fedsim.learning.gaussian import Model
from fedsim.problem import Problem
from fedsim.round_events import Give, Open, ScoreChunk
from fedsim.virtual_clock import ExchangeClock
from fedsim.wire import limits
from fedsim.wire.envelope import (
    NONE,
    VERSION,
    Envelope,
    Header,
    Payload,
    encode,
    pack,
    without_references,
)
from fedsim.wire.ledger import stream_bytes
from fedsim.wire.message_context import codec_stream, of_broadcast
from fedsim.wire.schema import check_values
from workers import protocol_messages as messages
from workers.coordinator.task_timeline import Timeline
from workers.storage.checkpoints import Checkpoint
from workers.storage.client_states import ClientStates
from workers.transport.endpoint import Endpoint


class ReplicaMap:
    """The versions of clients' states that each remote worker holds, as far as the coordinator knows."""

    def __init__(self) -> None:
        self._held: defaultdict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)

    def lacks(self, worker: int, client: int, version: int) -> bool:
        """Return whether a worker lacks a state. Every worker can compute version 0 (client_init)."""
        return bool(version) and version not in self._held[worker].get(client, ())

    def has(self, worker: int, client: int, *versions: int) -> None:
        """Record that a worker holds these versions of a client's state, and no others."""
        self._held[worker][client] = versions

    def forget(self, worker: int) -> None:
        """Remove a worker that has left."""
        self._held.pop(worker, None)


@dataclass(frozen=True)
class Broadcast:
    """An encoded broadcast.

    payload: the encoded broadcast, which may refer to the previous one. complete: the same broadcast, for
    clients that do not have the previous one. decoded: the broadcast as clients decode it.
    """

    opened: Open
    payload: Payload
    complete: Payload
    decoded: Any


class Broadcasts:
    """The encoded broadcasts that uploads of this round and of later ones answer.

    sent: the exchange's broadcast, as clients decode it. sent_in: its round. last, last_in: the broadcast to
    which it refers, and its round, if broadcasts refer to the previous one (+last).
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.current = Broadcast(Open(0, 0, (), False), messages.NO_PAYLOAD, messages.NO_PAYLOAD, None)
        self.sent: Any = None
        self.last: Any = None
        self.sent_in = self.last_in = NONE
        self._by: dict[tuple[int, int], Broadcast] = {}
        """By round and by client; NONE: the broadcast of all clients that have none of their own."""

    def answered(self, round: int, client: int) -> Broadcast:
        """Return the broadcast that a client's task of this round answers."""
        own = self._by.get((round, client))
        return self._by[self._problem.rounds.policy.answered(round, client), NONE] if own is None else own

    def encode(self, server: Any, command: Open) -> None:
        """Encode an exchange's broadcast once for all its tasks, or for every client that has its own."""
        problem, policy, round = self._problem, self._problem.rounds.policy, command.round
        ctx = problem.context(round, command.exchange, command.folded_rounds, command.asked)
        down = problem.algorithm.broadcast(server, ctx)
        if problem.rounds.refers_to_last:
            self.last, self.last_in = self.sent, self.sent_in
        stream = codec_stream(problem.experiment.seed, round, command.exchange)

        def encoded(reference: Any, client: int = NONE) -> Broadcast:
            context = of_broadcast(reference, stream, client)
            payload, sent = problem.messages.sent(down, "down", context)
            check_values(sent, f"the server's broadcast of round {round}")
            dims, layout = problem.messages.dims, problem.net.layout
            alone = payload if client != NONE else without_references(payload, sent, dims, layout)
            return Broadcast(command, payload, alone, sent)

        references = policy.references(server, problem.context(0, 0), command.participants)
        own = {(round, k): encoded(reference, k) for k, reference in references.items()}
        self.current = own[round, limits.measured(command)] if own else encoded(self.last)
        self.sent, self.sent_in = self.current.decoded, round
        for k, older in policy.older(server, self.sent, command.participants).items() if round else ():
            own[round, k] = Broadcast(command, messages.NO_PAYLOAD, messages.NO_PAYLOAD, older)
        in_use = policy.in_use(round)
        earlier = {key: broadcast for key, broadcast in self._by.items() if key[0] in in_use}
        self._by = {**earlier, (round, NONE): self.current, **own}

    def restore(
        self, checkpoint: Checkpoint[Any] | None, earlier: Mapping[int, Checkpoint[Any]] | None = None
    ) -> None:
        """Restore the broadcasts that are needed after a committed round; do nothing without a checkpoint.

        earlier: in an asynchronous run, the checkpoints of the rounds in RoundPolicy.origins, from which the
        broadcasts in use are encoded again.
        """
        if checkpoint is None:
            return
        problem, policy = self._problem, self._problem.rounds.policy
        for origin in policy.origins(checkpoint.round + 1) if checkpoint.round else ():
            before = (earlier or {}).get(origin)
            start = problem.algorithm.server_init(problem.context(0, 0)) if before is None else before.server
            folds, participants = (
                before.folds if before else 0,
                problem.rounds.schedule()(origin + 1).participants,
            )
            self.encode(start, Open(origin + 1, 1, participants, True, folds, len(participants)))
        self.sent, self.sent_in = checkpoint.broadcast, checkpoint.broadcast_round


class Dispatch:
    """The sender of the coordinator's envelopes, which also reports them to the clock and the timeline.

    epoch: the number of this start of the run, which every task contains. replicas: the states that remote
    workers have; None if all workers share the run's folder.
    """

    def __init__(
        self,
        run: str,
        epoch: int,
        problem: Problem,
        endpoint: Endpoint,
        states: ClientStates,
        exchange_clock: ExchangeClock,
        replicas: ReplicaMap | None,
        timeline: Timeline,
    ) -> None:
        self.run, self.epoch, self.problem = run, epoch, problem
        self.endpoint = endpoint
        self.states, self.exchange_clock, self.replicas = states, exchange_clock, replicas
        self.timeline = timeline
        self.broadcasts = Broadcasts(problem)
        self._broadcasts_held: dict[int, set[int]] = {}
        """The rounds whose broadcasts a worker has decoded, by worker."""
        self._models_sent: dict[int, int] = {}

    @property
    def to_keep(self) -> tuple[Any, int]:
        """The last decoded broadcast and its round, or (None, 0) if the next one does not refer to it."""
        broadcasts = self.broadcasts
        return (broadcasts.sent, broadcasts.sent_in) if self.problem.rounds.refers_to_last else (None, 0)

    def encode_broadcast(self, server: Any, command: Open) -> Broadcast:
        """Encode an exchange's broadcast, and return it."""
        self.broadcasts.encode(server, command)
        self._relay()
        return self.broadcasts.current

    def _relay(self) -> None:
        """Book the broadcast once for each edge server with a client in the exchange."""
        tree, current = self.problem.rounds.tree, self.broadcasts.current
        if tree is None:
            return
        which = (self.epoch, current.opened.round, current.opened.exchange)
        relayed = pack(Header(VERSION, "relayed", self.run, *which, fields=current.payload.fields))
        for edge in tree.active(current.opened.participants):
            self.book_hop(edge, relayed, "down")

    def book_hop(self, edge: int, envelope: Envelope, direction: str) -> None:
        """Book an envelope between an edge server and the root, which is not sent."""
        assert self.problem.rounds.tree is not None
        self.endpoint.ledger.book_hop(envelope, edge, self.problem.rounds.tree.names[edge], direction)
        self.exchange_clock.hop(edge, direction, stream_bytes(envelope))

    def give(self, server: Any, give: Give) -> None:
        """Send a task with the broadcast and the fields that only this client gets."""
        problem, task = self.problem, give.task
        last, last_in = self.broadcasts.last, self.broadcasts.last_in
        has_last = last is not None and task.base == problem.messages.version(last_in, task.exchange)
        broadcast = self.broadcasts.answered(task.round, task.client)
        payload = broadcast.payload if has_last else broadcast.complete
        folds, asked = broadcast.opened.folded_rounds, broadcast.opened.asked
        ctx = problem.context(task.round, task.exchange, folds, asked)
        extra = problem.algorithm.broadcast_to(server, task.client, ctx)
        if extra is not None:
            own = problem.messages.encode(extra, "down")
            payload = Payload(payload.fields + own.fields, payload.frames + own.frames)
        envelope = messages.task(self.run, self.epoch, task, payload, give.dropout, folds, asked)
        if not give.dropout:
            self._transfer_state(give.worker, envelope.header)
            self._transfer_last(give.worker, envelope.header, has_last)
        self.send(give.worker, envelope, give.retry)
        self.exchange_clock.gave(task.client, stream_bytes(envelope))
        self.timeline.gave(give.worker, task.round, task.exchange, task.client, envelope.header.kind)

    def _transfer_state(self, worker: int, of: Header) -> None:
        """Send a remote worker the state that a task starts from, if the worker does not have it."""
        if self.replicas is not None and self.replicas.lacks(worker, of.client, of.base):
            data = self.states.read(of.client, of.base)
            self.send(worker, messages.state(of, data))
            self.replicas.has(worker, of.client, of.base)

    def _transfer_last(self, worker: int, of: Header, needed: bool) -> None:
        """Send a worker the last broadcast if its task needs it and the worker lacks it. The worker may be
        new, or another worker may have computed the client's last task."""
        if not self.problem.rounds.refers_to_last:
            return
        held, last_in = self._broadcasts_held.get(worker, set()), self.broadcasts.last_in
        if needed and last_in not in held:
            payload = self.problem.messages.encode(self.broadcasts.last)
            self.send(worker, messages.last_broadcast(of, last_in, payload))
            held = held | {last_in}
        self._broadcasts_held[worker] = {r for r in held if r >= last_in} | {of.round}

    def give_score(self, score: ScoreChunk, model: Model | None) -> None:
        """Ask a worker to evaluate a chunk; its first request in a round carries the model."""
        payload, round, chunk = messages.NO_PAYLOAD, score.chunk.round, score.chunk.chunk
        if self._models_sent.get(score.worker) != round:
            assert model is not None  # set when the round was committed
            payload = encode(
                messages.to_evaluate(model, self.problem.evaluation.samples), {}, self.problem.messages.dims
            )
            self._models_sent[score.worker] = round
        self.send(score.worker, messages.evaluate(self.run, self.epoch, round, chunk, payload))
        self.timeline.gave(score.worker, round, chunk, NONE, "evaluate")

    def send(self, worker: int, envelope: Envelope, retry: bool = False) -> None:
        """Send an envelope. If the worker has ended, do nothing; its end is handled elsewhere."""
        with suppress(TaskError):
            self.endpoint.send(worker, envelope, retry)

    def left(self, worker: int) -> None:
        """Forget the states, models and broadcasts of a worker that has left."""
        if self.replicas is not None:
            self.replicas.forget(worker)
        self._models_sent.pop(worker, None)
        self._broadcasts_held.pop(worker, None)
        self.timeline.left(worker)

    def stop(self, workers: int, farewell: Envelope) -> None:
        """Send all workers the message that ends them."""
        for worker in range(workers):
            self.send(worker, farewell)
