"""Line charts as inline SVG. Colours are CSS variables of page.py: one drawing serves light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from launch.sweep.figures import COLOURS, DASHES

Values = npt.NDArray[np.float64]

INK, FAINT = "#010203", "#040506"
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--line)"} | {
    c.lower(): f"var(--c{n})" for n, c in enumerate(COLOURS)
}
_numbers = count()


@dataclass(frozen=True)
class Line:
    """A curve with its name and, over seeds, its band from low to high."""

    name: str
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None


def chart(lines: Sequence[Line], x: str, y: str, *, logx: bool = False, marks: bool = False) -> str:
    """An <svg> element; '' if no line has a point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [line for line in lines if np.isfinite(line.y).any()]
    if not lines:
        return ""
    style: Any = {"svg.fonttype": "none", "font.size": 9, "text.color": INK, "axes.labelcolor": INK}
    style |= {"xtick.color": INK, "ytick.color": INK, "axes.edgecolor": FAINT, "grid.color": FAINT}
    style |= {"text.parse_math": False, "axes.unicode_minus": False}
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(4.2, 2.8), layout="constrained")
        for n, line in enumerate(lines):
            colour, dash = COLOURS[n % len(COLOURS)], DASHES[n // len(COLOURS) % len(DASHES)]
            mark = "o" if marks or len(line.x) == 1 else ""
            axes.plot(line.x, line.y, color=colour, linestyle=dash, linewidth=1.7, marker=mark, markersize=4)
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
        if logx:
            axes.set_xscale("log")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        written = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
        pyplot.close(figure)
    return _inline(written.getvalue(), f"{y} against {x}")


def _inline(svg: str, label: str) -> str:
    """The element alone, its ids its own, its colours variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\1g{next(_numbers)}-", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
