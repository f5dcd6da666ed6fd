"""Reliability diagrams: accuracy against confidence, from the reliability tables of metrics.jsonl.

A point is a bin of fedsim.learning.calibration: the mean confidence and the accuracy of its predictions. The
area of a point grows with the number of predictions. On the diagonal, confidence and accuracy are equal;
below it, the model is overconfident, above it, underconfident.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from launch.numbers import percentage
from launch.results.figures import Figure, Line, Values, chart
from launch.table import Table

TABLES = {"reliability": "at the mean", "ensemble_reliability": "averaged over posterior samples"}
"""Keys of metrics.jsonl, and the titles of their diagrams."""
LEAST, LARGEST = 5.0, 45.0
"""Areas of markers in square points: the minimum, and the addition for the fullest bin."""


def table_of(line: Mapping[str, Any], key: str) -> Values | None:
    """Return the table of a line of metrics.jsonl, shape (bins, 3): count, sum of confidences and number
    correct. Return None if it has none (a diverged model) or no predictions."""
    table = line.get(key)
    filled = isinstance(table, list) and any(count for count, _, _ in table)
    return np.array(table, dtype=np.float64) if filled else None


def diagram(tables: Mapping[int, tuple[str, Values]], title: str = "", legend: bool = True) -> list[Figure]:
    """Draw a line per table, with a table of the bins; no figure without a line. tables: name and bins by
    slot. title: the title in the figure."""
    lines, rows = [], []
    for slot, (name, bins) in tables.items():
        count, confidence, correct = bins[bins[:, 0] > 0].T
        x, y = confidence / count, correct / count
        lines.append(Line(name, x, y, slot=slot, areas=LEAST + LARGEST * count / count.max()))
        rows += [(name, f"{n:,.0f}", *map(percentage, point)) for n, *point in zip(count, x, y, strict=True)]
    heads = ("line", "predictions of a bin", "mean confidence", "accuracy")
    return chart(
        *(lines, "confidence", "accuracy"),
        label=f"accuracy against confidence {title}".strip(),
        title=title,
        size=(3.3, 2.8),
        limits=(0, 1.02),
        xlimits=(0, 1),
        shares="xy",
        legend="inside" if legend else "",
        numbers=Table(heads, rows),
    )
