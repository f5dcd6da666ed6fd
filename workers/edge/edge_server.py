"""The edge server, which forwards envelopes, stores its clients' uploads, and sums them.

The edge server has one connection to the root for each of its workers, so registration, leases, heartbeats
and evaluation work as without edge servers. Three things differ. The root sends each broadcast once, and the
edge server adds it to every task. The edge server stores uploads and forwards only their headers. Once the
root has named the uploads that count, the edge server sends their sums. With a single edge server, and in the
set-up round, uploads are forwarded unchanged (fedsim.tree).

An edge server keeps nothing from one exchange to the next. If it ends, its uploads are computed again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq

from fedsim.compressed_sums import Remainder
from fedsim.errors import AccessError, ConnectionLost, FedsimError, TaskError, WireError
from fedsim.problem import Problem
from fedsim.round_events import Open, TaskId
from fedsim.wire.envelope import NONE, Envelope, Payload, decode
from fedsim.wire.message_context import codec_stream, of_broadcast
from workers import edge_messages, protocol_messages as messages
from workers.coordinator.aggregation import read_upload
from workers.coordinator.edge_sums import pack_remainder, read_remainder, summed
from workers.storage.upload_spool import Spool
from workers.transport.dealer import Connection
from workers.transport.handshake import Hello, refusal, refusal_reason
from workers.transport.router import ZmqEndpoint

HEARTBEAT = 1.0
"""Seconds between two heartbeats to the root."""
DRAIN_SECONDS = 2.0
"""Seconds to wait for remote workers to close their connections; the root waits longer."""
AT_ONCE = 0.0


class EdgeEndpoint(ZmqEndpoint):
    """An endpoint at which a worker may register again, because the root has replaced its process."""

    def _register(self, route: bytes, hello: Hello, frame: zmq.Frame) -> int:
        if hello.index in self._routes and self.listener.identify(hello, "") == hello.index:
            self.dismiss(hello.index)
        return super()._register(route, hello, frame)


class EdgeServer:
    """One edge server, from its registration to its end."""

    def __init__(
        self,
        problem: Problem,
        run: str,
        root: Connection,
        endpoint: ZmqEndpoint,
        connect: Callable[[Hello], Connection],
        folder: Path,
        unanswered: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up an edge server without workers.

        root: the edge server's own connection. connect: opens a connection to the root for a worker. folder:
        the folder for uploads. unanswered: the seconds of silence after which a root on another machine
        counts as lost. clock: returns seconds.
        """
        self.problem, self.run, self.root, self.endpoint = problem, run, root, endpoint
        self._connect, self._spool = connect, Spool(folder)
        self._above: dict[int, Connection] = {}
        """Connections to the root, by worker."""
        self._opened = Open(NONE, 0, (), False)
        self._payload: Payload = messages.NO_PAYLOAD
        self._down: Any = None
        self._remainder: Remainder | None = None
        """What the codecs took from the last sums, as the root has sent it for this exchange."""
        self._waiting: list[tuple[int, Envelope]] = []
        """Assignments (worker, task) whose broadcast has not arrived yet."""
        self._assigned: set[TaskId] = set()
        self._uploads: dict[tuple[int, int], Envelope] = {}
        """The headers of this exchange's uploads, by (client, worker). A client has several if the root
        removed a worker before the header of the worker's upload arrived."""
        self._closed = False
        """True if the root has named the uploads that count."""
        self._unanswered, self._clock = unanswered, clock
        self._heartbeat = self._heard = clock()

    def serve(self) -> Envelope:
        """Forward envelopes until the root sends 'stop', and return that envelope.

        Raises:
            ConnectionLost: If the connection to the root has ended.
            AccessError: If the root refuses this edge server.
        """
        while True:
            self._sign_of_life()
            self._wait()
            farewell = self.step()
            if farewell is not None:
                return farewell

    def step(self) -> Envelope | None:
        """Forward the envelopes that have arrived, without waiting; return the root's 'stop', if any."""
        while (envelope := self.root.receive(AT_ONCE)) is not None:
            self._heard = self._clock()
            if envelope.header.kind == "stop":
                return self._stop(envelope)
            self._from_root(envelope)
        for worker in list(self._above):
            self._relay(worker)
        for incoming in self.endpoint.wait([], AT_ONCE)[0]:
            if incoming.hello is not None:
                self._joined(incoming.worker, incoming.hello)
            else:
                self._from_worker(incoming.worker, incoming.envelope)
        lost, self.endpoint.lost = self.endpoint.lost, []
        unreadable, self.endpoint.unreadable = self.endpoint.unreadable, {}
        for worker in lost:
            self._hang_up(worker)
        for worker in unreadable:
            self._part(worker)
        return None

    def _wait(self) -> None:
        poller = zmq.Poller()
        for socket in (self.endpoint.socket, self.root.socket, *(c.socket for c in self._above.values())):
            poller.register(socket, zmq.POLLIN)
        poller.poll(int(HEARTBEAT * 1000))

    def _sign_of_life(self) -> None:
        if self._clock() - self._heartbeat >= HEARTBEAT:
            self._heartbeat = self._clock()
            self.root.offer(messages.idle(self.run))
        if self._clock() - self._heard > self._unanswered:
            raise ConnectionLost(f"nothing was received from {self.root.address} for {self._unanswered:g} s")

    # ---- workers that come and go

    def _joined(self, worker: int, hello: Hello) -> None:
        """Connect to the root for a worker; if the root refuses the worker, pass it the reason."""
        self._hang_up(worker)
        try:
            # the authenticated number; the one in the hello is only a claim
            self._above[worker] = self._connect(msgspec.structs.replace(hello, index=worker))
        except FedsimError as e:
            self._send(worker, refusal(str(e)))
            self.endpoint.dismiss(worker)

    def _hang_up(self, worker: int) -> None:
        """Close a worker's connection to the root, which tells the root that the worker has left."""
        connection = self._above.pop(worker, None)
        if connection is not None:
            connection.close()

    def _part(self, worker: int) -> None:
        """Forget a worker. If the worker sends anything, it is asked to join again."""
        self._hang_up(worker)
        self.endpoint.dismiss(worker)

    # ---- downwards

    def _from_root(self, envelope: Envelope) -> None:
        match envelope.header.kind:
            case "state":
                self._remainder = read_remainder(self.problem, envelope, "state of an edge server")
            case "relayed":
                self._open(envelope)
            case "close":
                self._close(envelope)
            case "account":
                self._account(NONE)
            case "refused":
                raise AccessError(f"refused: {refusal_reason(envelope)}")
            case kind if kind not in ("welcome", "heartbeat"):
                raise WireError(f"an edge server got an envelope of kind {kind!r}")

    def _open(self, envelope: Envelope) -> None:
        """Store the broadcast of an exchange, and send the tasks that were waiting for it."""
        h, problem = envelope.header, self.problem
        self._opened = Open(h.round, h.exchange, (), True, h.folds, h.asked)
        self._payload = Payload(h.fields, envelope.frames)
        context = of_broadcast(None, codec_stream(problem.experiment.seed, h.round, h.exchange))
        kind, codecs = problem.exchange(h.round, h.exchange).down, problem.codecs["down"]
        owner = f"broadcast of round {h.round} to an edge server"
        self._down = decode(kind, envelope, codecs, problem.dims, owner, context, problem.net.layout)
        self._assigned.clear()
        self._uploads.clear()
        self._closed = False
        waiting, self._waiting = self._waiting, []
        for worker, assignment in waiting:
            self._to_worker(worker, assignment)

    def _relay(self, worker: int) -> None:
        try:
            while worker in self._above and (envelope := self._above[worker].receive(AT_ONCE)) is not None:
                self._to_worker(worker, envelope)
        except ConnectionLost:  # the root has removed this worker
            self._part(worker)

    def _to_worker(self, worker: int, envelope: Envelope) -> None:
        h = envelope.header
        if h.kind not in edge_messages.ASSIGNMENTS:
            return self._send(worker, envelope)
        here = (self._opened.round, self._opened.exchange)
        if (h.round, h.exchange) != here:
            if (h.round, h.exchange) > here:  # else it is late: its exchange is over
                self._waiting.append((worker, envelope))
            return None
        task = messages.task_of(envelope)
        gone = edge_messages.ASSIGNMENTS[h.kind]
        complete = messages.task(self.run, h.epoch, task, self._payload, gone, h.folds, h.asked)
        self._send(worker, complete, retry=task in self._assigned)
        self._assigned.add(task)
        return None

    def _send(self, worker: int, envelope: Envelope, retry: bool = False) -> None:
        with suppress(TaskError):  # the worker has ended; the root will notice soon
            self.endpoint.send(worker, envelope, retry)

    # ---- upwards

    def _from_worker(self, worker: int, envelope: Envelope) -> None:
        h = envelope.header
        if h.kind == "upload":
            envelope = self._keep(worker, envelope)
        try:
            if worker in self._above:
                self._above[worker].send(envelope)
        except ConnectionLost:  # its task is repeated, maybe by another worker
            self._part(worker)

    def _keep(self, worker: int, envelope: Envelope) -> Envelope:
        """Store an upload of this exchange, and return the envelope for the root.

        If uploads are forwarded unchanged, a client's first one counts. Others have the same bits.
        """
        h, tree = envelope.header, self.problem.tree
        merges = tree is not None and tree.merges and h.round > 0
        known = {c if not merges else (c, w) for c, w in self._uploads}
        here = messages.task_of(envelope) in self._assigned and not self._closed
        if not here or ((h.client, worker) if merges else h.client) in known:
            self.endpoint.ledger.book_as_retry(envelope, worker)
        else:
            self._uploads[h.client, worker] = Envelope(h, envelope.head, ())
            if merges:
                self._spool.put(self._place(h.client, worker), envelope, worker)
        return edge_messages.uploaded(envelope) if merges else envelope

    def _place(self, client: int, worker: int) -> int:
        return worker * self.problem.experiment.clients + client

    def _close(self, envelope: Envelope) -> None:
        """Send the sums of the uploads that count, and then the ledger rows of this exchange."""
        h, named = envelope.header, edge_messages.read_uploads(envelope)
        if named:

            def ups() -> Any:
                for k, worker in named:
                    upload, _ = self._spool.take(self._place(k, worker))
                    yield k, read_upload(self.problem, upload, self._down, worker)
                    self._sign_of_life()

            assert self.problem.tree is not None
            edge = self.problem.tree.edge_of(named[0][0])
            sent = summed(self.problem, self._opened, self._down, edge, ups(), self._remainder)
            if sent.remainder is not None:
                left = pack_remainder(self.problem, sent.remainder)
                self.root.send(edge_messages.draft(self.run, h.epoch, self._opened, left))
            self.root.send(edge_messages.sums(self.run, h.epoch, self._opened, sent.payload))
        self._remainder = None  # the root sends it before the next broadcast
        self._clear(dict(named))
        self._account(h.round, h.exchange)

    def _clear(self, named: dict[int, int]) -> None:
        """Forget all uploads. Book all but one per client (the named one, if any) as retries."""
        for (k, worker), upload in self._uploads.items():
            if named.setdefault(k, worker) != worker:
                self.endpoint.ledger.book_as_retry(upload, worker)
            self._spool.discard(self._place(k, worker))
        self._uploads.clear()
        self._closed = True

    def _account(self, round: int, exchange: int = 0) -> None:
        """Send the ledger rows up to a round; if `round` is NONE, all rows and the kernel's residual."""
        residual = None if round != NONE else self.endpoint.residual()
        rows = self.endpoint.ledger.close(round if round != NONE else self.problem.experiment.rounds)
        self.root.send(edge_messages.account(self.run, round, exchange, rows, residual))

    def _stop(self, farewell: Envelope) -> Envelope:
        """Stop all workers, because 'stop' may not have arrived on their own connections yet."""
        for worker in self._above:
            self._send(worker, farewell)
        for worker in list(self._above):
            self._hang_up(worker)
        self.endpoint.drain(farewell, DRAIN_SECONDS)
        return farewell
