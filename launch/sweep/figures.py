"""Plots of a sweep: one line per row, the mean over seeds, with the range of the seeds as a band."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from launch.results.figures import picture
from launch.results.statistics import LIMITS, Band, band, heading, percent
from launch.sweep.recipe import Plot, Row
from launch.sweep.table import Results


def draw(plot: Plot, results: Results, folder: Path) -> Path:
    """Write the picture; returns its path."""
    over_grid = "." in plot.x
    lines: dict[str, list[Row]] = {}
    for row in results.rows(plot.only, plot.at):
        lines.setdefault(_name(row, {plot.x, *plot.at}), []).append(row)
    of = _over_grid if over_grid else _curves
    bands = {name: of(plot, results, members) for name, members in lines.items()}
    for row in results.rows(plot.limits, plot.at) if plot.limits else ():
        for x, title in zip(LIMITS, ("entropy", "KL of uploads"), strict=True):
            limit = _curves(replace(plot, x=x), results, [row])
            if np.isfinite(limit.x.astype(float)).all():  # fola sends no precision, and has no KL
                bands[f"{_name(row, plot.at)}: {title}"] = limit
    x = plot.x.partition(".")[2] if over_grid else {"MB": "megabytes, both directions"}.get(plot.x, plot.x)
    y = heading(plot.y).replace("@", " at round ") + (" (%)" if percent(plot.y) else "")
    return picture(
        folder / plot.file,
        bands,
        x,
        y,
        title=plot.title,
        scale=100.0 if percent(plot.y) else 1.0,
        marks=over_grid,
        logx=plot.logx,
        limits=(plot.low, plot.high),
    )


def _name(row: Row, without: Collection[str]) -> str:
    rest = {k: v for k, v in row.point.items() if k not in without}
    return Row(row.variant, rest).name


def _curves(plot: Plot, results: Results, rows: list[Row]) -> Band:
    """Over rounds or megabytes; what all seeds have."""
    (row,) = rows
    result = band(results.of(row), plot.x, plot.y, plot.window)
    first = 1 if plot.logx else 0
    return Band(result.x[first:], result.low[first:], result.mean[first:], result.high[first:])


def _over_grid(plot: Plot, results: Results, rows: list[Row]) -> Band:
    result = [(row.point[plot.x], results.values(row, plot.y, plot.window)) for row in rows]
    result = [(x, v) for x, v in result if v]
    xs = np.array([x for x, _ in result], dtype=object if result and isinstance(result[0][0], str) else float)
    low, mean, high = (np.array([f(v) for _, v in result]) for f in (min, np.mean, max))
    return Band(xs, low, mean, high)
