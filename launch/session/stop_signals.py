"""Handling of Ctrl-C and SIGTERM while a run starts and runs."""

from __future__ import annotations

import os
import signal
import threading
from types import TracebackType
from typing import Any

from fedsim.errors import Interrupted
from workers.transport.eventfd import Wakeup


class StopRequested(BaseException):
    """A signal arrived before the coordinator ran.

    This is not an Exception, which an imported library may catch, and not a KeyboardInterrupt: after one has
    passed through certain C code, Python ends the process by SIGINT, even if the exception was caught.
    """


class StopSignals:
    """Handlers by which the first SIGINT or SIGTERM stops the run, and a second one ends the process at once.

    While `starting`, the coordinator does not run and nothing polls the wakeup, so the first signal raises
    StopRequested. Later, the first signal wakes the main loop. If tasks run in this process, the main loop
    may be inside a task, so the signal also raises Interrupted. Ending the process at once is safe, because
    the kernel ends the fork server and the workers with it.
    """

    def __init__(self, wakeup: Wakeup, in_process: bool, embedded: bool = False) -> None:
        """Prepare the handlers for the with block. `in_process` is True if tasks run in this process.

        `embedded` is True in a user's program. SIGTERM is then not handled, a second SIGINT raises
        KeyboardInterrupt, and outside the main thread, where Python allows no handlers, none is installed.
        """
        self.starting = True
        self._wakeup, self._in_process, self._embedded = wakeup, in_process, embedded
        self._seen = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if self._embedded and threading.current_thread() is not threading.main_thread():
            return self
        numbers = (signal.SIGINT,) if self._embedded else (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._before.items():
            signal.signal(number, previous)

    def started(self) -> None:
        """Record that the coordinator polls the wakeup from now on."""
        self.starting = False

    def _handle(self, number: int, frame: Any) -> None:
        self._seen += 1
        if self._seen > 1 and self._embedded:
            raise KeyboardInterrupt
        if self._seen > 1:
            os._exit(130)
        self._wakeup.set()
        if self.starting:
            raise StopRequested
        if self._in_process:
            raise Interrupted("interrupted")
