"""Numbers of runs: columns of tables, bands over seeds, and sums of ledgers.

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

The x axis of a curve can also be the megabytes that all rounds so far would have cost at a theoretical limit
(Source: docs/compression.md#lower-limits-of-the-size):

    MB entropy   both directions at the zeroth-order entropy of their integers
    MB KL        uploads at KL(q_k || q_g), the cost of a sample of the client's posterior

A round measures one upload and its broadcast (fedsim.wire.limits). All bytes of a direction are scaled by the
measured ratio, including headers and fields without a codec. A direction without coded fields, for example a
first broadcast, counts in full.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedsim.errors import UsageError
from launch.configuration.target_accuracy import percent as target_text
from launch.runs.tables import SUMS, Curve

if TYPE_CHECKING:
    import pandas

Values = npt.NDArray[np.float64]

SUMMED = frozenset(SUMS)
"""Metrics that are sums over the rounds so far."""

_AT = re.compile(r"(?:(max|best) )?([a-zA-Z_]\w*(?:(?: edge)? (?:up|down))?)@(end|\d+)")
_TO = re.compile(r"(rounds|MB|simulated|J) to (?:(?:(mean) )?([a-zA-Z_]\w*) (\d*\.?\d+)|(0?\.\d+|1\.0))")


@dataclass(frozen=True)
class Column:
    """A parsed column. how: the reduction ("", max, best, rounds, MB, ...). round: None for the last round
    or, with a level, for the first round that reaches it. of_mean: the running mean must reach the level."""

    how: str
    metric: str
    round: int | None
    level: float | None = None
    of_mean: bool = False


def parsed(expression: str) -> Column:
    if result := _TO.fullmatch(expression):
        level = float(result[4] or result[5])
        return Column(result[1], result[3] or "test_accuracy", None, level, bool(result[2]))
    if not (result := _AT.fullmatch(expression)):
        raise UsageError(
            f"column {expression!r}: write METRIC@ROUND, max METRIC@ROUND, best METRIC@ROUND, rounds to "
            "VALUE, simulated to VALUE, MB to VALUE, J to VALUE; ROUND is a number or end, VALUE an "
            "accuracy such as 0.78; also rounds to METRIC VALUE, rounds to mean METRIC VALUE"
        )
    return Column(result[1] or "", result[2], None if result[3] == "end" else int(result[3]))


def value(expression: str, curve: Curve, window: int = 1) -> float:
    """Return the number of a column for one run; NaN if a level was not reached or the run diverged."""
    column = parsed(expression)
    how, name = column.how, column.metric
    if column.level is not None:
        at = reached(curve, column.level, name, window if column.of_mean else 1)
        if at is None:
            return math.nan
        return float(curve.rounds()[at]) if how == "rounds" else curve.metric(how)[at]
    end = curve.rounds()[-1] if column.round is None else column.round
    known = [i for i, round in enumerate(curve.rounds()) if round <= end]
    if not known or curve.rounds()[known[-1]] != end:
        raise UsageError(f"column {expression!r}: round {end} was not evaluated")
    values = curve.metric(name)
    if name in SUMS:
        return values[known[-1]]
    selected = [values[i] for i in (known if how == "best" else known[-window:]) if curve.rounds()[i] > 0]
    if how == "best" and lower_is_better(name):
        return min(selected)
    return max(selected) if how else sum(selected) / len(selected)


def reached(curve: Curve, level: float, metric: str = "test_accuracy", window: int = 1) -> int | None:
    """Return the index of the first evaluated round after round 0 that is at least as good as `level`. The
    value of a round is the mean over the last `window` evaluated rounds; earlier rounds have no value."""
    values, rounds = curve.metric(metric), curve.rounds()
    trained = [at for at in range(len(values)) if rounds[at] > 0]
    for last in range(window, len(trained) + 1):
        mean = sum(values[at] for at in trained[last - window : last]) / window
        if mean <= level if lower_is_better(metric) else mean >= level:
            return trained[last - 1]
    return None


def shown(expression: str, values: Sequence[float]) -> str:
    """Return mean ± population standard deviation over seeds as text, with accuracies in %.

    If not all seeds reach the accuracy of a column, the text is the number of those that do, or "-" for none.
    """
    if missing := sum(math.isnan(v) for v in values):
        reach = len(values) - missing
        if " to " in expression:
            return f"{reach} of {len(values)}" if reach else "-"
        return f"diverged ({missing})"
    scale, digits = scale_of(expression)
    scaled = [scale * v for v in values]
    mean = sum(scaled) / len(scaled)
    sd = math.sqrt(sum((v - mean) ** 2 for v in scaled) / len(scaled))
    exact = expression.startswith("MB@") and sd < 0.05  # traffic that does not depend on the seed
    return f"{mean:,.{digits}f}" + (f"±{sd:.{digits}f}" if len(values) > 1 and not exact else "")


def heading(expression: str) -> str:
    """Return a readable form of an expression, with a target accuracy in %."""
    if (result := _TO.fullmatch(expression)) and percent(result[3] or "accuracy"):
        level = target_text(float(result[4] or result[5]))
        expression = f"{expression.removesuffix(result[4] or result[5])}{level}"
    words = expression.replace("test_", "").replace("_", " ").replace("nll", "NLL")
    return re.sub(r"\bece\b", "ECE", words).replace("brier", "Brier")


def lower_is_better(metric: str) -> bool:
    """Return whether the smallest value of a metric is the best, as for errors, losses and client spreads."""
    return metric.endswith("_spread") or any(
        word in metric.split("_") for word in ("nll", "ece", "brier", "loss")
    )


def less_is_better(expression: str) -> bool:
    """Return whether the smallest value of a column is the best, as for bytes, rounds and errors."""
    return not percent(expression) or lower_is_better(parsed(expression).metric)


def is_sum(expression: str) -> bool:
    """Return whether a column is a sum over rounds: bytes, simulated seconds or joules."""
    column = parsed(expression)
    return column.metric in SUMMED or column.how in SUMMED


def percent(expression: str) -> bool:
    """Return whether a column is shown in %."""
    return " to " not in expression and any(
        word in expression for word in ("accuracy", "recall", "precision", "_f1")
    )


def scale_of(expression: str) -> tuple[float, int]:
    if expression.startswith("rounds"):
        return 1.0, 0
    if is_sum(expression):
        return 1.0, 1
    if any(name in expression for name in ("_ece", "_brier")):
        return 1.0, 3
    return (100.0, 1) if percent(expression) else (1.0, 2)


@dataclass(frozen=True)
class Band:
    """The lowest, mean and highest y over the seeds at each x. If the seeds differ in x, x is their mean."""

    x: Values
    low: Values
    mean: Values
    high: Values

    @staticmethod
    def of(x: Values, ys: Values) -> Band:
        """Return the band of ys. ys: one row per seed, as long as x."""
        return Band(x, ys.min(0), ys.mean(0), ys.max(0))


def stacked(curves: Sequence[Curve], name: str) -> Values:
    """Return a metric at the evaluated rounds that all seeds have, one row per seed."""
    count = min((len(c.lines) for c in curves), default=0)
    if not count:
        return np.zeros((len(curves), 0))
    rows = [_values(c, name) for c in curves]
    return np.array([row[:count] for row in rows], dtype=np.float64)


def _values(curve: Curve, name: str) -> Sequence[float]:
    if name == "round":
        return curve.rounds()
    return at_limit(curve, name) if name in LIMITS else curve.metric(name)


def band(curves: Sequence[Curve], x: str, y: str, window: int = 1) -> Band:
    """Return y over x (round, MB, simulated, J, or one of LIMITS). window: average y over so many rounds."""
    xs, ys = stacked(curves, x).mean(0) if curves else np.zeros(0), stacked(curves, y)
    if not curves:
        return Band(xs, xs, xs, xs)
    if window > 1:
        count = ys.shape[1]
        ys = np.array([[row[max(0, i + 1 - window) : i + 1].mean() for i in range(count)] for row in ys])
    return Band.of(xs, ys)


def sides(rows: pandas.DataFrame, keys: list[str]) -> pandas.DataFrame:
    """Return the bytes by `keys`, one column per direction."""
    table = rows.pivot_table(index=keys, columns="direction", values="bytes", aggfunc="sum", fill_value=0)
    return table.reindex(columns=["down", "up"], fill_value=0).astype("int64")


def messages(rows: pandas.DataFrame, direction: str) -> int:
    """Count the algorithm's envelopes in one direction: one per round, exchange and client."""
    sent = rows[(rows.kind == "algorithm") & (rows.direction == direction)]
    return len(sent[["round", "exchange", "client"]].drop_duplicates())


