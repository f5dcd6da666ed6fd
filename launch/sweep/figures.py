"""Plots of a sweep: one line per row, the mean over seeds, with the range of the seeds as a band."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from launch.results.figures import COLOURS, DASHES
from launch.results.statistics import Band, band, heading, percent
from launch.sweep.recipe import Plot, Row
from launch.sweep.table import Results


def draw(plot: Plot, results: Results, folder: Path) -> Path:
    """Write the picture; returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = results.rows(plot.only, plot.at)
    over_grid = "." in plot.x
    figure, axes = pyplot.subplots(figsize=(7.6, 4.6), dpi=120, layout="constrained")
    scale = 100.0 if percent(plot.y) else 1.0
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(_name(row, {plot.x, *plot.at}), []).append(row)
    for n, (name, members) in enumerate(lines.items()):
        result = _over_grid(plot, results, members) if over_grid else _curves(plot, results, members)
        if not len(result.x):
            continue
        colour, dash = COLOURS[n % len(COLOURS)], DASHES[n // len(COLOURS) % len(DASHES)]
        mark = "o" if over_grid else ""
        y = scale * result.mean
        axes.plot(result.x, y, label=name, linewidth=1.6, marker=mark, color=colour, linestyle=dash)
        low, high = scale * result.low, scale * result.high
        axes.fill_between(result.x, low, high, color=colour, alpha=0.12, linewidth=0)
    if plot.logx:
        axes.set_xscale("log")
    axes.set_ylim(plot.low, plot.high)
    name = plot.x.partition(".")[2] if over_grid else {"MB": "megabytes, both directions"}.get(plot.x, plot.x)
    axes.set_xlabel(name)
    axes.set_ylabel(heading(plot.y).replace("@", " at round ") + (" (%)" if percent(plot.y) else ""))
    if plot.title:
        axes.set_title(plot.title, fontsize=11)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    path = folder / plot.file
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _name(row: Row, without: Collection[str]) -> str:
    rest = {k: v for k, v in row.point.items() if k not in without}
    return Row(row.variant, rest).name


def _curves(plot: Plot, results: Results, rows: list[Row]) -> Band:
    """Over rounds or megabytes; what all seeds have."""
    (row,) = rows
    result = band([results.pool.curve(t) for t in results.of(row)], plot.x, plot.y, plot.window)
    first = 1 if plot.logx else 0
    return Band(result.x[first:], result.low[first:], result.mean[first:], result.high[first:])


def _over_grid(plot: Plot, results: Results, rows: list[Row]) -> Band:
    result = [(row.point[plot.x], results.values(row, plot.y, plot.window)) for row in rows]
    result = [(x, v) for x, v in result if v]
    xs = np.array([x for x, _ in result], dtype=object if result and isinstance(result[0][0], str) else float)
    low, mean, high = (np.array([f(v) for _, v in result]) for f in (min, np.mean, max))
    return Band(xs, low, mean, high)
