"""Ends connections that must not be there any more.

libzmq has no means for it: a key that is taken off the list is refused at its next handshake, and the
connection that it has opened before stays. So a small thread looks at the kernel's list of this process's
connections and shuts down what must go, which libzmq takes for the other side's end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from workers.sockets import kernel

SECONDS = 0.05
"""Between two looks. One takes 0.2 ms with ten workers, and never more than a tenth of the time."""


class Bailiff:
    """Of one port. revoked: the workers that must not be here, at this moment."""

    def __init__(self, port: int, revoked: Callable[[], frozenset[int]]) -> None:
        self._port, self._revoked = port, revoked
        self._owners: dict[int, int] = {}
        """Workers by the inode of their connection's socket: descriptors are used again, inodes are not."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bailiff", daemon=True)
        self._thread.start()

    def knows(self, descriptor: int, worker: int) -> None:
        """Whose connection this is, and will be until it ends, also if the worker is dismissed."""
        with suppress(OSError):  # it has ended already
            self._owners[os.fstat(descriptor).st_ino] = worker

    def _watch(self) -> None:
        pause = SECONDS
        while not self._over.wait(pause):
            began = time.monotonic()
            self._look()
            pause = max(SECONDS, 10 * (time.monotonic() - began))

    def _look(self) -> None:
        known, revoked = set(self._owners), self._revoked()
        streams = kernel.streams(self._port)
        for stream in streams:
            if self._owners.get(stream.inode) in revoked:
                kernel.end(stream)
        for inode in known - {stream.inode for stream in streams}:
            del self._owners[inode]

    def close(self) -> None:
        self._over.set()
        self._thread.join()
