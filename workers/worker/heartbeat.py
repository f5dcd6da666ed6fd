"""Heartbeats from inside the computation.

A process that answers ZeroMQ's heartbeats may hang in its own loop (its I/O thread answers), so a worker
speaks where it computes: before a forward pass of the network, at most once a second. One that is slow keeps
speaking; one that hangs, or is stopped, does not, and its lease runs out.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fedsim.wire.envelope import NONE, VERSION, Header, pack
from workers.transport.dealer import Connection

SECONDS = 1.0


class Heartbeat:
    """A forward hook: call it as often as you like."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._description: Header | None = None
        self._due = 0.0

    def begin(self, of: Header) -> None:
        """A task has begun, or a chunk to evaluate."""
        self._description, self._due = of, time.monotonic() + SECONDS

    def end(self) -> None:
        self._description = None

    def __call__(self, *_: object) -> None:
        if self._description is None or time.monotonic() < self._due:
            return
        h = self._description
        self._due = time.monotonic() + SECONDS
        self._connection.offer(
            pack(Header(VERSION, "heartbeat", h.run, h.epoch, h.round, h.exchange, h.client, NONE))
        )


class Leases:
    """When each worker that holds work was last heard of, as the coordinator knows it."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._heard: dict[int, float] = {}

    def heard(self, worker: int) -> None:
        self._heard[worker] = self._clock()

    def forget(self, worker: int) -> None:
        self._heard.pop(worker, None)

    def left(self, working: list[int]) -> float:
        """Seconds until the first of these runs out; never less than 0."""
        now = self._clock()
        ends = [self._heard.setdefault(worker, now) + self.seconds for worker in working]
        return max(0.0, min(ends, default=now + self.seconds) - now)

    def over(self, working: list[int]) -> list[int]:
        """Those that were silent for too long."""
        now = self._clock()
        return [w for w in working if self._heard.setdefault(w, now) + self.seconds <= now]
