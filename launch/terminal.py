"""What is printed, and where: standard output that may close, a line that the next one replaces, numbers.

It imports nothing heavy, because a run says that it is starting before it imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

CLEAR = "\r\x1b[2K"
"""Go to the beginning of the line, and empty it."""


class OutputThatMayClose:
    """Standard output that falls silent when it cannot be written: closed, a broken pipe, a full disk.

    A run is worth more than its progress lines: `fedsim launch | head -1` goes on to its end.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or do nothing; returns the number of characters."""
        try:
            if self._stream is not None:
                self._stream.write(text)
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._stream = None
        return len(text)

    def flush(self) -> None:
        """Flush, or do nothing."""
        try:
            if self._stream is not None:
                self._stream.flush()
        except (OSError, ValueError):
            self._stream = None

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        with suppress(ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def output_that_may_close() -> Iterator[None]:
    """Let sys.stdout fall silent, while the block lasts, instead of raising."""
    before = sys.stdout
    sys.stdout = OutputThatMayClose(before)
    try:
        yield
    finally:
        sys.stdout = before


def finish_output() -> OSError | None:
    """Flush standard output before the program ends, and return the error if that is not possible.

    What could not be written is given up: Python would try again at exit, and report it in its own words.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError) as e:
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        return e if isinstance(e, OSError) else None
    return None


def open_standard_files() -> None:
    """Open /dev/null in the place of closed standard files, or the next file to be opened would take it."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


class Status:
    """A line on a terminal that the next one replaces; nothing elsewhere."""

    def __init__(self, quiet: bool = False) -> None:
        self._shown = not quiet and _is_terminal()

    def __call__(self, text: str) -> None:
        """Show the text; '' shows nothing."""
        if self._shown:
            sys.stdout.write(CLEAR + text)
            sys.stdout.flush()


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def console(**options: Any) -> Console:
    """A console of rich; where NO_COLOR is set, it has no styles at all."""
    from rich.console import Console

    plain = {"color_system": None} if os.environ.get("NO_COLOR") else {}
    return Console(**{"highlight": False, "emoji": False, **plain, **options})


def counted(n: int, noun: str) -> str:
    """A number and its noun: 1 worker, 1,000 workers."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def megabytes(n: float) -> str:
    """Bytes for people: 640 B, 21.4 kB, 1.21 MB, 2.50 GB."""
    for unit, size, digits in (("GB", 1e9, 2), ("MB", 1e6, 2), ("kB", 1e3, 1)):
        if n >= size / 10 and n >= 1000:
            return f"{n / size:,.{digits}f} {unit}"
    return f"{n:.0f} B"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 0:12, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
