"""Several seeds as one curve: their mean, with their range as a band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from launch.results.columns import Curve

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Band:
    """x and, at each, the lowest, mean and highest y of the seeds; x is a mean over the seeds, too."""

    x: Values
    low: Values
    mean: Values
    high: Values

    @staticmethod
    def of(x: Values, ys: Values) -> Band:
        """ys: one row per seed, as long as x."""
        return Band(x, ys.min(0), ys.mean(0), ys.max(0))


def stacked(curves: Sequence[Curve], name: str) -> Values:
    """A metric, one row per seed: the evaluated rounds that all seeds have.

    Raises:
        UsageError: if an argument is wrong.
    """
    count = min((len(c.lines) for c in curves), default=0)
    if not count:
        return np.zeros((len(curves), 0))
    rows = [c.rounds() if name == "round" else c.metric(name) for c in curves]
    return np.array([row[:count] for row in rows], dtype=np.float64)


def band(curves: Sequence[Curve], x: str, y: str, window: int = 1) -> Band:
    """y over x (round, MB, simulated); window: evaluated rounds that a value is the mean of."""
    xs, ys = stacked(curves, x).mean(0) if curves else np.zeros(0), stacked(curves, y)
    if not curves:
        return Band(xs, xs, xs, xs)
    if window > 1:
        count = ys.shape[1]
        ys = np.array([[row[max(0, i + 1 - window) : i + 1].mean() for i in range(count)] for row in ys])
    return Band.of(xs, ys)
