"""The times at which every task was sent and answered, for a timeline of the workers."""

from __future__ import annotations

import time
from math import floor
from typing import NamedTuple


class Span(NamedTuple):
    """One row of timeline.csv.

    what: task, gone (dropout), or evaluate, where exchange is the chunk and client is -1. given, arrived:
    seconds since the run's first broadcast. computing: the seconds of the worker, -1 if unknown.
    """

    round: int
    exchange: int
    client: int
    worker: int
    what: str
    given: float
    arrived: float
    computing: float


COLUMNS = Span._fields


class Timeline:
    """The spans of a run; take() removes and returns those that have ended."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Reset the clock to 0, and forget all spans."""
        self._began = time.monotonic()
        self._open: dict[tuple[int, int, int, int], tuple[str, float]] = {}
        self._done: list[Span] = []

    def gave(self, worker: int, round: int, exchange: int, client: int, what: str) -> None:
        self._open[worker, round, exchange, client] = what, self._now()

    def arrived(self, worker: int, round: int, exchange: int, client: int, micros: int = 0) -> None:
        what, given = self._open.pop((worker, round, exchange, client), ("", 0.0))
        if what:
            spent = micros / 1e6 if micros else -1.0
            self._done.append(Span(round, exchange, client, worker, what, given, self._now(), spent))

    def left(self, worker: int) -> None:
        """Forget the open spans of a worker that has left."""
        self._open = {key: value for key, value in self._open.items() if key[0] != worker}

    def take(self) -> list[Span]:
        taken, self._done = self._done, []
        return taken

    def _now(self) -> float:
        return floor(1e6 * (time.monotonic() - self._began)) / 1e6
