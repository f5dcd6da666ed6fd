"""The edge servers of the simulated world: the real EdgeServer, between simulated connections.

An edge server's connections to the root lose and repeat nothing, as TCP does not; that envelopes are lost or
repeated is drawn for those of its workers. It may die, hang, and, elsewhere, be cut off.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from fedsim.errors import ConnectionLost, FedsimError, TaskError
from fedsim.wire.envelope import Envelope
from fedsim.wire.ledger import Ledger
from tests.simulation.world import Link, World
from workers import protocol_messages as messages
from workers.edge.edge_server import HEARTBEAT, EdgeServer
from workers.transport.endpoint import Endpoint, Incoming
from workers.transport.handshake import Hello, hello, read_hello


class Above:
    """A connection to the root, of the edge server itself or in a worker's name."""

    def __init__(self, edge: Edge, worker: int) -> None:
        self.edge, self.address = edge, "the root"
        self.link = Link(worker, owner=self)
        self.reliable = True
        self._taken: deque[Envelope] = deque()
        self._lost = ""

    def receive(self, deadline: float) -> Envelope | None:
        if self._taken:
            return self._taken.popleft()
        if self._lost:
            raise ConnectionLost(self._lost)
        return None

    def send(self, envelope: Envelope, deadline: float = 60.0) -> None:
        if not self.link.open and self.edge.world.odds.remote:
            raise ConnectionLost("it was cut")
        self.offer(envelope)

    def offer(self, envelope: Envelope) -> None:
        if self.link.open:
            self.edge.world.carry(self.link, "up", envelope)

    def close(self, linger: float = 0.0) -> None:
        self.edge.world.end(self.link)

    # ---- what the world does to it

    def take(self, link: Link, envelope: Envelope) -> None:
        self._taken.append(envelope)
        self.edge.after(0.0, Edge.step)

    def message(self, link: Link, what: str) -> None:
        self._lost = what
        self.edge.after(0.0, Edge.step)

    def die(self) -> None:
        self.edge.die()


class WorkerEndpoint(Endpoint):
    """Where the workers of an edge server come in."""

    def __init__(self, edge: Edge) -> None:
        super().__init__(Ledger())
        self.edge = edge
        self.bound: dict[int, Link] = {}
        self.closed = False
        self.links: dict[Link, None] = {}
        """All that have ever been here."""
        self._come: list[Callable[[], Incoming | None]] = []

    def send(self, worker: int, envelope: Envelope, retry: bool = False) -> None:
        self._book(envelope, worker, "down", retry)
        link = self.bound.get(worker)
        if link is None or not link.open:
            raise TaskError(f"worker {worker} has no connection")
        self.edge.world.carry(link, "down", envelope)

    def wait(self, fds: list[int], timeout: float) -> tuple[list[Incoming], list[int]]:
        """Take what has come, in order; only now is it known who has come or gone."""
        come, self._come = self._come, []
        incoming = [taken for take in come if (taken := take()) is not None]
        return incoming, []

    def dismiss(self, worker: int) -> None:
        link = self.bound.pop(worker, None)
        if link is not None:
            link.dismissed = True

    # ---- what the world does to it

    def arrive(self, link: Link, envelope: Envelope) -> None:
        if self.closed:
            link.open = False
            self.edge.world.tell(link, "cut")
            return
        self.links[link] = None
        self._comes(lambda: self._accept(link, envelope))

    def note_end(self, link: Link) -> None:
        self._comes(lambda: self._ended(link))

    def spoiled(self, link: Link) -> None:
        self._comes(lambda: self._unread(link))

    def _comes(self, take: Callable[[], Incoming | None]) -> None:
        self._come.append(take)
        self.edge.after(0.0, Edge.step)

    def _accept(self, link: Link, envelope: Envelope) -> Incoming | None:
        """As the world's own endpoint: whoever has said hello is known, and nobody else."""
        remote, kind, greeting = self.edge.world.odds.remote, envelope.header.kind, None
        if self.bound.get(link.worker) is link:
            if kind == "hello":
                return None
        elif kind == "hello" and not link.dismissed:
            if link.worker in self.bound and remote:
                self.edge.world.tell(link, "refused")
                return None
            self.bound[link.worker] = link
            self.ledger.book_handshake(link.worker)
            greeting = read_hello(envelope)
        else:
            if remote:
                self.edge.world.tell(link, "rejoin")
            return None
        self._book(envelope, link.worker, "up")
        return Incoming(link.worker, envelope, greeting)

    def _ended(self, link: Link) -> None:
        if self.bound.get(link.worker) is link:
            del self.bound[link.worker]
            self.lost.append(link.worker)

    def _unread(self, link: Link) -> None:
        if self.bound.get(link.worker) is link:
            self.unreadable[link.worker] = "the checksum is wrong"


