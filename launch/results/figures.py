"""Lines and bars, drawn by matplotlib: as SVG for a page, with their numbers as a table, or as a file.

Equal figures are equal bytes: files have no dates, and the ids of an SVG follow from the figure's label.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fedsim.errors import DiskError
from launch.numbers import number, percentage, target
from launch.table import Table
from launch.terminal import output_file

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure as Drawing

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
LONGEST = 100
"""The largest length of the name of a figure's file."""
SIZE = (3.3, 2.4)
"""Inches of a figure, with 9-point text: a column of a paper. Three of them fit beside each other."""
TWO_COLUMNS = 7.0
MOST_BARS = 1000
"""The largest number of bars of a kind; if there are more, neighbours are drawn as their mean."""
PALETTE = 128
"""The size of a PNG's palette. Lines, bands and the edges of text need fewer; a third of the bytes stays."""
NO_DATES: Mapping[str, Mapping[str, None]] = {
    "svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
    "pdf": dict.fromkeys(("CreationDate", "Creator", "Producer")),
    "png": {"Software": None},
}
Values = npt.NDArray[np.float64]
Limits = tuple[float | None, float | None]


@dataclass(frozen=True)
class Figure:
    """A figure. label: what it shows. draw: draws into an empty drawing of matplotlib. numbers: the table
    below it; None if the page has one beside it. size: inches. alone: draws it with the legend that a page
    has beside it."""

    kind: ClassVar[str] = "figure"
    label: str
    draw: Callable[[Any], None]
    numbers: Table | None = None
    size: tuple[float, float] = SIZE
    alone: Callable[[Any], None] | None = None

    def drawing(self) -> Drawing:
        """Return the figure as a drawing of matplotlib, as wide as one column of a paper or as two."""
        width = SIZE[0] if self.size[0] <= 1.1 * SIZE[0] else TWO_COLUMNS
        return self._drawn(self.alone or self.draw, (width, self.size[1]))

    def write(self, path: Path, drawing: Drawing | None = None) -> Path:
        """Write a file in the format of the path's suffix; return the path. drawing: by default as on a
        page."""
        with self._look():
            return write_picture(drawing or self._drawn(self.draw, self.size), path, 120)

    @cached_property
    def svg(self) -> str:
        text = io.BytesIO()
        with self._look():
            drawing = self._drawn(self.draw, self.size)
            drawing.savefig(text, format="svg", transparent=True, metadata=NO_DATES["svg"])
        svg = text.getvalue().decode()
        return svg[svg.index("<svg") :]

    def _drawn(self, draw: Callable[[Any], None], size: tuple[float, float]) -> Drawing:
        from matplotlib.figure import Figure as Drawing

        with self._look():
            drawing = Drawing(figsize=size, layout="constrained")
            draw(drawing)
        return drawing

    def _look(self) -> Any:
        from matplotlib import rc_context

        # the salt makes the ids that the SVG refers to different from those of the page's other figures
        text: Any = {"svg.fonttype": "none", "svg.hashsalt": self.label, "pdf.fonttype": 42}
        text |= {"font.size": 9, "text.parse_math": False, "axes.unicode_minus": False}
        return rc_context(text | {"axes.edgecolor": FAINT, "grid.color": FAINT})


