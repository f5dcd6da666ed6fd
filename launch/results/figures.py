"""Lines and bars as inline SVG. Colours are CSS variables of report.css, for light and dark pages."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

from launch.configuration.target_accuracy import percent
from launch.results.downloads import caption
from launch.results.pictures import write_picture
from launch.results.readings import Read, number, readings
from launch.results.statistics import Band, Values
from launch.terminal import percentage

# Okabe and Ito's palette for any colour vision, with #882255 in place of yellow, and black last
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#000000")
DASHES = ("-", "--", ":", "-.")

INK, FAINT = "#010203", "#040506"
_SLOTS = tuple(c.lower().replace("#000000", "#000001") for c in COLOURS)
"""Colours for matplotlib. It omits #000000 in an SVG, so black is #000001, which a variable can replace."""
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--line)"} | {c: f"var(--c{n})" for n, c in enumerate(_SLOTS)}
_numbers = count()
WHOLE = ("round", "client, sorted")
"""Axes whose values are whole numbers."""
DECADES = 30
"""The ratio of the largest to the smallest positive value from which values are `wide`."""


@dataclass(frozen=True)
class Line:
    """A curve with a name and, over seeds, a band from low to high.

    slot: the index of colour and dashes; by default the line's position, and -1 for the colour of text. kind:
    "steps" keeps each value up to the next point and shows the range as text only; "points" draws no line.
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
    if slot < 0:
        return INK, "-"
    return _SLOTS[slot % len(_SLOTS)], DASHES[slot // len(_SLOTS) % len(DASHES)]


def wide(values: Sequence[Values]) -> bool:
    """Return whether the positive values span a ratio of at least DECADES, which needs a logarithmic axis."""
    result = np.concatenate([*values, np.zeros(0)])
    result = result[np.isfinite(result) & (result > 0)]
    return bool(len(result)) and bool(result.max() >= DECADES * result.min())


def chart(
    lines: Sequence[Line],
    x: str,
    y: str,
    *,
    logx: bool = False,
    logy: bool = False,
    marks: bool = False,
    size: tuple[float, float] = (4.2, 2.8),
    limits: tuple[float | None, float | None] = (None, None),
    levels: Sequence[float] = (),
    share: bool = False,
) -> str:
    """Draw an <svg> element that shows the values under the pointer, and a link to a CSV file; '' if no line
    has a point. Each line is a group of class l<slot> with its name as tooltip. size: inches, with 9-point
    text. limits: ends of the y axis. levels: values of y at which to draw a horizontal line. share: show y in
    %. An x axis of WHOLE has whole numbers only."""
    lines = [line for line in lines if np.isfinite(line.y).any()]
    if not lines:
        return ""
    slots = [n if line.slot is None else line.slot for n, line in enumerate(lines)]

    def draw(figure: Any) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

        axes = figure.subplots()
        for n, (line, slot) in enumerate(zip(lines, slots, strict=True)):
            _draw(axes, line, slot, f"line-{n}", marks)
        for axis, logarithmic in ((axes.xaxis, logx), (axes.yaxis, logy)):
            if logarithmic:
                scale = axes.set_xscale if axis is axes.xaxis else axes.set_yscale
                scale("log", nonpositive="mask")
                low, high = axis.get_view_interval()
                few = high < 1000 * low
                axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
                axis.set_minor_formatter(NullFormatter())
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

    names = [(slot, line.name) for slot, line in zip(slots, lines, strict=True)]

    def over(figure: Any) -> str:
        alone = len({line.name for line in lines}) == 1
        form = percentage if share else number
        read = [_read(line, slot, alone, form) for line, slot in zip(lines, slots, strict=True)]
        return readings(figure.axes[0], read, lambda at: f"{x.partition(',')[0]} {number(at)}")

    title = f"{y} against {x}"
    return drawing(title, names, draw, over, size=size) + _table(title, lines, x, y)


def colour_of(slot: int) -> str:
    """Return the colour of a line as CSS."""
    return _VARIABLES[style(slot)[0]]


def _read(line: Line, slot: int, alone: bool, form: Callable[[float], str]) -> Read:
    name, holds = "" if alone else line.name, line.kind == "steps"
    return Read(name, colour_of(slot), line.x, line.y, line.low, line.high, holds, form=form)


def _table(title: str, lines: Sequence[Line], x: str, y: str) -> str:
    """Return a caption with the points of all lines as CSV, with the range of y if there is one. Lines of
    kind "points" are left out if there are other lines."""
    drawn = [line for line in lines if line.kind in ("curve", "steps")] or lines
    ranged = any(line.low is not None for line in drawn)
    heads = ["line", x, y, *(["lowest", "highest"] if ranged else [])]

    def rows(line: Line) -> Iterator[tuple[object, ...]]:
        none = np.full(len(line.x), np.nan)
        ends = [end if end is not None else none for end in (line.low, line.high)] if ranged else []
        yield from (
            (line.name, *values)
            for values in zip(*(v.tolist() for v in (line.x, line.y, *ends)), strict=True)
        )

    return caption(title, heads, (row for line in drawn for row in rows(line)))


def plain(axes: Any) -> None:
    """Draw a faint grid, and remove the frame above and to the right."""
    axes.grid(linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def drawing(
    label: str,
    names: Sequence[tuple[int, str]],
    draw: Callable[[Any], None],
    over: Callable[[Any], str] | None = None,
    *,
    size: tuple[float, float] = (4.2, 2.8),
) -> str:
    """Return a drawing of matplotlib as an <svg> element.

    names: slot and name of each part. Part n is drawn with the gid line-<n> and becomes a group of class
    l<slot> with the name as tooltip. draw: draws into the figure, with the colours of `style`, INK and FAINT
    only. over: returns SVG to add on top of the figure. size: inches, with 9-point text.
    """
    pyplot = pyplot_without_display()
    text: Any = {"svg.fonttype": "none", "font.size": 9, "text.color": INK, "axes.labelcolor": INK}
    text |= {"xtick.color": INK, "ytick.color": INK, "axes.edgecolor": FAINT, "grid.color": FAINT}
    text |= {"text.parse_math": False, "axes.unicode_minus": False}
    with pyplot.rc_context(text):
        figure = pyplot.figure(figsize=size, layout="constrained")
        draw(figure)
        written = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
        above = over(figure) if over else ""
        pyplot.close(figure)
    return _inline(written.getvalue(), label, names).replace("</svg>", f"{above}</svg>", 1)


def pyplot_without_display() -> Any:
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot

    return pyplot


def _draw(axes: Any, line: Line, slot: int, gid: str, marks: bool) -> None:
    colour, dash = style(slot)
    ranged = line.low is not None and line.high is not None
    steps = line.kind == "steps"
    if line.kind == "points":
        if ranged:
            axes.vlines(line.x, line.low, line.high, color=colour, linewidth=2.2, alpha=0.6, gid=gid)
        points: Any = {"linestyle": "", "marker": line.mark, "markersize": 6, "zorder": 4, "gid": gid}
        axes.plot(line.x, line.y, color=colour, **points)
        return
    mark = "o" if marks or len(line.x) == 1 else ""
    drawn: Any = {"color": colour, "linestyle": dash, "linewidth": 1.7, "gid": gid}
    axes.plot(
        line.x, line.y, marker=mark, markersize=4, drawstyle="steps-post" if steps else "default", **drawn
    )
    if ranged and not steps:  # bands of steps would hide each other
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.12, linewidth=0, gid=gid)


def _inline(svg: str, label: str, names: Sequence[tuple[int, str]]) -> str:
    """Return the <svg> element, with unique ids and with CSS variables as colours."""

    def named(result: re.Match[str]) -> str:
        slot, name = names[int(result[1])]
        return f'<g class="l{slot}"><title>{escape(name)}</title>'

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'<g id="line-(\d+)">', named, svg)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\1g{next(_numbers)}-", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


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
    from matplotlib.ticker import MaxNLocator

    pyplot = pyplot_without_display()
    figure, axes = pyplot.subplots(figsize=(7.6, 4.6), dpi=120, layout="constrained")
    for n, (name, band) in enumerate(bands.items()):
        if not len(band.x):
            continue
        colour, dash = COLOURS[n % len(COLOURS)], DASHES[n // len(COLOURS) % len(DASHES)]
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
    pyplot.close(figure)
    return path


@dataclass(frozen=True)
class Bars:
    """The heights of all bars of one kind; no bar is drawn for NaN. slot: the index of the bars' colour."""

    name: str
    heights: Values
    slot: int = 0


