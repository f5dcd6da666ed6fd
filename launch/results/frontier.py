"""Accuracy against bytes: the accuracy of each group for a budget, and the group with the best one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from launch.results.groups import Group, PairKey
from launch.results.statistics import Band, reached

STEPS = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
"""Step sizes, tried in order; `levels` uses the first one that gives enough different levels."""
FINE = 0.01
"""With this step or a finer one, two levels are enough."""
ROUNDING = 1e-12
"""Tolerance for the rounding error of a mean over seeds; a smaller difference counts as equality."""


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


def by_budget(runs: Group) -> Band:
    """Return the best accuracy so far (y) for a budget in megabytes, both directions (x).

    x has the budgets at which a seed was evaluated. A seed that has ended keeps its best accuracy, so the
    band always covers all seeds. The band begins where all seeds have an accuracy. It ends at the end of the
    last seed or, if some seeds are unfinished, at the end of the first unfinished seed. It is empty if there
    are no accuracies.
    """
    none = np.zeros(0)
    if not runs.has("test_accuracy"):
        return Band(none, none, none, none)
    spent, best, ends = [], [], []
    for member in (m for m in runs.members if m.rounds > 0):
        after = np.array(member.curve.rounds()) > 0
        spent.append(np.array(member.curve.metric("MB"))[after])
        best.append(np.fmax.accumulate(np.array(member.curve.metric("test_accuracy"))[after]))
        ends.append((member.done, float(spent[-1][-1])))
    open_ends = [end for done, end in ends if not done]
    end = min(open_ends) if open_ends else max(end for _, end in ends)
    xs = np.unique(np.concatenate(spent))
    xs = xs[(xs >= max(x[0] for x in spent)) & (xs <= end)]
    rows = [y[np.searchsorted(x, xs, side="right") - 1] for x, y in zip(spent, best, strict=True)]
    known = np.isfinite(rows).all(0)
    return Band.of(xs[known], np.array(rows)[:, known])


def running_maximum(group: int, runs: Group) -> list[FrontierPoint]:
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


def reaching(runs: Group, accuracy: float) -> list[tuple[int, int] | None]:
    """Return, for each of `runs.curves`, the first round with at least this accuracy and the bytes of both
    directions up to this round; None for a curve that does not reach it."""
    result: list[tuple[int, int] | None] = []
    for curve in runs.curves:
        at = reached(curve, accuracy) if curve.has("test_accuracy") else None
        until = curve.lines[: at + 1] if at is not None else ()
        spent = sum(line["bytes_down"] + line["bytes_up"] for line in until)
        result.append((until[-1]["round"], spent) if until else None)
    return result


@dataclass(frozen=True)
class Cost:
    """The cost at which a group reaches an accuracy.

    seeds: the number of seeds. rounds: the first evaluated round with the accuracy, for each seed that
    reaches it. spent: the bytes up to that round, both directions, for the same seeds. ended: all bytes of
    each seed that does not reach it. best: the best accuracy, as the mean over the seeds; NaN without
    accuracies. by_seed: `spent` by ComparedRun.key; NaN for a seed that does not reach the accuracy.
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

    @property
    def median(self) -> float:
        """The Kaplan-Meier estimate of the median bytes to the accuracy; inf if too few seeds reach it.

        A seed that ends without the accuracy is censored: it needs more than all of its bytes. If the
        estimated share of seeds that need more is one half between two values, the median is their midpoint.
        """
        share, left, half = 1.0, len(self.spent) + len(self.ended), math.inf
        for spent, ends in sorted([*((n, 0) for n in self.spent), *((n, 1) for n in self.ended)]):
            share *= 1.0 if ends else 1 - 1 / left
            left -= 1
            if share < 0.5 - ROUNDING:
                return float(spent) if half == math.inf else (half + spent) / 2
            if share <= 0.5 + ROUNDING and half == math.inf:
                half = float(spent)
        return math.inf


def cost(group: int, runs: Group, accuracy: float) -> Cost:
    result = reaching(runs, accuracy)
    there = [at for at in result if at is not None]
    top = by_budget(runs).mean
    best = float(top[-1]) if len(top) else math.nan
    trained = [m for m in runs.members if m.rounds > 0]
    pairs = list(zip(trained, result, strict=True))
    ended = tuple(m.bytes for m, at in pairs if at is None) + tuple(
        m.bytes for m in runs.members if m not in trained
    )
    by_seed = {m.key: float(at[1]) if at else math.nan for m, at in pairs}
    rounds, spent = tuple(r for r, _ in there), tuple(n for _, n in there)
    return Cost(group, len(runs.members), rounds, spent, best, ended, by_seed)


def ranking(groups: Sequence[Group], accuracy: float) -> list[Cost]:
    """Return the costs at which the groups reach an accuracy, the best group first.

    Groups with a finite median come first, in ascending order. Groups of which some seeds reach the accuracy
    follow, then groups of which no seed does. Both are sorted by their best accuracy.
    """
    costs = [cost(n, group, accuracy) for n, group in enumerate(groups)]

    def order(c: Cost) -> tuple[int, float]:
        best = math.inf if math.isnan(c.best) else -c.best
        return (0, c.median) if math.isfinite(c.median) else (1 if c.spent else 2, best)

    return sorted(costs, key=order)
