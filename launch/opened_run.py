"""What fedsim.run and fedsim.open return: a run folder with the questions that notebooks ask."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fedsim.errors import UsageError
from launch.runs import reader


class OpenedRun(reader.Run):
    """A run folder; fedsim.python_api.Run documents what it answers."""

    def bytes_to(self, *, accuracy: float, direction: Literal["down", "up"] | None = None) -> int | None:
        """The algorithm's bytes until the first evaluated round with at least this test accuracy.

        Raises:
            UsageError: for an unknown direction, or if the run has no test accuracy.
        """
        if direction not in (None, "down", "up"):
            raise UsageError(f"bytes_to: the direction is 'down', 'up' or None for both, not {direction!r}")
        sides = ("down", "up") if direction is None else (direction,)
        lines = [line for line in self.lines if line["round"] > 0]
        if lines and all(line.get("test_accuracy") is None for line in lines):
            raise UsageError(f"{self.path} has no test accuracy: its targets are no classes")
        spent = sum(int(line[f"bytes_{side}"]) for line in self.lines if line["round"] <= 0 for side in sides)
        for line in lines:
            spent += sum(int(line[f"bytes_{side}"]) for side in sides)
            reached = line.get("test_accuracy")
            if reached is not None and reached >= accuracy:
                return spent
        return None

    def report(self, path: str | Path | None = None) -> Path:
        """Write the run's page, RUN/report.html if `path` does not say otherwise; returns its path.

        Raises:
            UsageError: if the folder is no run.
            DataError: if data is missing or damaged.
            DiskError: if the page cannot be written.
        """
        from launch.results.run_page import report

        return report(self.path, None if path is None else Path(path))

    def _repr_html_(self) -> str:
        """One line for a notebook's output cell."""
        from html import escape

        return f"<code>{escape(str(self.path))}</code>: {escape(self.label)}, {escape(self.status)}"