def bar_chart(
    title: str,
    axis: tuple[str, str],
    left: Values,
    right: Values,
    bars: Sequence[Bars],
    *,
    said: Callable[[int], str],
    limits: tuple[float | None, float | None] = (None, None),
    size: tuple[float, float] = (4.2, 2.8),
    share: bool = False,
) -> str:
    """Draw bars as an <svg> element with a link to the numbers; '' without a bar.

    title: the title, which also names the saved file. axis: the labels of the x and the y axis. left, right:
    the ends of each bar. bars: the kinds of bars, stacked from below. said: the tooltip's text for the index
    of a bar, such as "client 3". limits: the ends of the x axis. size: inches, with 9-point text. share:
    whether the heights are shares, which are shown in %.
    """
    if not len(left) or not any(np.isfinite(b.heights).any() for b in bars):
        return ""

    def draw(figure: Any) -> None:
        from matplotlib.ticker import FuncFormatter

        axes, below = figure.subplots(), np.zeros(len(left))
        for b in bars:
            heights = np.nan_to_num(b.heights)
            axes.bar(left, heights, right - left, below, align="edge", color=style(b.slot)[0], linewidth=0)
            below += heights
        whole = bool((((left + right) / 2) % 1 == 0).all())
        axes.locator_params(axis="x", nbins=7, integer=whole)
        axes.locator_params(axis="y", nbins=5)
        unit = 100 if share else 1
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{unit * value:,.10g}"))
        axes.set_xlim(*limits)
        axes.set_xlabel(axis[0])
        axes.set_ylabel(f"{axis[1]} (%)" if share else axis[1])
        plain(axes)

    middle = (left + right) / 2

    def over(figure: Any) -> str:
        alone, form = len(bars) == 1, percentage if share else number
        tops = np.cumsum([np.nan_to_num(b.heights) for b in bars], axis=0)
        read = [
            Read("" if alone else b.name, colour_of(b.slot), middle, top, said=b.heights, form=form)
            for b, top in zip(bars, tops, strict=True)
        ]
        return readings(figure.axes[0], read, lambda at: said(int(np.abs(middle - at).argmin())))

    rows = ([said(n), *(float(b.heights[n]) for b in bars)] for n in range(len(left)))
    saved = caption(title, [axis[0], *(b.name for b in bars)], rows)
    return drawing(title, [], draw, over, size=size) + saved
