"""A world for the coordinator: virtual time, a network, and workers that die, hang and come again.

The coordinator and its parts are the real ones (membership, leases, dispatch, response filter, fold, spool,
checkpoints, journal); the clock, sockets and processes are not. Whatever happens is drawn from one generator,
so that one seed is one history, and a virtual hour costs nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import select
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedsim.errors import TaskError
from fedsim.wire.envelope import Envelope
from fedsim.wire.ledger import Ledger
from tests.simulation.answers import Answers
from workers.coordinator.loop import Coordinator
from workers.coordinator.worker_pool import ProcessExit
from workers.storage.client_states import ClientStates
from workers.transport.endpoint import Endpoint, Incoming
from workers.transport.handshake import read_hello

if TYPE_CHECKING:
    from tests.simulation.workers import Person

DEATHS = -7
"""Stands for a process handle that has become readable."""
KEEPALIVE = 30.0
"""Seconds after which the kernel ends a connection whose other side is gone."""
MOST_EVENTS = 100_000


class Killed(BaseException):
    """kill -9 of the coordinator."""


@dataclass(frozen=True)
class Odds:
    """How likely what is. die, stop, slow: per task; repeat, drop, flip (a bit of it): per envelope; cut,
    mute:
    per envelope, of its connection. crash: how many times the coordinator is killed. elsewhere: workers on
    other machines. strike: at the n-th envelope of a start its sender dies, or (cuts) its connection ends."""

    workers: int = 2
    remote: bool = False
    die: float = 0.0
    stop: float = 0.0
    slow: float = 0.0
    repeat: float = 0.0
    drop: float = 0.0
    flip: float = 0.0
    cut: float = 0.0
    mute: float = 0.0
    crash: int = 0
    inject: int = 0
    cuts: bool = False

    @staticmethod
    def drawn(rng: random.Random) -> Odds:
        def some(p: float) -> float:
            return rng.choice((0.0, 0.0, p / 3, p))

        remote = rng.random() < 0.5
        return Odds(
            workers=rng.randint(1, 3),
            remote=remote,
            die=some(0.15),
            stop=some(0.1),
            slow=some(0.1),
            repeat=some(0.3),
            drop=some(0.03),
            flip=some(0.02),
            cut=some(0.05) if remote else 0.0,
            mute=some(0.1) if remote else 0.0,
            crash=rng.choice((0, 0, 1, 2)),
        )

    def calm(self) -> Odds:
        """Nothing goes wrong any more."""
        return Odds(self.workers, self.remote)


class Link:
    """A worker's connection: envelopes of a direction arrive in order, when it is not muted."""

    def __init__(self, worker: int) -> None:
        self.worker, self.open = worker, True
        self.dismissed = False
        self.free = {"up": 0.0, "down": 0.0}
        """When the next envelope of a direction may arrive."""


