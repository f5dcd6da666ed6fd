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

from launch.results.downloads import caption
from launch.results.figures import FAINT, INK, colour_of, drawing, plain, style
from launch.results.readings import Read, readings
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


def last_table(lines: Sequence[Mapping[str, Any]], key: str) -> Values | None:
    """Return the last line's table; None if it has none (earlier version of fedsim, or a diverged model)."""
    table = lines[-1].get(key) if lines else None
    return np.array(table, dtype=np.float64) if isinstance(table, list) else None


def diagram(
    drawn: Sequence[Reliability],
    *,
    title: str = "",
    counts: bool = True,
    size: tuple[float, float] = (4.2, 3.8),
) -> str:
    """Draw an <svg> element; '' without a line. counts: add bars of the predictions per bin."""
    if not drawn:
        return ""

    def draw(figure: Any) -> None:
        from matplotlib.ticker import FuncFormatter

        rows: Any = {"height_ratios": (3, 1)} if counts else {}
        both = figure.subplots(2 if counts else 1, 1, sharex=True, squeeze=False, **rows)[:, 0]
        upper = both[0]
        upper.plot([0, 1], [0, 1], color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
        for n, line in enumerate(drawn):
            colour, dash = style(line.slot)
            count, (x, y) = line.bins[line.bins[:, 0] > 0, 0], _points(line)
            if counts:
                upper.vlines(x, x, y, color=colour, linewidth=1.2, alpha=0.35, zorder=2)
            upper.plot(x, y, color=colour, linestyle=dash, linewidth=1.3, gid=f"line-{n}")
            areas = LEAST + LARGEST * count / count.max()
            upper.scatter(x, y, areas, color=colour, linewidth=0, zorder=4, gid=f"line-{n}")
        upper.set_xlim(0, 1)
        upper.set_ylim(0, 1.02)
        upper.set_ylabel("accuracy (%)")
        if title:
            upper.set_title(title, fontsize=9)
        if counts:
            _bars(both[1], drawn)
        both[-1].set_xlabel("confidence (%)")
        for axis in (both[-1].xaxis, upper.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.10g}"))
        for axes in both:
            plain(axes)

    def over(figure: Any) -> str:
        read = [
            Read("" if len(drawn) == 1 else d.name, colour_of(d.slot), *_points(d), form=percentage)
            for d in drawn
        ]
        return readings(figure.axes[0], read, lambda x: f"confidence {percentage(x)}")

    label = "accuracy against confidence"
    svg = drawing(label, [(d.slot, d.name) for d in drawn], draw, over, size=size)
    return svg + _saved(f"{label} {title}", drawn)


def _points(line: Reliability) -> tuple[Values, Values]:
    """Return the mean confidence and the share of correct predictions of every bin that is not empty."""
    count, confidence, correct = line.bins[line.bins[:, 0] > 0].T
    return confidence / count, correct / count


def _saved(title: str, drawn: Sequence[Reliability]) -> str:
    heads = ["line", "bin from", "bin to", "predictions", "mean confidence", "accuracy"]
    rows = [
        [d.name, n / len(d.bins), (n + 1) / len(d.bins), float(count), sure / count, right / count]
        for d in drawn
        for n, (count, sure, right) in enumerate(d.bins)
        if count
    ]
    return caption(title, heads, rows)


def _bars(axes: Any, drawn: Sequence[Reliability]) -> None:
    """Draw the number of predictions in each bin, side by side for several lines."""
    for n, line in enumerate(drawn):
        width = 1 / len(line.bins)
        left = np.arange(len(line.bins)) * width + width * n / len(drawn)
        colour, _ = style(line.slot)
        bars: Any = {"align": "edge", "color": colour, "edgecolor": FAINT, "linewidth": 0.3}
        axes.bar(left, line.bins[:, 0], 0.92 * width / len(drawn), **bars)
    axes.set_ylabel("predictions")
    axes.locator_params(axis="y", nbins=3, integer=True)
