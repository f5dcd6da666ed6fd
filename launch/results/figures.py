"""Lines and bars, drawn by matplotlib: as SVG for a page, with their numbers as a table, or as a file."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from launch.configuration.target_accuracy import percent
from launch.results.html import Figure, Table
from launch.results.pictures import write_picture
from launch.results.statistics import Band, Values
from launch.terminal import percentage

# Okabe and Ito's palette for any colour vision, with #882255 in place of yellow, and black last
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#000000")
DASHES = ("-", "--", ":", "-.")
INK, FAINT = "#010203", "#cfd1d0"
WHOLE = ("round", "client, sorted")
"""Axes whose values are whole numbers."""
DECADES = 30
"""The ratio of the largest to the smallest positive value from which values are `wide`."""
POINTS = 50
"""The maximum number of points of a line in the table of a figure; of more, some are left out."""
SIZE = (3.3, 2.4)
"""Inches of a figure, with 9-point text; three of them fit beside each other."""


@dataclass(frozen=True)
class Line:
    """A curve with a name and, over seeds, a band from low to high.

    slot: the index of colour and dashes; by default the line's position. kind: "steps" keeps each value up to
    the next point and has no band, because bands of steps would hide each other; "points" draws no line.
    mark: matplotlib's marker of points.
    """

    name: str
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None
    slot: int | None = None
    kind: Literal["curve", "steps", "points"] = "curve"
    mark: str = "o"


def style(slot: int) -> tuple[str, str]:
    """Return the colour and the dashes of a line, for matplotlib."""
    return COLOURS[slot % len(COLOURS)], DASHES[slot // len(COLOURS) % len(DASHES)]


def wide(values: Sequence[Values]) -> bool:
    """Return whether the positive values span a ratio of at least DECADES, which needs a logarithmic axis."""
    result = np.concatenate([*values, np.zeros(0)])
    result = result[np.isfinite(result) & (result > 0)]
    return bool(len(result)) and bool(result.max() >= DECADES * result.min())


def number(value: float) -> str:
    """Return a number as text: a whole number in full, another number with four digits; '' for NaN."""
    if np.isnan(value):
        return ""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def figure(
    label: str, draw: Callable[[Any], None], numbers: Table | None, size: tuple[float, float] = SIZE
) -> Figure:
    """Return a drawing of matplotlib as SVG. draw: draws into the empty figure. size: inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Drawing

    # the salt makes the ids that the SVG refers to different from those of the page's other figures
    text: Any = {"svg.fonttype": "none", "svg.hashsalt": label, "font.size": 9, "text.parse_math": False}
    text |= {"axes.edgecolor": FAINT, "grid.color": FAINT, "axes.unicode_minus": False}
    with rc_context(text):
        drawing, written = Drawing(figsize=size, layout="constrained"), io.StringIO()
        draw(drawing)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        drawing.savefig(written, format="svg", transparent=True, metadata=nothing)
    svg = written.getvalue()
    return Figure(label, svg[svg.index("<svg") :], numbers)


def chart(
    lines: Sequence[Line],
    x: str,
    y: str,
    *,
    logx: bool = False,
    logy: bool = False,
    marks: bool = False,
    size: tuple[float, float] = SIZE,
    limits: tuple[float | None, float | None] = (None, None),
    levels: Sequence[float] = (),
    share: bool = False,
    legend: bool = True,
) -> list[Figure]:
    """Draw lines; return no figure if no line has a point.

    limits: ends of the y axis. levels: values of y at which to draw a horizontal line. share: show y in %. An
    x axis of WHOLE has whole numbers only. legend: name the lines, if there are several.
    """
    lines = [line for line in lines if np.isfinite(line.y).any()]
    if not lines:
        return []

    def draw(figure: Any) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        axes = figure.subplots()
        for n, line in enumerate(lines):
            _draw(axes, line, n if line.slot is None else line.slot, marks)
        for axis, logarithmic in ((axes.xaxis, logx), (axes.yaxis, logy)):
            if logarithmic:
                _logarithmic(axes, axis)
        if share:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.10g}"))
        if x in WHOLE:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
        bottom, top = limits
        for level in levels:
            if (bottom is not None and level < bottom) or (top is not None and level > top):
                continue  # its label would shrink the axes
            axes.axhline(level, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
            across: Any = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8}
            axes.text(1.01, level, percent(level) if share else f"{level:g}", **across)
        axes.set_ylim(*limits)
        axes.set_xlabel(x)
        axes.set_ylabel(f"{y} (%)" if share else y)
        plain(axes)
        if legend and len({line.name for line in lines}) > 1:
            axes.legend(frameon=False, fontsize=8)

    return [figure(f"{y} against {x}", draw, _numbers(lines, x, y, share), size)]


def legend_of(names: Mapping[int, str]) -> Figure:
    """Return the legend of several figures. names: the lines' names by slot."""

    def draw(figure: Any) -> None:
        from matplotlib.lines import Line2D

        looks: list[Any] = [dict(zip(("color", "linestyle"), style(slot), strict=True)) for slot in names]
        lines = [Line2D([], [], **look) for look in looks]
        figure.legend(lines, list(names.values()), loc="center left", frameon=False)

    return figure("legend", draw, None, (5.0, 0.2 + 0.2 * len(names)))


