"""What a table or plot may show of a run: numbers read from its metrics.jsonl.

    METRIC@ROUND            mean over the `window` evaluated rounds that end at ROUND (a number, or end)
    max METRIC@ROUND        the maximum of them;  best METRIC@ROUND: of all rounds up to ROUND
    MB@ROUND                megabytes of the algorithm up to ROUND;  MB up@ROUND, MB down@ROUND
    simulated@ROUND         seconds of the virtual clock up to ROUND
    rounds to VALUE         the first evaluated round with a test_accuracy of at least VALUE
    MB to VALUE             megabytes until then

METRIC is a key of metrics.jsonl.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.errors import UsageError
from launch.runs.reader import Run, every_round

_AT = re.compile(r"(?:(max|best) )?([a-zA-Z_]\w*(?: up| down)?)@(end|\d+)")
_TO = re.compile(r"(rounds|MB) to (0?\.\d+|1\.0)")
_SUMS = {
    "MB": ("bytes_down", "bytes_up"),
    "MB up": ("bytes_up",),
    "MB down": ("bytes_down",),
    "simulated": ("simulated_seconds",),
}
"""What is summed up over the rounds so far."""


@dataclass(frozen=True)
class Curve:
    """A run's metrics.jsonl: one mapping per evaluated round, ascending."""

    lines: tuple[dict[str, Any], ...]

    @staticmethod
    def read(folder: Path) -> Curve:
        """Of a run folder.

        Raises:
            UsageError: if an argument is wrong.
            DataError: if data is missing or damaged.
        """
        return Curve(Run(folder).lines)

    def rounds(self) -> list[int]:
        return [line["round"] for line in self.lines]

    def has(self, name: str) -> bool:
        """Whether there is a number of this name in any line; sums of seconds need every round's."""
        if name != "simulated":
            return name in _SUMS or any(line.get(name) is not None for line in self.lines)
        timed = all("simulated_seconds" in line for line in self.lines if line["round"])
        return timed and every_round(self.rounds())

    def metric(self, name: str) -> list[float]:
        """One value per evaluated round; sums are so far. null is NaN.

        Raises:
            UsageError: if an argument is wrong.
        """
        if name in _SUMS:
            scale, total, out = 1e-6 if name.startswith("MB") else 1.0, 0.0, []
            for line in self.lines:
                total += sum(line.get(key) or 0 for key in _SUMS[name])
                out.append(total * scale)
            return out
        values = [line.get(name) for line in self.lines]
        if all(v is None for v in values) and not any(name in line for line in self.lines):
            known = sorted({key for line in self.lines for key in line})
            raise UsageError(f"no metric {name!r} in this run (it has {', '.join(known)})")
        return [math.nan if v is None else float(v) for v in values]


def value(expression: str, curve: Curve, window: int = 1) -> float:
    """The number of a column for one run; NaN: not reached, diverged.

    Raises:
        UsageError: for an expression that is none.
    """
    if result := _TO.fullmatch(expression):
        at = reached(curve, float(result[2]))
        if at is None:
            return math.nan
        return float(curve.rounds()[at]) if result[1] == "rounds" else curve.metric("MB")[at]
    if not (result := _AT.fullmatch(expression)):
        raise UsageError(
            f"column {expression!r}: write METRIC@ROUND, max METRIC@ROUND, rounds to VALUE, MB@end"
        )
    how, name = result[1], result[2]
    end = curve.rounds()[-1] if result[3] == "end" else int(result[3])
    known = [i for i, round in enumerate(curve.rounds()) if round <= end]
    if not known or curve.rounds()[known[-1]] != end:
        raise UsageError(f"column {expression!r}: round {end} was not evaluated")
    values = curve.metric(name)
    if name in _SUMS:
        return values[known[-1]]
    selected = [values[i] for i in (known if how == "best" else known[-window:]) if curve.rounds()[i] > 0]
    return max(selected) if how else sum(selected) / len(selected)


def reached(curve: Curve, accuracy: float) -> int | None:
    """The place of the first evaluated round, after the start, with at least this test_accuracy."""
    for at, result in enumerate(curve.metric("test_accuracy")):
        if result >= accuracy and curve.rounds()[at] > 0:
            return at
    return None


def shown(expression: str, values: Sequence[float]) -> str:
    """Mean ± population standard deviation over seeds, in the unit people read: accuracies in %."""
    if any(math.isnan(v) for v in values):
        return "-" if " to " in expression else f"diverged ({sum(math.isnan(v) for v in values)})"
    scale, digits = _scale(expression)
    scaled = [scale * v for v in values]
    mean = sum(scaled) / len(scaled)
    sd = math.sqrt(sum((v - mean) ** 2 for v in scaled) / len(scaled))
    exact = expression.startswith("MB@") and sd < 0.05  # traffic that does not depend on the seed
    return f"{mean:,.{digits}f}" + (f"±{sd:.{digits}f}" if len(values) > 1 and not exact else "")


def heading(expression: str) -> str:
    return expression.replace("test_", "").replace("_", " ").replace("nll", "NLL")


def percent(expression: str) -> bool:
    """Whether people read it in %."""
    return any(word in expression for word in ("accuracy", "recall", "precision", "_f1"))


def _scale(expression: str) -> tuple[float, int]:
    if expression.startswith("rounds"):
        return 1.0, 0
    if expression.startswith("MB"):
        return 1.0, 1
    return (100.0, 1) if percent(expression) else (1.0, 2)
