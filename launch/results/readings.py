"""Tooltips of a chart, which CSS shows: a rule, dots, and the values of all lines at the pointer.

The chart is divided into strips along its x axis. Each strip shows the points of the lines in that strip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from launch.results.statistics import Values

STRIPS = 40
"""The maximum number of strips of a chart; if there are more points, some are left out."""
VALUES = 240
"""The approximate number of values in all strips of a chart."""
TEXT = 40
"""The maximum number of characters of a line of text."""
LEADING = 9.0
"""Points between two lines of text."""


def number(value: float) -> str:
    """Return a number as text: a whole number in full, another number with four digits."""
    return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"


@dataclass(frozen=True)
class Read:
    """A line whose values are shown: its name, its CSS colour, its points, and the ranges of y, if any.

    holds: whether each value holds up to the next point, as in a step line. said: values to show instead of
    y, such as the heights of stacked bars. form: function that formats a value.
    """

    name: str
    colour: str
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None
    holds: bool = False
    said: Values | None = None
    form: Callable[[float], str] = number


def readings(axes: Any, lines: Sequence[Read], head: Callable[[float], str]) -> str:
    """Return SVG to put over matplotlib's drawing of `axes`, in points; '' if no point is inside the axes.
    head: function of an x that returns the text above the values."""
    placed = [(line, *_placed(axes, line.x, line.y)) for line in lines]
    left, top, right, bottom = _frame(axes)
    visible = [
        (line, px, py, (px > left - 1) & (px < right + 1) & (py > top - 1) & (py < bottom + 1))
        for line, px, py in placed
    ]
    where = np.unique(np.round(np.concatenate([px[seen] for _, px, _, seen in visible] or [np.zeros(0)]), 1))
    if not len(where):
        return ""
    most = max(8, min(STRIPS, VALUES // max(1, len(lines))))
    if len(where) > most:
        where = where[np.unique(np.linspace(0, len(where) - 1, most).round().astype(int))]
    edges = np.concatenate([[left], (where[1:] + where[:-1]) / 2, [right]])
    strips = []
    for centre, begin, end in zip(where, edges[:-1], edges[1:], strict=True):
        there = [
            (line, at, px[at], py[at])
            for line, px, py, seen in visible
            if (at := _point(line, px, seen, centre, begin, end)) is not None
        ]
        strips.append(_strip(there, head, (begin, top, end, bottom), centre, centre < (left + right) / 2))
    return "".join(strips)


def _placed(axes: Any, x: Values, y: Values) -> tuple[Values, Values]:
    """Return positions in points from the drawing's upper left corner; NaN for points without a position."""
    figure = axes.figure
    with np.errstate(divide="ignore", invalid="ignore"):
        at = axes.transData.transform(np.column_stack([x, y]).astype(float)) * 72 / figure.dpi
    return at[:, 0], 72 * figure.get_size_inches()[1] - at[:, 1]


def _frame(axes: Any) -> tuple[float, float, float, float]:
    width, height = 72 * axes.figure.get_size_inches()
    box = axes.get_position()
    return box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height


def _point(line: Read, px: Values, seen: Any, centre: float, begin: float, end: float) -> int | None:
    """Return the index of the point of a line that a strip shows; None if there is no point."""
    inside = np.flatnonzero(seen & (px >= begin) & (px <= end))
    if len(inside):
        return int(inside[np.abs(px[inside] - centre).argmin()])
    before = np.flatnonzero(seen & (px < begin)) if line.holds else inside
    return int(before[-1]) if len(before) and px[-1] > centre else None


def _strip(
    there: Sequence[tuple[Read, int, float, float]],
    head: Callable[[float], str],
    box: tuple[float, float, float, float],
    centre: float,
    to_the_right: bool,
) -> str:
    begin, top, end, bottom = box
    nearest = min(there, key=lambda point: abs(point[2] - centre))
    x = float(nearest[0].x[nearest[1]])
    texts = [("var(--ink)", head(x)), *_texts(there, x)]
    beside, anchor = (5.0, "start") if to_the_right else (-5.0, "end")
    created = "".join(
        f'<text x="{centre + beside:.1f}" y="{top + LEADING * (n + 1):.1f}" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(text)}</text>'
        for n, (colour, text) in enumerate(texts)
    )
    dots = "".join(
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.6" fill="{r.colour}"/>' for r, _, px, py in there
    )
    return (
        f'<g class="at"><rect x="{begin:.1f}" y="{top:.1f}" width="{end - begin:.1f}" '
        f'height="{bottom - top:.1f}"/><g><path d="M{centre:.1f} {top:.1f}V{bottom:.1f}"/>'
        f"{dots}{created}</g></g>"
    )


def _texts(there: Sequence[tuple[Read, int, float, float]], x: float) -> Iterator[tuple[str, str]]:
    """Yield a colour and a text for each line: the value, then as much of the name as fits."""
    for line, at, _, _ in there:
        text = line.form(float((line.y if line.said is None else line.said)[at]))
        if line.low is not None and line.high is not None and line.low[at] < line.high[at]:
            text += f" ({line.form(float(line.low[at]))} to {line.form(float(line.high[at]))})"
        if not line.holds and not np.isclose(line.x[at], x, rtol=1e-9, atol=0):
            text += f" at {number(float(line.x[at]))}"
        text = f"{text} {line.name}".rstrip()
        yield line.colour, text if len(text) <= TEXT else f"{text[: TEXT - 1]}…"