class Edge:
    """One process of an edge server, from its start to its end."""

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index = world, index
        self.dead, self.stopped_until = False, 0.0
        self.endpoint: WorkerEndpoint | None = None
        self._server: EdgeServer | None = None
        self._above: list[Above] = []
        self._root: Above | None = None
        self.after(world.rng.uniform(0.3, 3.0), Edge.join)

    # as a worker's process
    def after(self, seconds: float, action: object) -> None:
        def act() -> None:
            if self.dead:
                return
            if self.world.now < self.stopped_until:
                self.after(self.stopped_until - self.world.now, action)
            else:
                action(self)  # type: ignore[operator]

        self.world.at(seconds, act)

    def die(self) -> None:
        if not self.dead:
            self.dead = True
            self._leave()
            self.world.died(self.index)

    def _leave(self) -> None:
        """Its sockets are closed: elsewhere the other ends learn of it, and nobody on one machine does."""
        endpoint, above, self.endpoint, self._server, self._above = self.endpoint, self._above, None, None, []
        if endpoint is not None:
            endpoint.closed = True
        for connection in above:
            self.world.end(connection.link)
        for link in endpoint.links if endpoint else ():
            was_open, link.open = link.open, False
            if was_open and self.world.odds.remote:
                self.world.participants[link.worker].after(
                    self.world.rng.uniform(0.0, 2.0), lambda p, link=link: p.message(link, "cut")
                )

    # ---- coming

    def join(self) -> None:
        self._root = self._connect(Hello("", self.index, os.getpid()))
        self._server = None

    def _connect(self, greeting: Hello) -> Above:
        connection = Above(self, greeting.index)
        self._above.append(connection)
        connection.send(hello(greeting))
        return connection

    def step(self) -> None:
        """What the real process does when something has come."""
        if self._root is None:  # between two connections
            return
        try:
            if self._server is None:
                self._wait_for_welcome()
            elif self._server.step() is not None:
                self.dead = True
        except ConnectionLost:
            if not self.world.odds.remote:
                raise
            self._leave()
            self._root = None
            self.after(0.5, Edge.join)
        except FedsimError:
            self.die()

    def _wait_for_welcome(self) -> None:
        assert self._root is not None
        envelope = self._root.receive(0.0)
        if envelope is None:
            return
        if envelope.header.kind == "stop":
            self.dead = True
        elif envelope.header.kind == "welcome":
            root = self._root
            self.after(self.world.rng.uniform(0.1, 2.0), lambda e: e.open(root))

    def open(self, root: Above) -> None:
        """It is set up: its workers may come."""
        if root is not self._root or self._server is not None:
            return
        self.endpoint = WorkerEndpoint(self)
        spool = Path(self.world.folder) / f"edge-{self.index}.spool"
        self._server = EdgeServer(
            *(self.world.answers.problem, "run", root, self.endpoint, self._connect, spool),  # type: ignore[arg-type]
            clock=self.world.clock,
        )
        root.send(messages.ready("run", messages.WorkerManifest("", {})))
        self._tick(self._server)

    def _tick(self, server: EdgeServer) -> None:
        if server is self._server and self._root is not None:
            if self.world.draw(self.world.odds.die / 10, "edge server died"):
                self.die()
                return
            if self.world.draw(self.world.odds.stop / 10, "edge server stopped"):
                self.stopped_until = self.world.now + self.world.rng.choice((3.0, 60.0, 1e6))
            self._root.offer(messages.idle("run"))
            self.after(HEARTBEAT, lambda e: e._tick(server))
