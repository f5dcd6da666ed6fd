"""The coordinator's use of the virtual clock: who is late in an exchange, and how long it lasts."""

from __future__ import annotations

import math

from fedsim.round_machine import TaskId
from fedsim.virtual_clock import Clock


class ExchangeClock:
    """One exchange at a time. Without a clock nobody is late and nothing lasts."""

    def __init__(self, clock: Clock | None, sizes: tuple[int, ...]) -> None:
        self._clock, self._sizes = clock, sizes
        self._down: dict[int, int] = {}
        """Stream bytes of the broadcast, by client."""
        self._answers: dict[int, float] = {}
        """Seconds until the upload was there, by client."""

    def gave(self, client: int, stream_bytes: int) -> None:
        self._down[client] = stream_bytes

    def late(self, task: TaskId, stream_bytes: int) -> bool:
        """Whether an upload of so many bytes comes after the deadline."""
        if self._clock is None:
            return False
        k = task.client
        seconds = self._clock.seconds(task.round, k, self._sizes[k], self._down[k], stream_bytes)
        self._answers[k] = seconds
        return seconds > self._clock.deadline

    def close(self) -> float | None:
        """The exchange's seconds: until the slowest upload, or until the deadline if somebody missed it or
        sent nothing. None without a clock."""
        if self._clock is None:
            return None
        slowest, limit = max(self._answers.values(), default=0.0), self._clock.deadline
        silent = len(self._answers) < len(self._down) and limit < math.inf
        self._down, self._answers = {}, {}
        return limit if silent else min(slowest, limit)
