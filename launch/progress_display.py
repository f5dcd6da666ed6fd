"""The progress of a run, on a terminal or as plain lines. `fedsim watch` uses it without importing torch."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launch import terminal
from launch.numbers import duration, percentage, size

KEPT_LINES = 10
"""Approximate number of rounds whose lines stay on a terminal; metrics.jsonl has all rounds."""


class ProgressDisplay:
    """A progress line on a terminal; elsewhere, one plain line per evaluated round."""

    def __init__(self, rounds: int, quiet: bool = False) -> None:
        self.console = terminal.console(quiet=quiet)
        self.status = terminal.Status(quiet)
        """The status line that is shown before the header."""
        self._line = ProgressLine(rounds)
        live = self.console.is_terminal and not self.console.is_dumb_terminal and not quiet
        self._live = (
            Live(self._line, console=self.console, transient=True, auto_refresh=False) if live else None
        )

    def header(self, lines: Sequence[str | Text]) -> None:
        """Print the header; the progress line begins below it."""
        for line in lines:
            self.note(line)
        if self._live:
            self._live.start(refresh=True)

    def committed(self, round: int, now: float | None = None) -> None:
        """Show the number of committed rounds. `now` is the commit's time in seconds, with any zero."""
        self._line.committed(round, time.monotonic() if now is None else now)
        if self._live:
            self._live.refresh()

    def evaluated(self, metrics: Mapping[str, Any], bytes_so_far: int | None) -> None:
        """Show a round's scores, and its bytes if known. About ten of these lines stay on a terminal."""
        parts, r = progress_parts(metrics, bytes_so_far), metrics["round"]
        label = f"round {r:>{len(str(self._line.rounds))}}/{self._line.rounds}"
        if self._live:
            self._line.parts = parts
            if r % math.ceil(self._line.rounds / KEPT_LINES) == 0 or r == self._line.rounds:
                self._live.console.print(fitted(label, parts, self.console.width))
            self._live.refresh()
        elif not self.console.quiet:
            print("  ".join([label, *(part.text for part in parts)]), flush=True)  # rich takes 0.1 ms a line

    def note(self, text: str | Text) -> None:
        self.status("")
        self.console.print(text, soft_wrap=True)

    def stop(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None


GAP = 2
"""Number of spaces between parts."""
LEAST_BAR = 8
"""The minimum width of the bar, which is left out if there is less room."""
NEEDED = 2
"""Parts up to this rank take precedence over the bar."""
RECENT = 10
"""The time left is estimated from the mean duration of this number of recent rounds."""


@dataclass(frozen=True)
class Part:
    """One part of the line. A narrow line leaves out parts of high rank."""

    text: str
    rank: int


@dataclass
class ProgressLine:
    """A rich renderable with the round, the parts of the last evaluated round, the time left, and a bar."""

    rounds: int
    parts: Sequence[Part] = ()
    _done: int = 0
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT + 1))

    def committed(self, round: int, now: float) -> None:
        """Record a committed round. `now` is the commit's time in seconds, with any zero."""
        self._done = round
        self._ends.append(now)

    @property
    def time_left(self) -> float | None:
        """The estimated time left in seconds; None before two rounds are committed, and at the end."""
        left = self.rounds - self._done
        if len(self._ends) < 2 or not left:
            return None
        return left * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        label = f"round {self._done:>{len(str(self.rounds))}}/{self.rounds}"
        seconds = self.time_left
        parts = [*self.parts, *([Part(f"{duration(seconds)} left", 2)] if seconds is not None else [])]
        room = options.max_width - 1 - len(label) - GAP  # a terminal may wrap a full line
        needed = [part for part in parts if part.rank <= NEEDED]
        with_bar = len(_joined("", needed)) <= room - LEAST_BAR - GAP
        text = fitted("", parts, room - (LEAST_BAR + GAP if with_bar else 0))
        bar = room - (len(text) + GAP if text else 0)
        line = Table.grid(padding=(0, GAP, 0, 0))
        cells: list[Any] = [label]
        if with_bar:
            cells.append(ProgressBar(total=max(1, self.rounds), completed=self._done, width=bar))
        line.add_row(*cells, text)
        yield line


def progress_parts(metrics: Mapping[str, Any], bytes_so_far: int | None) -> list[Part]:
    """Return the parts of an evaluated round: scores, bytes of the round and of all rounds so far, seconds.
    `bytes_so_far` counts both directions; it is left out if None."""
    accuracy, nll = metrics["test_accuracy"], metrics["test_nll"]
    parts = [Part(f"accuracy {percentage(accuracy)}", 0)] if accuracy is not None else []
    down, up = metrics["bytes_down"], metrics["bytes_up"]
    parts.append(Part(f"NLL {'nan' if nll is None else f'{nll:.4f}'}", 3))
    if bytes_so_far is not None:
        parts.append(Part(f"{size(bytes_so_far)} so far", 1))
    return [
        *parts,
        Part(f"this round {size(down)} down, {size(up)} up", 5),
        Part(f"{metrics['seconds']:.2f} s", 4),
    ]


def fitted(label: str, parts: Sequence[Part], width: int) -> str:
    """Join the label and the parts that fit, in their order. Parts of the highest rank are left out first."""
    kept = list(parts)
    while kept and len(_joined(label, kept)) > width:
        kept.remove(max(kept, key=lambda part: part.rank))
    return _joined(label, kept)


def _joined(label: str, parts: Sequence[Part]) -> str:
    return (" " * GAP).join([*([label] if label else []), *(part.text for part in parts)])
