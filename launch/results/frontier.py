"""Accuracy against bytes: the most accurate group for a budget, and the cost of an accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from launch.results.columns import reached
from launch.results.groups import PairKey, RunGroup, over_runs
from launch.results.significance import ROUNDING, Difference, differences, median

if TYPE_CHECKING:
    import pandas

STEPS = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
"""Step sizes, tried in order; `levels` uses the first one that gives enough different levels."""
FINE = 0.01
"""With this step or a finer one, two levels are enough."""


def by_budget(runs: RunGroup) -> pandas.DataFrame:
    """Return the best accuracy so far (y) for a budget in megabytes, both directions (x).

    x has the budgets at which a seed was evaluated. A seed that has ended keeps its best accuracy, so the
    band always covers all seeds. The band begins where all seeds have an accuracy. It ends at the end of the
    last seed or, if some seeds are unfinished, at the end of the first unfinished seed. It is empty if there
    are no accuracies.
    """
    if not runs.has("test_accuracy"):
        return over_runs(np.zeros(0), np.zeros((1, 0)))
    trained = [curve[curve.index > 0] for curve in runs.curves]
    spent = [curve["MB"].to_numpy() for curve in trained]
    best = [np.fmax.accumulate(curve["test_accuracy"].to_numpy()) for curve in trained]
    ends = [(m.done, x[-1]) for m, x in zip(runs.trained, spent, strict=True)]
    end = min((x for done, x in ends if not done), default=max(x for _, x in ends))
    xs = np.unique(np.concatenate(spent))
    xs = xs[(xs >= max(x[0] for x in spent)) & (xs <= end)]
    rows = np.array([y[np.searchsorted(x, xs, side="right") - 1] for x, y in zip(spent, best, strict=True)])
    finite = np.isfinite(rows).all(0)
    return over_runs(xs[finite], rows[:, finite])


def running_maxima(groups: Sequence[RunGroup]) -> pandas.DataFrame:
    """Return the points at which the best accuracy of a group rises: group (its index), MB, accuracy (mean
    over the seeds), low and high (their range)."""
    import pandas

    tables = [by_budget(g).rename(columns={"x": "MB", "y": "accuracy"}) for g in groups]
    for n, table in enumerate(tables):
        table.insert(0, "group", n)
    return pandas.concat(map(pareto, tables), ignore_index=True)


def pareto(points: pandas.DataFrame) -> pandas.DataFrame:
    """Return the Pareto front: points more accurate than all with as many or fewer bytes, sorted by bytes."""
    ordered = points.sort_values(["MB", "accuracy"], ascending=[True, False], kind="stable")
    before = ordered.accuracy.cummax().shift(fill_value=-math.inf)
    return ordered[ordered.accuracy > before + ROUNDING].reset_index(drop=True)


def winning_ranges(frontier: pandas.DataFrame) -> pandas.DataFrame:
    """Return the ranges of budgets in which one group is best: group, MB, until (inf for no end), first and
    last accuracy."""
    change = (frontier.group != frontier.group.shift()).cumsum()
    ranges = frontier.groupby(change).agg(
        group=("group", "first"), MB=("MB", "first"), first=("accuracy", "first"), last=("accuracy", "last")
    )
    return ranges.assign(until=ranges.MB.shift(-1, fill_value=math.inf))


def levels(maxima: pandas.DataFrame, start: float) -> list[float]:
    """Return up to three accuracies above `start`, rounded down. Three quarters of the groups reach the first
    one, half of them reach the second one, and the best group reaches the third one."""
    best = sorted(low for low in maxima.groupby("group").low.last() if low > start)
    if not best:
        return []
    target = (best[len(best) // 4], best[len(best) // 2], best[-1])
    result: list[float] = []
    for step in STEPS:
        floors = {round(math.floor(x / step + 1e-9) * step, 3) for x in target}
        result = sorted(level for level in floors if level > start)
        if len(result) == 3 or (step <= FINE and len(result) == 2):
            break
    return result


@dataclass(frozen=True)
class Cost:
    """The cost at which a group reaches an accuracy, and the factor over the group with the least.

    seeds: the number of seeds. rounds: the first evaluated round with the accuracy, for each seed that
    reaches it. spent: the bytes up to that round, both directions, for the same seeds. ended: all bytes of
    each seed that does not reach it. best: the best accuracy, as the mean over the seeds; NaN without
    accuracies. by_seed: `spent` by key of pairs; NaN for a seed that does not reach the accuracy.

    ratio: the bytes divided by those of the group with the least; None if unknown. factor: the differences of
    the logarithms, paired by seed; without values if they are not compared.
    """

    group: int
    seeds: int
    rounds: tuple[int, ...]
    spent: tuple[int, ...]
    best: float
    ended: tuple[int, ...] = ()
    by_seed: Mapping[PairKey, float] = field(default_factory=dict)
    ratio: float | None = None
    verdict: str = ""
    factor: Difference = Difference(())

    @property
    def whole(self) -> bool:
        return bool(self.spent) and len(self.spent) == self.seeds

    @cached_property
    def median(self) -> float:
        """The median bytes to the accuracy; inf if too few seeds reach it. A seed that ends without the
        accuracy is censored: it needs more than all of its bytes."""
        return median(self.spent, self.ended)


def cost(group: int, runs: RunGroup, accuracy: float) -> Cost:
    """Return the cost of an accuracy, from the first evaluated round of each seed that has it."""
    rounds, spent, ended, by_seed = [], [], [], {}
    curves = dict(zip((m.path for m in runs.trained), runs.curves, strict=True))
    for m in runs.members:
        curve = curves.get(m.path)
        at = None if curve is None or "test_accuracy" not in curve else reached(curve, accuracy)
        if curve is None or at is None:
            ended.append(m.bytes)
        else:
            rounds.append(int(curve.index[at]))
            spent.append(int(curve[["bytes_down", "bytes_up"]][: at + 1].to_numpy().sum()))
        if curve is not None:
            by_seed[m.key] = math.nan if at is None else float(spent[-1])
    best = float(max(by_budget(runs).y, default=math.nan))
    return Cost(group, len(runs.members), tuple(rounds), tuple(spent), best, tuple(ended), by_seed)


def ranking(groups: Sequence[RunGroup], accuracy: float) -> list[Cost]:
    """Return the costs at which the groups reach an accuracy, with factors; the best group first.

    Groups with a finite median come first, in ascending order. Groups of which some seeds reach the accuracy
    follow, then groups of which no seed does. Both are sorted by their best accuracy.
    """

    def order(c: Cost) -> tuple[int, float]:
        best = math.inf if math.isnan(c.best) else -c.best
        return (0, c.median) if math.isfinite(c.median) else (1 if c.spent else 2, best)

    return _with_factors(sorted((cost(n, group, accuracy) for n, group in enumerate(groups)), key=order))


def _with_factors(ranked: Sequence[Cost]) -> list[Cost]:
    """Add the factors over the first cost that has bytes and a median.

    Differences of logarithms are paired and tested (launch.results.significance), so the ratio is a geometric
    mean and has an interval. A group with a seed that does not reach the accuracy is not tested; its ratio is
    that of the medians, if both are known.
    """
    first = next((c for c in ranked if 0 < c.median < math.inf), None)
    whole = [c for c in ranked if c is not first and c.whole and min(c.spent) > 0] if first else []
    tested = {}
    if first is not None and first.whole:
        logs = [{key: math.log(n) for key, n in c.by_seed.items()} for c in (first, *whole)]
        of_others = differences(logs, 0, all_pairs=True)[1:]
        tested = {c.group: d for c, d in zip(whole, of_others, strict=True)}
    result = []
    for c in ranked:
        ratio = c.median / first.median if first and math.isfinite(c.median) else None
        d = tested.get(c.group, c.factor)
        if c is first:
            verdict = "least"
        elif c.group in tested:
            verdict = d.verdict("more bytes", "fewer bytes") if d.ranked else d.verdict()
        elif c.median == 0:
            verdict = "sends nothing"
        elif c.whole and first is not None:
            verdict = f"{len(first.spent)} of {first.seeds} of the first reach it"
        else:
            verdict = f"{len(c.spent)} of {c.seeds} reach it"
        ratio = math.exp(d.mean) if d.ranked else ratio
        result.append(replace(c, ratio=ratio, verdict=verdict, factor=d))
    return result
