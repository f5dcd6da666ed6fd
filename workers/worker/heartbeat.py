"""Heartbeats from inside the computation.

ZeroMQ's own heartbeats do not show that a process makes progress, because its I/O thread answers them even
if the process hangs. A worker therefore sends heartbeats before forward passes of its network, at most once a
second. A slow worker keeps sending them. A worker that hangs or is stopped does not, so its lease ends.

A process that is starting computes no forward passes, so a thread sends its heartbeats. They show only that
the process is not stopped; --join-within limits the duration of the start.
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
"""The least time between two heartbeats."""


@contextmanager
def while_it_starts(connection: Connection, run: str) -> Iterator[None]:
    """Send heartbeats from a thread while the block runs; the block must not use the connection."""
    over = threading.Event()

    def beat() -> None:
        with suppress(FedsimError):  # the next use of the connection raises the error
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
    """A hook that sends heartbeats, and is cheap enough to be called before every forward pass."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._current: list[Header] = []
        """The tasks and evaluations that are running, in the order of their starts."""
        self._due = 0.0

    def begin(self, of: Header) -> None:
        """Record that a task, or the evaluation of a chunk, has begun."""
        if not self._current:
            self._due = time.monotonic() + SECONDS
        self._current.append(of)

    def end(self, of: Header) -> None:
        """Record that the task or evaluation has ended."""
        self._current.remove(of)

    def __call__(self, *_: object) -> None:
        """Send a heartbeat if one is due."""
        if not self._current or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + SECONDS
        self._connection.check()
        self._connection.offer(heartbeat(self._current[0]))
