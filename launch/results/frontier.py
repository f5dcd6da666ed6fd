"""Accuracy against bytes: the accuracy of each group for a budget, and the group with the best one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from launch.results.columns import reached
from launch.results.groups import Band, PairKey, RunGroup
from launch.results.significance import ROUNDING, median

STEPS = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
"""Step sizes, tried in order; `levels` uses the first one that gives enough different levels."""
FINE = 0.01
"""With this step or a finer one, two levels are enough."""


@dataclass(frozen=True)
class FrontierPoint:
    """A group's best accuracy within a budget: its mean over seeds, with the range of the seeds.

    group: the group's index in the comparison. MB: the budget in megabytes, both directions.
    """

    group: int
    MB: float
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True)
class WinningRange:
    """A range of budgets with one best group, from `first.MB` to `until` (inf if it has no end)."""

    first: FrontierPoint
    last: FrontierPoint
    until: float


def by_budget(runs: RunGroup) -> Band:
    """Return the best accuracy so far (y) for a budget in megabytes, both directions (x).

    x has the budgets at which a seed was evaluated. A seed that has ended keeps its best accuracy, so the
    band always covers all seeds. The band begins where all seeds have an accuracy. It ends at the end of the
    last seed or, if some seeds are unfinished, at the end of the first unfinished seed. It is empty if there
    are no accuracies.
    """
    none = np.zeros(0)
    if not runs.has("test_accuracy"):
        return Band(none, none, none, none)
    trained = [curve[curve.index > 0] for curve in runs.curves]
    spent = [curve["MB"].to_numpy() for curve in trained]
    best = [np.fmax.accumulate(curve["test_accuracy"].to_numpy()) for curve in trained]
    ends = [(m.done, x[-1]) for m, x in zip(runs.trained, spent, strict=True)]
    end = min((x for done, x in ends if not done), default=max(x for _, x in ends))
    xs = np.unique(np.concatenate(spent))
    xs = xs[(xs >= max(x[0] for x in spent)) & (xs <= end)]
    rows = np.array([y[np.searchsorted(x, xs, side="right") - 1] for x, y in zip(spent, best, strict=True)])
    finite = np.isfinite(rows).all(0)
    return Band.over(xs[finite], rows[:, finite])


def running_maximum(group: int, runs: RunGroup) -> list[FrontierPoint]:
    """Return the points at which the group's best accuracy rises, sorted by bytes; [] without accuracies."""
    b = by_budget(runs)
    points = zip(b.x.tolist(), b.mean.tolist(), b.low.tolist(), b.high.tolist(), strict=True)
    return pareto([FrontierPoint(group, *point) for point in points if not math.isnan(point[1])])


def pareto(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Return the Pareto front: points more accurate than all with as many or fewer bytes, sorted by bytes."""
    result: list[FrontierPoint] = []
    for point in sorted(points, key=lambda p: (p.MB, -p.accuracy)):
        if point.accuracy > (result[-1].accuracy + ROUNDING if result else -math.inf):
            result.append(point)
    return result


def winning_ranges(frontier: Sequence[FrontierPoint]) -> list[WinningRange]:
    """Return the ranges of budgets in which one group is best, merging neighbouring points of a group."""
    result: list[WinningRange] = []
    for n, point in enumerate(frontier):
        until = frontier[n + 1].MB if n + 1 < len(frontier) else math.inf
        if result and result[-1].first.group == point.group:
            result[-1] = WinningRange(result[-1].first, point, until)
        else:
            result.append(WinningRange(point, point, until))
    return result


def levels(maxima: Sequence[Sequence[FrontierPoint]], start: float) -> list[float]:
    """Return up to three accuracies above `start`, rounded down. Three quarters of the groups reach the first
    one, half of them reach the second one, and the best group reaches the third one."""
    best = sorted(points[-1].low for points in maxima if points and points[-1].low > start)
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
    """The cost at which a group reaches an accuracy.

    seeds: the number of seeds. rounds: the first evaluated round with the accuracy, for each seed that
    reaches it. spent: the bytes up to that round, both directions, for the same seeds. ended: all bytes of
    each seed that does not reach it. best: the best accuracy, as the mean over the seeds; NaN without
    accuracies. by_seed: `spent` by key of pairs; NaN for a seed that does not reach the accuracy.
    """

    group: int
    seeds: int
    rounds: tuple[int, ...]
    spent: tuple[int, ...]
    best: float
    ended: tuple[int, ...] = ()
    by_seed: Mapping[PairKey, float] = field(default_factory=dict)

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
    top = by_budget(runs).mean
    best = float(top[-1]) if len(top) else math.nan
    return Cost(group, len(runs.members), tuple(rounds), tuple(spent), best, tuple(ended), by_seed)


def ranking(groups: Sequence[RunGroup], accuracy: float) -> list[Cost]:
    """Return the costs at which the groups reach an accuracy, the best group first.

    Groups with a finite median come first, in ascending order. Groups of which some seeds reach the accuracy
    follow, then groups of which no seed does. Both are sorted by their best accuracy.
    """
    costs = [cost(n, group, accuracy) for n, group in enumerate(groups)]

    def order(c: Cost) -> tuple[int, float]:
        best = math.inf if math.isnan(c.best) else -c.best
        return (0, c.median) if math.isfinite(c.median) else (1 if c.spent else 2, best)

    return sorted(costs, key=order)
