"""The worker processes of the simulated world. What they compute is real (tests.simulation.answers)."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

from fedsim.errors import DiskError
from fedsim.wire.envelope import Envelope, Header
from tests.simulation.world import Link, World
from workers import protocol_messages as messages
from workers.transport.handshake import Hello, hello
from workers.worker.heartbeat import SECONDS

IDLE_SECONDS = 5.0
SLOW = 35.0
"""Seconds of a slow task: several leases."""


class Person:
    """One process, from its start to its end."""

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index = world, index
        self.link: Link | None = None
        self.dead = False
        self.stopped_until = 0.0
        self._envelopes: deque[Envelope] = deque()
        self._at: Envelope | None = None
        self._model: tuple[int, ...] = ()
        """Which model it was sent to score."""
        self._states: dict[tuple[int, int], bytes] = {}
        """Elsewhere: by client and version."""
        self.after(world.rng.uniform(0.3, 3.0), Person.join)

    def after(self, seconds: float, action: Callable[[Person], None]) -> None:
        """Unless it is dead by then; a stopped process does it when it goes on."""

        def act() -> None:
            if self.dead:
                return
            if self.world.now < self.stopped_until:
                self.after(self.stopped_until - self.world.now, action)
            else:
                action(self)

        self.world.at(seconds, act)

    def die(self) -> None:
        if not self.dead:
            self.dead = True
            self.world.died(self.index)

    # ---- coming

    def join(self) -> None:
        self.link, self._at = Link(self.index), None
        self._envelopes.clear()
        self._send(self.link, hello(Hello("", self.index, os.getpid())))

    def message(self, link: Link, what: str) -> None:
        """By its socket, or in few words: its connection was cut, it was refused, it was given up."""
        second = {"cut": 0.1, "refused": 0.5, "rejoin": 0.1}[what]
        if not self.dead and link is self.link:
            self.link = None
            link.open = False
            self.after(second, Person.join)

    def take(self, link: Link, envelope: Envelope) -> None:
        if link is self.link:
            self.after(0.0, lambda _: self._read(link, envelope))

    def _read(self, link: Link, envelope: Envelope) -> None:
        if link is not self.link:
            return
        kind, h = envelope.header.kind, envelope.header
        if kind == "welcome":
            self.after(self.world.rng.uniform(0.1, 2.0), lambda _: self._ready(link))
        elif kind == "stop":
            self.dead = True
        elif kind == "refused":
            self.message(link, "refused")
        elif kind == "state":
            self._states[h.client, h.base] = bytes(envelope.frames[0])
        elif kind in ("task", "gone", "evaluate"):
            self._envelopes.append(envelope)
            self._work(link)
        elif kind != "heartbeat":  # the answer to its own
            raise AssertionError(f"a worker got an envelope of kind {kind!r}")

    def _ready(self, link: Link) -> None:
        self._send(link, messages.ready("run", messages.WorkerManifest("", {})))
        if self.world.odds.remote:
            self.after(IDLE_SECONDS, lambda _: self._idle(link))

    def _idle(self, link: Link) -> None:
        if link is self.link:
            if self._at is None:
                self._send(link, messages.idle("run"))
            self.after(IDLE_SECONDS, lambda _: self._idle(link))

    # ---- work

    def _work(self, link: Link) -> None:
        if self._at is not None or not self._envelopes or link is not self.link:
            return
        world, self._at = self.world, self._envelopes.popleft()
        envelope, seconds = self._at, world.rng.uniform(0.05, 2.0)
        if world.draw(world.odds.slow, "slow"):
            seconds = SLOW
        if world.draw(world.odds.stop, "stopped"):
            self.stopped_until = world.now + world.rng.choice((3.0, 60.0, 1e6))
        moment = (
            world.rng.choice(("before", "torn", "written", "sent"))
            if world.draw(world.odds.die, "died")
            else ""
        )
        if envelope.header.kind != "gone":
            self.after(SECONDS, lambda _: self._heartbeat(link, envelope))
        self.after(seconds, lambda _: self._finish(link, envelope, moment))

    def _heartbeat(self, link: Link, envelope: Envelope) -> None:
        if self._at is envelope and link is self.link:
            self._send(link, messages.heartbeat(envelope.header))
            self.after(SECONDS, lambda _: self._heartbeat(link, envelope))

    def _finish(self, link: Link, envelope: Envelope, dies: str) -> None:
        """dies: at which moment, '' if it does not."""
        if self._at is not envelope:
            return
        if dies == "before":
            self.die()
            return
        for reply in self._answer(envelope, torn=dies == "torn"):
            if dies not in ("torn", "written"):
                self._send(link, reply)
        if dies:
            self.die()
            return
        self._at = None
        self._work(link)

    def _answer(self, envelope: Envelope, torn: bool) -> list[Envelope]:
        h, answers = envelope.header, self.world.answers
        if h.kind == "gone":
            return [messages.absent(h)]
        if h.kind == "evaluate":
            self._model = answers.model(envelope) or self._model
            return [answers.score(envelope, self._model)]
        if h.base and not self._has_base(h):
            return [messages.failed("run", DiskError(f"the state of client {h.client} is not there"), h)]
        state, reply = answers.upload(envelope)
        created = answers.problem.messages.version(h.round, h.exchange)
        if self.world.odds.remote:
            self._states = {
                key: s for key, s in self._states.items() if key[0] != h.client or key[1] >= h.base
            }
            self._states[h.client, created] = state
            return [messages.draft(h, state), reply]
        if torn:
            path = self.world.states.path(h.client, created)
            path.parent.mkdir(exist_ok=True)
            (path.parent / f".{path.name}.1").write_bytes(state[: len(state) // 2])
        else:
            self.world.states.put(h.client, created, state)
        return [reply]

    def _has_base(self, h: Header) -> bool:
        """The state that a task starts from; not of one that comes again, long after."""
        if self.world.odds.remote:
            return (h.client, h.base) in self._states
        return self.world.states.path(h.client, h.base).exists()

    # ---- envelopes

    def _send(self, link: Link, envelope: Envelope) -> None:
        if link.open:
            self.world.carry(link, "up", envelope)
