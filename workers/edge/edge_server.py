"""What an edge server does with envelopes: it passes them on, keeps uploads, and adds them up.

A worker behind it has a connection of its own to the root, which the edge server holds in its name: so
registration, leases, heartbeats and evaluation are those of any worker. Three things differ. The broadcast
comes once for all its clients and is put behind every task here; an upload stays here, and only its header
goes on; and once the root says which uploads count, their sum goes up in their place. With one edge server,
and in a set-up, uploads are passed on as they are (fedsim.tree).

An edge server is a cache. It keeps no state of a client, and what it holds when it ends is computed again.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import zmq

from fedsim.errors import FedsimError, TaskError, WireError
from fedsim.problem import Problem
from fedsim.round_events import Open, TaskId
from fedsim.wire.envelope import NONE, Envelope, Payload, decode
from fedsim.wire.message_context import codec_stream, of_broadcast
from workers import edge_messages
from workers import protocol_messages as messages
from workers.coordinator.aggregation import read_upload
from workers.coordinator.edge_sums import summed
from workers.storage.upload_spool import Spool
from workers.transport.dealer import Connection
from workers.transport.handshake import Hello
from workers.transport.router import ZmqEndpoint

HEARTBEAT = 1.0
"""Seconds between two signs of life towards the root."""
AT_ONCE = 0.0


class Connect(Protocol):
    """Opens a connection to the root in the name of a worker."""

    def __call__(self, hello: Hello) -> Connection: ...


class EdgeEndpoint(ZmqEndpoint):
    """A worker that comes again takes its place anew: the root, which starts workers, has seen its end."""

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
        endpoint: EdgeEndpoint,
        connect: Connect,
        folder: Path,
    ) -> None:
        """root: its own connection. connect: for its workers. folder: where uploads may lie."""
        self.problem, self.run, self.root, self.endpoint = problem, run, root, endpoint
        self._connect, self._spool = connect, Spool(folder)
        self._above: dict[int, Connection] = {}
        """Connections to the root, by worker."""
        self._opened = Open(NONE, 0, (), False)
        self._payload: Payload = messages.NO_PAYLOAD
        self._down: Any = None
        self._waiting: list[tuple[int, Envelope]] = []
        """Assignments whose broadcast is still on its way."""
        self._holders: dict[TaskId, int] = {}
        """The worker from which an upload counts."""
        self._assigned: set[TaskId] = set()
        self._heartbeat = 0.0

    def serve(self) -> None:
        """Pass envelopes on until the root says 'stop'.

        Raises:
            FedsimError: If something goes wrong; the root has been informed if that was possible.
        """
        try:
            while True:
                self._sign_of_life()
                self._wait()
                while (envelope := self.root.receive(AT_ONCE)) is not None:
                    if envelope.header.kind == "stop":
                        return self._stop(envelope)
                    self._from_root(envelope)
                for worker, connection in list(self._above.items()):
                    while (envelope := connection.receive(AT_ONCE)) is not None:
                        self._to_worker(worker, envelope)
                for incoming in self.endpoint.wait([], AT_ONCE)[0]:
                    if incoming.hello is not None:
                        self._joined(incoming.worker, incoming.hello)
                    else:
                        self._from_worker(incoming.worker, incoming.envelope)
        except FedsimError as e:
            with suppress(FedsimError):
                self.root.send(messages.failed(self.run, e))
            raise

    def _wait(self) -> None:
        poller = zmq.Poller()
        for socket in (self.endpoint.socket, self.root.socket, *(c.socket for c in self._above.values())):
            poller.register(socket, zmq.POLLIN)
        poller.poll(int(HEARTBEAT * 1000))

    def _sign_of_life(self) -> None:
        if time.monotonic() - self._heartbeat >= HEARTBEAT:
            self._heartbeat = time.monotonic()
            self.root.offer(messages.idle(self.run))

    def _joined(self, worker: int, hello: Hello) -> None:
        before = self._above.pop(worker, None)
        if before is not None:
            before.close()
        self._above[worker] = self._connect(hello)

    # ---- downwards

    def _from_root(self, envelope: Envelope) -> None:
        match envelope.header.kind:
            case "relayed":
                self._open(envelope)
            case "close":
                self._close(envelope)
            case "account":
                self._account(NONE)
            case kind if kind != "welcome":
                raise WireError(f"an edge server got an envelope of kind {kind!r}")

    def _open(self, envelope: Envelope) -> None:
        """Keep the broadcast of an exchange, and give the tasks that were waiting for it."""
        h, problem = envelope.header, self.problem
        self._opened = Open(h.round, h.exchange, (), True, h.folds, h.asked)
        self._payload = Payload(h.fields, envelope.frames)
        context = of_broadcast(None, codec_stream(problem.experiment.seed, h.round, h.exchange))
        kind, codecs = problem.exchange(h.round, h.exchange).down, problem.codecs["down"]
        owner = f"broadcast of round {h.round} to an edge server"
        self._down = decode(kind, envelope, codecs, problem.dims, owner, context, problem.net.layout)
        self._holders.clear()
        self._assigned.clear()
        waiting, self._waiting = self._waiting, []
        for worker, assignment in waiting:
            self._to_worker(worker, assignment)

    def _to_worker(self, worker: int, envelope: Envelope) -> None:
        h = envelope.header
        if h.kind not in edge_messages.ASSIGNMENTS:
            return self._send(worker, envelope)
        if (h.round, h.exchange) != (self._opened.round, self._opened.exchange):
            self._waiting.append((worker, envelope))
            return None
        task = messages.task_of(envelope)
        gone = edge_messages.ASSIGNMENTS[h.kind]
        complete = messages.task(self.run, h.epoch, task, self._payload, gone, h.folds, h.asked)
        self._send(worker, complete, retry=task in self._assigned)
        self._assigned.add(task)
        self._holders[task] = worker
        return None

    def _send(self, worker: int, envelope: Envelope, retry: bool = False) -> None:
        with suppress(TaskError):  # it has ended, which the root will soon know
            self.endpoint.send(worker, envelope, retry)

    # ---- upwards

    def _from_worker(self, worker: int, envelope: Envelope) -> None:
        h = envelope.header
        if h.kind == "upload":
            task = messages.task_of(envelope)
            counts = self._holders.get(task) == worker
            if not counts:
                self.endpoint.ledger.book_as_retry(envelope, worker)
            tree = self.problem.tree
            if tree is not None and tree.merges and h.round:
                if counts:
                    self._holders[task] = NONE  # a second one does not count
                    self._spool.put(h.client, envelope, worker)
                envelope = edge_messages.uploaded(envelope)
        self._above[worker].send(envelope)

    def _close(self, envelope: Envelope) -> None:
        """Send the sum of the uploads that count, and then what this exchange has cost."""
        h, clients = envelope.header, edge_messages.read_clients(envelope)
        if clients:

            def ups() -> Any:
                for k in clients:
                    upload, worker = self._spool.take(k)
                    yield k, read_upload(self.problem, upload, self._down, worker)
                    self._sign_of_life()

            payload = summed(self.problem, self._opened, self._down, ups())
            self.root.send(edge_messages.sums(self.run, h.epoch, self._opened, payload))
        for task in self._assigned:
            self._spool.discard(task.client)  # lost by the schedule, or late
        self._account(h.round, h.exchange)

    def _account(self, round: int, exchange: int = 0) -> None:
        """Send the ledger rows so far; round NONE: all that are left, and what the kernel has counted."""
        residual = None if round != NONE else self.endpoint.residual()
        rows = self.endpoint.ledger.close(round if round != NONE else self.problem.experiment.rounds)
        self.root.send(edge_messages.account(self.run, round, exchange, rows, residual))

    def _stop(self, farewell: Envelope) -> None:
        """Workers may not have been told yet: their connections are others."""
        for worker in self._above:
            self._send(worker, farewell)
        for connection in self._above.values():
            connection.close()
