"""Charts of upright bars on top of each other, which say their values and may be saved as CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launch.results.downloads import caption
from launch.results.figures import colour_of, drawing, plain, style
from launch.results.readings import Read, number, readings
from launch.results.statistics import Values
from launch.terminal import percentage


@dataclass(frozen=True)
class Bars:
    """The heights of all bars of one kind; slot: what their colour is chosen by. NaN is no bar."""

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
    """An <svg> element and a link to its numbers; '' without a bar.

    title: it names the saved file, too. axis: the labels of the x and the y axis. left, right: the ends of
    each bar. bars: the first kind is below, the next on top of it. said: the tooltips' text by place, such as
    "client 3". limits: the ends of the x axis. size: inches of 9-point text. share: the heights are shares,
    shown in %.
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