def write_picture(drawing: Drawing, path: Path, dpi: float | None = None) -> Path:
    """Write a drawing in the format of the path's suffix, by default PNG; return the path.

    dpi: dots per inch; by default the drawing's.
    """
    path = path if path.suffix else path.with_suffix(".png")
    form, content = path.suffix[1:].lower(), io.BytesIO()
    drawing.savefig(content, format=form, dpi=dpi or "figure", metadata=dict(NO_DATES.get(form, {})))
    if form == "png":
        from PIL import Image

        image = Image.open(content).convert("RGB")
        content = io.BytesIO()
        few = image.quantize(PALETTE, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        few.save(content, "png", optimize=True)
    with output_file(path) as file:
        file.write(content.getvalue())
    return path


def write_figures(folder: Path, figures: Iterable[Figure]) -> list[Path]:
    """Write each figure as SVG and PDF into a folder, under the words of its label; return the paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise DiskError(f"cannot make the folder {folder}: {e.strerror}") from None
    named = {re.sub(r"\W+", "_", figure.label).strip("_")[:LONGEST]: figure for figure in figures}
    return [
        figure.write(folder / f"{name}.{form}", figure.drawing())
        for name, figure in named.items()
        for form in ("svg", "pdf")
    ]


@dataclass(frozen=True)
class Line:
    """A curve with a name and, over seeds, a band from low to high.

    slot: the index of colour and dashes; by default the line's position. kind: "steps" keeps each value up to
    the next point and has no band, because bands of steps would hide each other; "points" draws no line.
    "bars" draws a bar of this width at each x, from low. mark: matplotlib's marker of points. areas: those of
    marks, in square points.
    """

    name: str
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None
    slot: int | None = None
    kind: Literal["curve", "steps", "points", "bars"] = "curve"
    mark: str = "o"
    areas: Values | None = None
    width: float = 0.0

    @staticmethod
    def of(name: str, table: pandas.DataFrame, **look: Any) -> Line:
        """Return the line of a table with the columns x, y and, for a band, low and high."""
        return Line(name, **{str(key): values.to_numpy() for key, values in table.items()}, **look)


def style(slot: int) -> tuple[str, str]:
    """Return the colour and the dashes of a line, for matplotlib."""
    return COLOURS[slot % len(COLOURS)], DASHES[slot // len(COLOURS) % len(DASHES)]


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
    label: str = "",
    title: str = "",
    logx: bool = False,
    logy: bool = False,
    marks: bool = False,
    size: tuple[float, float] = SIZE,
    limits: Limits = (None, None),
    xlimits: Limits = (None, None),
    levels: Sequence[float] = (),
    shares: str = "",
    legend: Literal["", "inside", "right"] = "inside",
    numbers: Table | Literal["points"] | None = "points",
) -> list[Figure]:
    """Draw lines; return no figure if no line has a point.

    label: by default "Y against X". limits, xlimits: ends of the y and the x axis. levels: values of y at
    which to draw a horizontal line. shares: the axes that are shown in %, "y" or "xy"; the first bisector is
    then drawn for both. An x axis of WHOLE has whole numbers only. legend: where the lines are named, if
    there are several. numbers: the table below the figure, if any; by default, the points of the lines.
    """
    lines = [line for line in lines if np.isfinite(line.y).any()]
    if not lines:
        return []

    def draw(drawing: Any, legend: str) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        axes = drawing.subplots()
        for n, line in enumerate(lines):
            _draw(axes, line, n if line.slot is None else line.slot, marks)
        for axis, logarithmic in ((axes.xaxis, logx), (axes.yaxis, logy)):
            if logarithmic:
                _logarithmic(axes, axis)
        for name in shares:
            axis = axes.xaxis if name == "x" else axes.yaxis
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.10g}"))
        if any(line.kind == "bars" for line in lines):
            axes.locator_params(axis="x", nbins=7, integer=bool((lines[0].x % 1 == 0).all()))
            axes.locator_params(axis="y", nbins=5)
        elif shares == "xy":
            axes.plot([0, 1], [0, 1], color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
        elif x in WHOLE or (
            marks and all(line.x.dtype != object and not (line.x % 1).any() for line in lines)
        ):
            axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
        bottom, top = limits
        for level in levels:
            if (bottom is not None and level < bottom) or (top is not None and level > top):
                continue  # its label would shrink the axes
            axes.axhline(level, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
            across: Any = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8}
            axes.text(1.01, level, target(level) if shares else f"{level:g}", **across)
        axes.set_ylim(*limits)
        axes.set_xlim(*xlimits)
        axes.set_xlabel(f"{x} (%)" if "x" in shares else x)
        axes.set_ylabel(f"{y} (%)" if shares else y)
        axes.set_title(title, fontsize=9)
        plain(axes)
        named = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        if legend == "inside" and len(named) > 1:
            axes.legend(frameon=False, fontsize=8)
        elif legend and named and (legend == "right" or len(named) > 1):
            look: Any = {"frameon": False, "fontsize": 8, "loc": f"outside {legend} center"}
            drawing.legend(named.values(), named.keys(), **look)

    table = _numbers(lines, x, y, bool(shares)) if numbers == "points" else numbers
    alone = partial(draw, legend=legend if legend == "inside" else "lower")
    return [Figure(label or f"{y} against {x}", partial(draw, legend=legend), table, size, alone)]


def legend_of(names: Mapping[int, str]) -> Figure:
    """Return the legend of several figures. names: the lines' names by slot."""

    def draw(figure: Any) -> None:
        from matplotlib.lines import Line2D

        looks: list[Any] = [dict(zip(("color", "linestyle"), style(slot), strict=True)) for slot in names]
        lines = [Line2D([], [], **look) for look in looks]
        figure.legend(lines, list(names.values()), loc="center left", frameon=False)

    return Figure("legend", draw, None, (5.0, 0.2 + 0.2 * len(names)))


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
            cell, at = form(line.y[n]) if np.isfinite(line.y[n]) else "", line.x[n]
            text = at if isinstance(at, str) else number(at)
            rows.append((line.name, text, cell, *([ends] if ranged else [])))
    return Table(("line", x, y, *(["range"] if ranged else [])), rows)


def _draw(axes: Any, line: Line, slot: int, marks: bool) -> None:
    colour, dash = style(slot)
    drawn: Any = {"color": colour, "label": line.name}
    if line.kind == "bars":
        count, some = len(line.x), -(-len(line.x) // MOST_BARS)
        at = np.arange(0, count, some)
        x, y, low = (
            None if v is None else np.add.reduceat(np.nan_to_num(v), at) / np.diff(np.append(at, count))
            for v in (line.x, line.y, line.low)
        )
        axes.bar(x, y, some * line.width, low, linewidth=0, **drawn)
        return
    if line.kind == "points":
        axes.plot(line.x, line.y, linestyle="", marker=line.mark, markersize=6, zorder=4, **drawn)
        return
    drawn |= {"linestyle": dash, "linewidth": 1.7, "marker": "o" if marks or len(line.x) == 1 else ""}
    steps = line.kind == "steps"
    axes.plot(line.x, line.y, markersize=4, drawstyle="steps-post" if steps else "default", **drawn)
    if line.areas is not None:
        axes.scatter(line.x, line.y, line.areas, color=colour, linewidth=0, zorder=4)
    if line.low is not None and line.high is not None and not steps:
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.12, linewidth=0)


def bar_chart(
    title: str,
    axis: tuple[str, str],
    bars: tuple[Values, float],
    heights: Mapping[str, Values],
    *,
    xlimits: Limits = (None, None),
    shares: str = "",
    tabulated: bool = True,
) -> list[Figure]:
    """Draw stacked bars; return no figure without a bar.

    axis: the labels of the x and the y axis. bars: the middle of each, and their width. heights: those of all
    bars, by kind and from below; no bar is drawn for NaN. xlimits: the ends of the x axis. shares: "y" shows
    heights in %. tabulated: False if the page has a table of them beside the figure.
    """
    (middle, width), below, lines = bars, np.zeros(len(bars[0])), []
    for name, of in heights.items():
        lines.append(Line(name, middle, of, below.copy(), kind="bars", width=width))
        below += np.nan_to_num(of)
    form, shown = percentage if shares else number, range(len(middle) if tabulated else 0)
    rows = [[number(middle[n]), *(form(of[n]) for of in heights.values())] for n in shown]
    table = Table((axis[0], *heights), rows, 0) if tabulated else None
    return chart(lines, *axis, label=title, shares=shares, xlimits=xlimits, numbers=table)