def _entropy(line: Mapping[str, Any]) -> float:
    """Return the bytes, both directions, that a round would cost at the entropy of its fields."""
    total = 0.0
    for side in ("down", "up"):
        fields = line.get("limits", {}).get(side, {}).values()
        sent = sum(field["bits"] for field in fields)
        total += line[f"bytes_{side}"] * (sum(field["entropy"] for field in fields) / sent if sent else 1.0)
    return total


def _divergence(line: Mapping[str, Any]) -> float:
    """Return the bytes that a round's uploads would cost at the KL divergence of the measured upload. Every
    field has one value per parameter, so the sum of their bits per value is in bits per parameter."""
    limits = line.get("limits", {})
    sent = sum(field["bits"] for field in limits.get("up", {}).values())
    return float(limits["kl"] / sent * line["bytes_up"]) if sent and "kl" in limits else math.nan


LIMITS = {"MB entropy": _entropy, "MB KL": _divergence}
"""Functions that return the bytes of one round, by the name of the limit."""


def at_limit(curve: Curve, name: str) -> list[float]:
    """Return the cumulative megabytes at every evaluated round; NaN from the first round without a KL.
    Every round of the run must have been evaluated. name: one of LIMITS."""
    rounds = (LIMITS[name](line) if line["round"] else 0.0 for line in curve.lines)
    return [1e-6 * so_far for so_far in accumulate(rounds)]
