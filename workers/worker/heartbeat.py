"""Heartbeats from inside the computation.

A process that answers ZeroMQ's heartbeats may hang in its own loop, because ZeroMQ's I/O thread answers. So a
worker sends heartbeats where it computes: before a forward pass of the network, at most once a second. A
slow worker keeps sending them; one that hangs or is stopped does not, and its lease ends.

While a process sets itself up it computes nothing that calls it back, so a thread sends them. They say that
the process is not stopped; a set-up that does not end is limited by --join-within.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fedsim.errors import FedsimError
from fedsim.wire.envelope import Header
from workers.protocol_messages import heartbeat, idle
from workers.transport.dealer import Connection

SECONDS = 1.0
"""Between two heartbeats."""


@contextmanager
def while_it_starts(connection: Connection, run: str) -> Iterator[None]:
    """Send heartbeats about no task while the block lasts, in which nothing else uses the connection."""
    over = threading.Event()

    def beat() -> None:
        with suppress(FedsimError):  # whoever uses the connection next finds out
            while not over.wait(SECONDS):
                connection.offer(idle(run))

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Heartbeat:
    """A hook for forward passes; calling it often costs little."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._current: list[Header] = []
        """The running computations, in the order of their starts."""
        self._due = 0.0

    def begin(self, of: Header) -> None:
        """Note that a task, or the evaluation of a chunk, has begun."""
        if not self._current:
            self._due = time.monotonic() + SECONDS
        self._current.append(of)

    def end(self, of: Header) -> None:
        """Note that it has ended."""
        self._current.remove(of)

    def __call__(self, *_: object) -> None:
        """Send a heartbeat if one is due."""
        if not self._current or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + SECONDS
        self._connection.check()
        self._connection.offer(heartbeat(self._current[0]))
