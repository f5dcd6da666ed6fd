"""The progress of a run on a terminal, or as plain lines. Imports no torch: `fedsim watch` relies on it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from rich.live import Live

from launch import terminal
from launch.progress_line import ProgressLine, fitted, progress_parts

KEPT_LINES = 10
"""So many rounds, about, stay on a terminal; metrics.jsonl has all."""


class ProgressDisplay:
    """Progress on a terminal, one plain line per evaluated round elsewhere."""

    def __init__(self, rounds: int, quiet: bool = False) -> None:
        self.console = terminal.console(quiet=quiet)
        self.status = terminal.Status(quiet)
        """What happens before the header is shown."""
        self._line = ProgressLine(rounds)
        live = self.console.is_terminal and not self.console.is_dumb_terminal and not quiet
        self._live = (
            Live(self._line, console=self.console, transient=True, auto_refresh=False) if live else None
        )

    def header(self, lines: list[str]) -> None:
        """Print the header; the progress line begins below it."""
        for line in lines:
            self.note(line)
        if self._live:
            self._live.start(refresh=True)

    def committed(self, round: int, now: float | None = None) -> None:
        """Show how many rounds are committed; now: when the last was, in seconds of any one clock."""
        self._line.committed(round, time.monotonic() if now is None else now)
        if self._live:
            self._live.refresh()

    def evaluated(self, metrics: Mapping[str, Any], bytes_so_far: int | None) -> None:
        """Show a round's scores, and bytes if known; on a terminal, about ten of these lines stay."""
        parts, r = progress_parts(metrics, bytes_so_far), metrics["round"]
        label = f"round {r:>{len(str(self._line.rounds))}}/{self._line.rounds}"
        if self._live:
            self._line.parts = parts
            if r % math.ceil(self._line.rounds / KEPT_LINES) == 0 or r == self._line.rounds:
                self._live.console.print(fitted(label, parts, self.console.width), markup=False)
            self._live.refresh()
        elif not self.console.quiet:
            print("  ".join([label, *(part.text for part in parts)]), flush=True)  # rich takes some 0.1 ms

    def note(self, text: str) -> None:
        """Print a line."""
        self.status("")
        self.console.print(text, soft_wrap=True)

    def stop(self) -> None:
        """Remove the progress line."""
        if self._live:
            self._live.stop()
            self._live = None
