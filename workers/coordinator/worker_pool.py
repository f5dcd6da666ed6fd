"""The coordinator's interface to worker processes. This module imports no large library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fedsim.errors import Interrupted
from workers.transport.eventfd import Wakeup


@dataclass(frozen=True)
class ProcessExit:
    """The end of a worker process. status: its exit code, negative after a signal, None if unknown."""

    worker: int
    how: str
    log_tail: str
    status: int | None = None

    @property
    def killed(self) -> bool:
        """True if a signal has ended the process, or its exit code is unknown."""
        return self.status is None or self.status < 0


class WorkerPool(Protocol):
    """The worker processes of a run, as used by the coordinator."""

    def fds(self) -> list[int]:
        """Descriptors that become readable when a worker ends or a signal asks to stop."""

    def check(self, ready: list[int]) -> ProcessExit | None:
        """Return how a process ended; None if none has.

        Raises:
            Interrupted: If a signal asks the run to stop.
        """

    def replace(self, worker: int, address: str) -> None:
        """Start a process in the place of one that has ended.

        Raises:
            TaskError: If the process cannot be started.
            Interrupted: If a signal asks the run to stop.
        """

    def kill(self, worker: int) -> None:
        """Send SIGKILL to a worker's process; fds() and check() report its end."""


class NoWorkerPool:
    """The worker pool of `--workers 0`. It has no processes, but a signal may still stop the run."""

    def __init__(self, interrupted: Wakeup | None = None) -> None:
        self._interrupted = interrupted

    def fds(self) -> list[int]:
        return [self._interrupted.fd] if self._interrupted else []

    def check(self, ready: list[int]) -> ProcessExit | None:
        if self._interrupted and self._interrupted.fd in ready:
            raise Interrupted("interrupted")
        return None

    def replace(self, worker: int, address: str) -> None:
        """Do nothing: there are no processes."""

    def kill(self, worker: int) -> None:
        """Do nothing: there are no processes."""
