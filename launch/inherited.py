"""What a process inherits from the one that started it and what would stop a run: its working folder, which
may be gone, and an ignored SIGCHLD."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fedsim.errors import UsageError


def check_working_folder() -> None:
    """Check that the working folder exists.

    Raises:
        UsageError: if it has been removed.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working folder has been removed; change to one that exists (cd)") from None


@contextmanager
def children_kept() -> Iterator[None]:
    """Handle SIGCHLD as by default in a block, so that the exit codes of child processes are not lost.

    A window manager or a supervisor may ignore the signal, and programs that it starts inherit that. Outside
    the main thread, where Python allows no change, ForkServer does without an exit code.
    """
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
