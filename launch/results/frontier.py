"""Accuracy against bytes: what each group reaches with a budget, and which one reaches most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launch.results.groups import Group
from launch.results.statistics import Band, reached

STEPS = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
"""Distances between round accuracies that levels are chosen from."""
FINE = 0.01
"""The distance from which two levels are enough."""
ROUNDING = 1e-12
"""Rounding error of a mean over seeds: a smaller difference does not make a group better."""


@dataclass(frozen=True)
class FrontierPoint:
    """A group's best accuracy within a budget (mean over seeds, with their range) and the megabytes, both
    directions. group: its place in the comparison."""

    group: int
    MB: float
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True)
class WinningRange:
    """Budgets, from `first.MB` to `until` (inf: and more), for which one group reaches most."""

    first: FrontierPoint
    last: FrontierPoint
    until: float


def by_budget(runs: Group) -> Band:
    """The best accuracy so far (y) for a budget of megabytes, both directions (x), at every x where a seed is
    evaluated. A seed that has ended keeps what it has reached, so the range is always that of all seeds.

    It begins where all seeds have an accuracy, and ends where the last finished seed has ended; of a group
    with an unfinished seed, where the first of these has. Empty without accuracies.
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
    """The points at which the group gets better, ascending in bytes and accuracy; [] without accuracies."""
    b = by_budget(runs)
    points = zip(b.x.tolist(), b.mean.tolist(), b.low.tolist(), b.high.tolist(), strict=True)
    return pareto([FrontierPoint(group, *point) for point in points if not math.isnan(point[1])])


def pareto(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Return the points that are better than all that cost no more, sorted by bytes."""
    result: list[FrontierPoint] = []
    for point in sorted(points, key=lambda p: (p.MB, -p.accuracy)):
        if point.accuracy > (result[-1].accuracy + ROUNDING if result else -math.inf):
            result.append(point)
    return result


def winning_ranges(frontier: Sequence[FrontierPoint]) -> list[WinningRange]:
    """The ranges of budgets, in which neighbouring points of one group are one range."""
    result: list[WinningRange] = []
    for n, point in enumerate(frontier):
        until = frontier[n + 1].MB if n + 1 < len(frontier) else math.inf
        if result and result[-1].first.group == point.group:
            result[-1] = WinningRange(result[-1].first, point, until)
        else:
            result.append(WinningRange(point, point, until))
    return result


def levels(maxima: Sequence[Sequence[FrontierPoint]], start: float) -> list[float]:
    """Two or three round accuracies above `start`, which most groups, half of them, and the best reach."""
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
    """Per member, the first round with an accuracy and the bytes spent until then, both directions."""
    result: list[tuple[int, int] | None] = []
    for curve in runs.curves:
        at = reached(curve, accuracy) if curve.has("test_accuracy") else None
        until = curve.lines[: at + 1] if at is not None else ()
        spent = sum(line["bytes_down"] + line["bytes_up"] for line in until)
        result.append((until[-1]["round"], spent) if until else None)
    return result


@dataclass(frozen=True)
class Cost:
    """A group's cost of an accuracy. rounds: the first evaluated round with the accuracy, for each of the
    `seeds` that reaches it. spent: the bytes until then, both directions, of the same seeds. best: the best
    accuracy of a round, mean over the seeds; NaN without accuracies."""

    group: int
    seeds: int
    rounds: tuple[int, ...]
    spent: tuple[int, ...]
    best: float

    @property
    def whole(self) -> bool:
        return bool(self.spent) and len(self.spent) == self.seeds


def cost(group: int, runs: Group, accuracy: float) -> Cost:
    there = [at for at in reaching(runs, accuracy) if at is not None]
    top = by_budget(runs).mean
    best = float(top[-1]) if len(top) else math.nan
    return Cost(group, len(runs.members), tuple(r for r, _ in there), tuple(n for _, n in there), best)


def ranking(groups: Sequence[Group], accuracy: float) -> list[Cost]:
    """Return all groups' costs of an accuracy: the fewest bytes first, then those of which only some seeds
    reach it, then those that do not, the best accuracy first."""
    costs = [cost(n, group, accuracy) for n, group in enumerate(groups)]

    def order(c: Cost) -> tuple[int, float]:
        best = math.inf if math.isnan(c.best) else -c.best
        return (0, sum(c.spent) / c.seeds) if c.whole else (1 if c.spent else 2, best)

    return sorted(costs, key=order)
