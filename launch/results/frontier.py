"""Accuracy against bytes: what each group reaches with so much traffic, and which one reaches most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launch.results.groups import Group
from launch.results.statistics import reached, stacked

STEPS = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
"""Distances between round accuracies that levels are chosen from."""
FINE = 0.01
"""From here on two levels are enough."""
ROUNDING = 1e-12
"""Of a mean over seeds: a group is not better by that."""


@dataclass(frozen=True)
class FrontierPoint:
    """A group's best accuracy so far after a round (mean over seeds, with their range) and the megabytes
    spent until then, both directions (mean). group: its place in the comparison."""

    group: int
    round: int
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


def running_maximum(group: int, runs: Group) -> list[FrontierPoint]:
    """The points at which the group gets better, ascending in bytes and accuracy; [] without accuracies."""
    if not runs.has("test_accuracy"):
        return []
    rounds, spent = stacked(runs.curves, "round")[0], stacked(runs.curves, "MB").mean(0)
    after = rounds > 0
    ys = np.maximum.accumulate(stacked(runs.curves, "test_accuracy")[:, after], axis=1)
    points = [
        FrontierPoint(group, int(round), float(x), float(y.mean()), float(y.min()), float(y.max()))
        for round, x, y in zip(rounds[after], spent[after], ys.T, strict=True)
    ]
    return pareto(points)


def pareto(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Those that are better than all that cost no more, by bytes."""
    result: list[FrontierPoint] = []
    for point in sorted(points, key=lambda p: (p.MB, -p.accuracy)):
        if point.accuracy > (result[-1].accuracy + ROUNDING if result else -math.inf):
            result.append(point)
    return result


def winning_ranges(frontier: Sequence[FrontierPoint]) -> list[WinningRange]:
    """Neighbouring points of one group as one."""
    result: list[WinningRange] = []
    for n, point in enumerate(frontier):
        until = frontier[n + 1].MB if n + 1 < len(frontier) else math.inf
        if result and result[-1].first.group == point.group:
            result[-1] = WinningRange(result[-1].first, point, until)
        else:
            result.append(WinningRange(point, point, until))
    return result


def levels(maxima: Sequence[Sequence[FrontierPoint]], start: float) -> list[float]:
    """Two or three round accuracies above `start`: what most groups reach with every seed,
    half of them, and the best."""
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
