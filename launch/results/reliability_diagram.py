"""Reliability diagrams: accuracy against confidence, from the reliability tables of metrics.jsonl.

A point is a bin of fedsim.learning.calibration: the mean confidence and the accuracy of its predictions. The
area of a point grows with the number of predictions. On the diagonal, confidence and accuracy are equal;
below it, the model is overconfident, above it, underconfident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launch.results.figures import INK, figure, plain, style
from launch.results.html import Figure, Table
from launch.results.statistics import Values
from launch.terminal import percentage

TABLES = {"reliability": "at the mean", "ensemble_reliability": "averaged over posterior samples"}
"""Keys of metrics.jsonl, and the titles of their diagrams."""

LEAST, LARGEST = 5.0, 45.0
"""Areas of markers in square points: the minimum, and the addition for the fullest bin."""


@dataclass(frozen=True)
class Reliability:
    """One line of a diagram. bins: count, sum of confidences and number correct by bin, shape (bins, 3)."""

    name: str
    slot: int
    bins: Values

    @property
    def points(self) -> tuple[Values, Values, Values]:
        """Of each bin with predictions: their number, mean confidence, and share of correct ones."""
        count, confidence, correct = self.bins[self.bins[:, 0] > 0].T
        return count, confidence / count, correct / count


def last_table(lines: Sequence[Mapping[str, Any]], key: str) -> Values | None:
    """Return the last line's table; None if it has none (a diverged model) or no predictions."""
    table = lines[-1].get(key) if lines else None
    filled = isinstance(table, list) and any(count for count, _, _ in table)
    return np.array(table, dtype=np.float64) if filled else None


def diagram(drawn: Sequence[Reliability], title: str = "", legend: bool = True) -> list[Figure]:
    """Draw the lines, with a table of the bins; no figure without a line. title: the title in the figure."""
    if not drawn:
        return []
    label = "accuracy against confidence"

    def draw(drawing: Any) -> None:
        from matplotlib.ticker import FuncFormatter

        axes = drawing.subplots()
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
        for line in drawn:
            (colour, dash), (count, x, y) = style(line.slot), line.points
            axes.plot(x, y, color=colour, linestyle=dash, linewidth=1.3, label=line.name)
            axes.scatter(x, y, LEAST + LARGEST * count / count.max(), color=colour, linewidth=0, zorder=4)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("confidence (%)")
        axes.set_ylabel("accuracy (%)")
        axes.set_title(title, fontsize=9)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.10g}"))
        plain(axes)
        if legend and len(drawn) > 1:
            axes.legend(frameon=False, fontsize=8)

    rows = [
        (line.name, f"{count:,.0f}", percentage(sure), percentage(right))
        for line in drawn
        for count, sure, right in zip(*line.points, strict=True)
    ]
    heads = ("line", "predictions of a bin", "mean confidence", "accuracy")
    return [figure(f"{label} {title}".strip(), draw, Table(heads, rows), (3.3, 2.8))]
