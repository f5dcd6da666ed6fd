"""Columns of tables: what a number of a run is, how it is read from a run, and how it is written.

A column is an expression of a run's metrics.jsonl:

    METRIC@ROUND            mean over the `window` evaluated rounds that end at ROUND (a number, or end)
    max METRIC@ROUND        the maximum over these rounds
    best METRIC@ROUND       the best of all rounds up to ROUND: the maximum; the minimum of metrics for which
                            lower is better (NLL, ECE, Brier score, loss, spread over clients)
    MB@ROUND                megabytes of the algorithm up to ROUND;  MB up@ROUND, MB down@ROUND
    MB edge up@ROUND        megabytes that edge servers send to the root (--tree); MB edge down@ROUND
    simulated@ROUND         seconds of the virtual clock up to ROUND
    J@ROUND                 joules of all clients up to ROUND
    rounds to VALUE         the first evaluated round with a test_accuracy of at least VALUE
    rounds to METRIC VALUE  the same for another metric; at most VALUE if lower is better
    rounds to mean METRIC VALUE     the same for the running mean of the last `window` evaluated rounds
    MB to ...               megabytes up to that round
    simulated to ...        seconds of the virtual clock up to that round
    J to ...                joules of all clients up to that round

METRIC is a key of metrics.jsonl.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from fedsim.errors import UsageError
from launch import numbers
from launch.runs.tables import SUMS

if TYPE_CHECKING:
    import pandas

_AT = re.compile(r"(?:(max|best) )?([a-zA-Z_]\w*(?:(?: edge)? (?:up|down))?)@(end|\d+)")
_TO = re.compile(r"(rounds|MB|simulated|J) to (?:(?:(mean) )?([a-zA-Z_]\w*) (\d*\.?\d+)|(0?\.\d+|1\.0))")


@dataclass(frozen=True)
class Column:
    """A parsed expression. how: the reduction ("", max, best, rounds, MB, ...). round: None for the last
    round or, with a level, for the first round that reaches it. of_mean: the running mean must reach the
    level."""

    text: str
    how: str
    metric: str
    round: int | None
    level: float | None = None
    of_mean: bool = False

    def of(self, run: pandas.DataFrame, window: int = 1) -> float:
        """Return the number of one run; NaN if a level was not reached or the run diverged.

        run: a row per evaluated round, and a column per metric (launch.runs.tables.wide_table).
        """
        if self.level is not None:
            at = reached(run, self.level, self.metric, window if self.of_mean else 1)
            if at is None:
                return math.nan
            return float(run.index[at]) if self.how == "rounds" else float(metric_of(run, self.how)[at])
        end = int(run.index[-1]) if self.round is None else self.round
        if end not in run.index:
            raise UsageError(f"column {self.text!r}: round {end} was not evaluated")
        rows = run.loc[:end]
        if self.metric in SUMS:
            return float(rows[self.metric].iloc[-1])
        values = metric_of(rows if self.how == "best" else rows[-window:], self.metric, trained=True)
        if self.how == "best" and lower_is_better(self.metric):
            return min(values)
        return max(values) if self.how else sum(values) / len(values)

    # ---- its words

    @property
    def is_sum(self) -> bool:
        """True for a sum over rounds: bytes, simulated seconds or joules."""
        return self.metric in SUMS or self.how in SUMS

    @property
    def percent(self) -> bool:
        """True if the column is shown in %."""
        return self.level is None and _is_share(self.metric)

    @property
    def least(self) -> bool:
        """True if the smallest value is the best, as for bytes, rounds and errors."""
        return not self.percent or lower_is_better(self.metric)

    @property
    def scale(self) -> float:
        return 100.0 if self.percent else 1.0

    @property
    def digits(self) -> int:
        if self.how == "rounds":
            return 0
        if self.is_sum or self.percent:
            return 1
        return 3 if any(word in self.metric for word in ("_ece", "_brier")) else 2

    @property
    def fine_digits(self) -> int:
        """The decimals of a mean beside its interval or its difference."""
        return max(self.digits, 3) if "nll" in self.metric and not self.percent else self.digits

    @property
    def heading(self) -> str:
        """The expression in words, with a target accuracy in %."""
        text = self.text
        if self.level is not None and _is_share(self.metric):
            number = text.rpartition(" ")[2]
            text = f"{text.removesuffix(number)}{numbers.target(self.level)}"
        words = text.replace("test_", "").replace("_", " ").replace("nll", "NLL")
        return re.sub(r"\bece\b", "ECE", words).replace("brier", "Brier")

    @property
    def head(self) -> str:
        """The heading with its unit, if that is %."""
        return self.heading + " %" * self.percent

    def shown(self, values: Sequence[float]) -> str:
        """Return mean ± population standard deviation over seeds as text, with accuracies in %.

        If not all seeds reach a level, the text is the number of those that do, or "-" for none.
        """
        if missing := sum(math.isnan(v) for v in values):
            reach = len(values) - missing
            if self.level is not None:
                return f"{reach} of {len(values)}" if reach else "-"
            return f"diverged ({missing})"
        scaled = [self.scale * v for v in values]
        mean = sum(scaled) / len(scaled)
        sd = math.sqrt(sum((v - mean) ** 2 for v in scaled) / len(scaled))
        exact = self.text.startswith("MB@") and sd < 0.05  # traffic that does not depend on the seed
        return f"{mean:,.{self.digits}f}" + (
            f"±{sd:.{self.digits}f}" if len(values) > 1 and not exact else ""
        )


@lru_cache
def column(expression: str) -> Column:
    """Parse an expression; raise UsageError if it is none."""
    if match := _TO.fullmatch(expression):
        level = float(match[4] or match[5])
        return Column(expression, match[1], match[3] or "test_accuracy", None, level, bool(match[2]))
    if not (match := _AT.fullmatch(expression)):
        raise UsageError(
            f"column {expression!r}: write METRIC@ROUND, max METRIC@ROUND, best METRIC@ROUND, rounds to "
            "VALUE, simulated to VALUE, MB to VALUE, J to VALUE; ROUND is a number or end, VALUE an "
            "accuracy such as 0.78; also rounds to METRIC VALUE, rounds to mean METRIC VALUE"
        )
    return Column(expression, match[1] or "", match[2], None if match[3] == "end" else int(match[3]))


def reached(
    run: pandas.DataFrame, level: float, metric: str = "test_accuracy", window: int = 1
) -> int | None:
    """Return the row of the first evaluated round after round 0 that is at least as good as `level`. The
    value of a round is the mean over the last `window` evaluated rounds; earlier rounds have no value."""
    values = metric_of(run, metric, trained=True)
    for last in range(window, len(values) + 1):
        mean = sum(values[last - window : last]) / window
        if mean <= level if lower_is_better(metric) else mean >= level:
            return len(run) - len(values) + last - 1
    return None


def lower_is_better(metric: str) -> bool:
    """Return whether the smallest value of a metric is the best, as for errors, losses and client spreads."""
    words = metric.split("_")
    return metric.endswith("_spread") or any(word in words for word in ("nll", "ece", "brier", "loss"))


def _is_share(metric: str) -> bool:
    return any(word in metric for word in ("accuracy", "recall", "precision", "_f1"))


def metric_of(run: pandas.DataFrame, name: str, trained: bool = False) -> list[float]:
    """Return a metric at the evaluated rounds; trained: without round 0, the start."""
    if name not in run:
        raise UsageError(
            f"no metric {name!r} in this run (it has {', '.join(sorted(map(str, run.columns)))})"
        )
    return [float(x) for x in (run[name][run.index > 0] if trained else run[name])]