class World(Endpoint):
    """The coordinator's endpoint and worker pool."""

    def __init__(
        self,
        ledger: Ledger,
        odds: Odds,
        rng: random.Random,
        answers: Answers,
        states: ClientStates,
        person: Callable[[World, int], Person],
    ) -> None:
        super().__init__(ledger)
        self.odds, self.rng, self.answers, self.states = odds, rng, answers, states
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._incoming: list[Incoming] = []
        self._sent = 0
        self._exits: list[ProcessExit] = []
        self._fold_is_done = False
        self.bound: dict[int, Link] = {}
        self.happened: list[str] = []
        """Faults as they struck."""
        self._person = person
        self.participants = [person(self, w) for w in range(odds.workers)]
        for _ in range(odds.crash):
            self.at(rng.uniform(0.0, 40.0), self._kill_coordinator)

    def watch(self, coordinator: Coordinator) -> None:
        """Let the fold, which is a real thread, take a while of virtual time."""
        close = coordinator.aggregation.close

        def closed() -> None:
            close()
            self.at(self.rng.uniform(0.0, 0.5), self._fold)

        coordinator.aggregation.close = closed  # type: ignore[method-assign]

    # ---- time

    def clock(self) -> float:
        return self.now

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """So many seconds from now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def wait(self, fds: list[int], timeout: float) -> tuple[list[Incoming], list[int]]:
        assert 0 <= timeout < math.inf, "a wait without a deadline"
        until = self.now + timeout
        while True:
            if self._incoming or self._exits or self._fold_is_done or self.lost or self.unreadable:
                return self._take(fds)
            if not self._events or self._events[0][0] > until:
                self.now = until
                return [], []
            assert next(self._order) < MOST_EVENTS, "it goes on for ever"
            self.now, _, action = heapq.heappop(self._events)
            action()

    def _take(self, fds: list[int]) -> tuple[list[Incoming], list[int]]:
        incoming, self._incoming = self._incoming, []
        ready = [DEATHS] if self._exits else []
        if self._fold_is_done:
            self._fold_is_done = False
            assert select.select(fds[:1], [], [], 30.0)[0], "the fold hangs"
            ready.append(fds[0])
        return incoming, ready

    def _fold(self) -> None:
        self._fold_is_done = True

    def _kill_coordinator(self) -> None:
        self.happened.append("coordinator killed")
        raise Killed

    def draw(self, chance: float, what: str) -> bool:
        """Whether a fault occurs."""
        if self.rng.random() >= chance:
            return False
        self.happened.append(what)
        return True

    # ---- the network

    def send(self, worker: int, envelope: Envelope, second: bool = False) -> None:
        self._book(envelope, worker, "down", second)
        link = self.bound.get(worker)
        if link is None or not link.open:
            raise TaskError(f"cannot send to worker {worker}: it has no connection")
        self.carry(link, "down", envelope)

    def carry(self, link: Link, direction: str, envelope: Envelope) -> None:
        """Put an envelope on its way: it arrives, or not, or twice; and its connection may suffer."""
        self._sent += 1
        if self._sent == self.odds.inject:
            self._inject(link, direction)
            return
        kind = envelope.header.kind
        arrival = max(link.free[direction], self.now + self.rng.expovariate(20.0))
        if self.draw(self.odds.mute, f"muted {direction}"):
            arrival = max(arrival, self.now + self.rng.choice((2.0, 30.0)))
        link.free[direction] = arrival
        if not self.draw(self.odds.drop, f"dropped {kind}"):
            self.at(arrival - self.now, lambda: self._arrive(link, direction, envelope))
        if self.draw(self.odds.repeat, f"repeated {kind}"):
            later = arrival - self.now + self.rng.expovariate(0.2)
            self.at(later, lambda: self._arrive(link, direction, envelope))
        if self.draw(self.odds.cut, "cut"):
            self.cut(link, self.rng.choice((0.05, KEEPALIVE)))

    def _inject(self, link: Link, direction: str) -> None:
        if self.odds.cuts:
            self.happened.append(f"cut instead of sending {direction}")
            self.cut(link, 0.05)
        elif direction == "down":
            self._kill_coordinator()
        else:
            self.happened.append("died instead of sending")
            self.participants[link.worker].die()

    def _arrive(self, link: Link, direction: str, envelope: Envelope) -> None:
        if not link.open:
            return
        if self.draw(self.odds.flip, f"flipped {direction}"):
            self._spoil(link, direction)
        elif direction == "down":
            self.participants[link.worker].take(link, envelope)
        elif self.bound.get(link.worker) is link:
            if envelope.header.kind != "hello":
                self._come_in(link, envelope)
        elif envelope.header.kind == "hello" and not link.dismissed:
            self._register(link, envelope)
        elif self.odds.remote:
            self.tell(link, "rejoin")

    def tell(self, link: Link, what: str) -> None:
        """Let the worker know by its socket, or in few words, what has become of a connection."""
        self.participants[link.worker].message(link, what)

    def end(self, link: Link) -> None:
        """The worker closes it. On one machine the coordinator does not learn of that."""
        if link.open:
            link.open = False
            if self.odds.remote:
                self.at(0.05, lambda: self._note_end(link))

    def _spoil(self, link: Link, direction: str) -> None:
        """A bit is flipped on the way. CURVE ends the connection; without it the other side finds out."""
        if self.odds.remote:
            self.cut(link, 0.05)
        elif direction == "down":
            self.participants[link.worker].die()
        elif self.bound.get(link.worker) is link:
            self.unreadable[link.worker] = "the checksum is wrong"

    def _register(self, link: Link, envelope: Envelope) -> None:
        if link.worker in self.bound:
            self.tell(link, "refused")
            return
        self.bound[link.worker] = link
        self.ledger.book_handshake(link.worker)
        self._come_in(link, envelope)

    def _come_in(self, link: Link, envelope: Envelope) -> None:
        self._book(envelope, link.worker, "up")
        hello = read_hello(envelope) if envelope.header.kind == "hello" else None
        self._incoming.append(Incoming(link.worker, envelope, hello))

    def cut(self, link: Link, noticed: float) -> None:
        """End a connection, with what is on its way; the coordinator learns of it after a while."""
        link.open = False
        self.at(self.rng.uniform(0.0, 2.0), lambda: self.tell(link, "cut"))
        self.at(noticed, lambda: self._note_end(link))

    def _note_end(self, link: Link) -> None:
        if self.bound.get(link.worker) is link:
            del self.bound[link.worker]
            self.lost.append(link.worker)

    def dismiss(self, worker: int) -> None:
        link = self.bound.pop(worker, None)
        if link is not None:
            link.dismissed = True

    # ---- processes

    def fds(self) -> list[int]:
        return [DEATHS]

    def check(self, ready: list[int]) -> ProcessExit | None:
        if DEATHS not in ready:
            return None
        process_exit = self._exits.pop(0)
        return process_exit if self.participants[process_exit.worker].dead else None

    def died(self, worker: int) -> None:
        """A process has ended. One elsewhere is known by its connection; its people start another."""
        if not self.odds.remote:
            self.at(0.001, lambda: self._exits.append(ProcessExit(worker, "died", "")))
            return
        link = self.participants[worker].link
        if link is not None:
            self.end(link)
        self.at(self.rng.uniform(1.0, 10.0), lambda: self._replace(worker))

    def replace(self, worker: int, address: str) -> None:
        assert not self.odds.remote
        self._replace(worker)

    def kill(self, worker: int) -> None:
        assert not self.odds.remote
        self.participants[worker].die()

    def _replace(self, worker: int) -> None:
        assert self.participants[worker].dead, "two processes for one worker"
        self.participants[worker] = self._person(self, worker)