def plain(axes: Any) -> None:
    """Draw a faint grid, and remove the frame above and to the right."""
    axes.grid(linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _logarithmic(axes: Any, axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    scale = axes.set_xscale if axis is axes.xaxis else axes.set_yscale
    scale("log", nonpositive="mask")
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def _numbers(lines: Sequence[Line], x: str, y: str, share: bool) -> Table:
    """Return the points of the lines, with their range if they have one; lines of points are marks only."""
    form = percentage if share else number
    ranged = any(line.low is not None for line in lines)
    rows = []
    for line in [line for line in lines if line.kind != "points"] or lines:
        count = len(line.x)
        for n in np.unique(np.linspace(0, count - 1, min(count, POINTS)).round().astype(int)):
            ends = (
                ""
                if line.low is None or line.high is None
                else f"{form(line.low[n])} to {form(line.high[n])}"
            )
            cell = form(line.y[n]) if np.isfinite(line.y[n]) else ""
            rows.append((line.name, number(line.x[n]), cell, *([ends] if ranged else [])))
    return Table(("line", x, y, *(["range"] if ranged else [])), rows)


def _draw(axes: Any, line: Line, slot: int, marks: bool) -> None:
    colour, dash = style(slot)
    drawn: Any = {"color": colour, "label": line.name}
    if line.kind == "points":
        axes.plot(line.x, line.y, linestyle="", marker=line.mark, markersize=6, zorder=4, **drawn)
        return
    drawn |= {"linestyle": dash, "linewidth": 1.7, "marker": "o" if marks or len(line.x) == 1 else ""}
    steps = line.kind == "steps"
    axes.plot(line.x, line.y, markersize=4, drawstyle="steps-post" if steps else "default", **drawn)
    if line.low is not None and line.high is not None and not steps:
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.12, linewidth=0)


def bar_chart(
    title: str,
    axis: tuple[str, str],
    ends: tuple[Values, Values],
    heights: Mapping[str, Values],
    *,
    limits: tuple[float | None, float | None] = (None, None),
    share: bool = False,
    numbers: bool = True,
) -> list[Figure]:
    """Draw stacked bars; return no figure without a bar.

    axis: the labels of the x and the y axis. ends: left and right of each bar. heights: those of all bars, by
    kind and from below; no bar is drawn for NaN. limits: the ends of the x axis. share: show heights in %.
    numbers: False if the page has a table of them beside the figure.
    """
    left, right = ends
    if not len(left) or not any(np.isfinite(of).any() for of in heights.values()):
        return []
    middle, form = (left + right) / 2, percentage if share else number

    def draw(figure: Any) -> None:
        from matplotlib.ticker import FuncFormatter

        axes, below = figure.subplots(), np.zeros(len(left))
        for n, (name, of) in enumerate(heights.items()):
            tall = np.nan_to_num(of)
            axes.bar(
                left, tall, right - left, below, align="edge", color=style(n)[0], linewidth=0, label=name
            )
            below += tall
        axes.locator_params(axis="x", nbins=7, integer=bool((middle % 1 == 0).all()))
        axes.locator_params(axis="y", nbins=5)
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{(100 if share else 1) * value:,.10g}")
        )
        axes.set_xlim(*limits)
        axes.set_xlabel(axis[0])
        axes.set_ylabel(f"{axis[1]} (%)" if share else axis[1])
        plain(axes)
        if len(heights) > 1:
            axes.legend(frameon=False, fontsize=8)

    rows = [[number(middle[n]), *(form(of[n]) for of in heights.values())] for n in range(len(left))]
    return [figure(title, draw, Table((axis[0], *heights), rows, 0) if numbers else None)]


def picture(
    path: Path,
    bands: Mapping[str, Band],
    x: str,
    y: str,
    *,
    title: str = "",
    scale: float = 1.0,
    marks: bool = False,
    logx: bool = False,
    limits: tuple[float | None, float | None] = (None, None),
) -> Path:
    """Write a picture of lines with bands and a legend, in the format of the path's suffix; return the path.
    bands: by the line's name. scale: the factor of y. marks: mark every point. limits: ends of the y axis."""
    from matplotlib.figure import Figure as Drawing
    from matplotlib.ticker import MaxNLocator

    figure = Drawing(figsize=(7.6, 4.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    for n, (name, band) in enumerate(bands.items()):
        if not len(band.x):
            continue
        colour, dash = style(n)
        drawn: Any = {"linewidth": 1.6, "marker": "o" if marks else "", "color": colour, "linestyle": dash}
        axes.plot(band.x, scale * band.mean, label=name, **drawn)
        low, high = scale * band.low, scale * band.high
        axes.fill_between(band.x, low, high, color=colour, alpha=0.12, linewidth=0)
    if logx:
        axes.set_xscale("log")
    elif all(band.x.dtype != object and not (band.x % 1).any() for band in bands.values()):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(*limits)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if title:
        axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    write_picture(figure, path)
    return path
