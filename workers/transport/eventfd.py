"""A descriptor that another thread or a signal handler sets to wake the main loop."""

from __future__ import annotations

import os


class Wakeup:
    """An eventfd; `fd` is readable from set() until clear()."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> bool:
        """Clear the descriptor; return True if it was set."""
        try:
            return os.eventfd_read(self.fd) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self.fd)
