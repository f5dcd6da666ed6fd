"""Tables and plots of a sweep as Markdown and pictures, with mean and deviation or range over seeds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fedsim.experiment import Experiment
from launch.results.differences import Compared
from launch.results.figures import picture
from launch.results.significance import leaders
from launch.results.statistics import (
    LIMITS,
    Band,
    band,
    heading,
    is_sum,
    less_is_better,
    percent,
    shown,
    value,
)
from launch.results.tables import Grid
from launch.runs.tables import Curve
from launch.sweep.finished import FinishedRun
from launch.sweep.recipe import Differences, Plot, Recipe, Row, Table, Trial


@dataclass(frozen=True)
class Results:
    """The results of a recipe."""

    recipe: Recipe
    trials: tuple[Trial, ...]
    finished: Mapping[str, FinishedRun]
    """The runs of finished trials, by id."""

    def of(self, row: Row) -> list[Curve]:
        return [self.finished[t.id].curve for t in self.trials if t.row == row and t.id in self.finished]

    def values(self, row: Row, expression: str, window: int = 1) -> list[float]:
        return [value(expression, curve, window) for curve in self.of(row)]

    def cell(self, row: Row, expression: str, window: int = 1) -> str:
        """Return a column's mean and deviation as text."""
        values = self.values(row, expression, window)
        return shown(expression, values) if values else "not run"

    def missing(self, row: Row) -> str:
        """Return how many runs are finished as text, if there are some and others are missing."""
        done, all_runs = len(self.of(row)), sum(t.row == row for t in self.trials)
        return f" ({done} of {all_runs} runs)" if 0 < done < all_runs else ""

    def scores(self, row: Row, expression: str, window: int = 1) -> dict[tuple[int, str], float]:
        """Return a column's mean over repetitions by seed and split, if all its repetitions are finished."""
        ids: dict[tuple[int, str], list[str]] = {}
        for t in self.trials:
            if t.row == row:
                ids.setdefault((t.seed, _split(t.experiment)), []).append(t.id)
        return {
            key: fmean(value(expression, self.finished[run].curve, window) for run in runs)
            for key, runs in ids.items()
            if all(run in self.finished for run in runs)
        }

    def rows(self, only: tuple[str, ...], at: Mapping[str, Any]) -> list[Row]:
        return [row for row in self.recipe.rows() if row.fits(only, at)]


def grid(results: Results, table: Table) -> Grid:
    """Return the cells of a table. Published values are in a separate line below those of the runs."""
    return _pivoted(results, table) if table.pivot else _plain(results, table)


def _plain(results: Results, table: Table) -> Grid:
    rows = results.rows(table.only, table.at)
    axes = _axes(rows)
    scores = {c: [results.scores(row, c, table.window) for row in rows] for c in table.columns if table.best}
    bold = {c: leaders(_comparable(c, s), least=less_is_better(c)) for c, s in scores.items()}
    lines = []
    for at, row in enumerate(rows):
        texts = [results.cell(row, column, table.window) for column in table.columns]
        if table.best:
            pairs = zip(texts, table.columns, strict=True)
            texts = [f"**{text}**" if at in bold[column] else text for text, column in pairs]
        label = row.variant.label + results.missing(row)
        lines.append((label, *(_setting(row.point.get(a, "")) for a in axes), *texts))
        text = [row.variant.published.get(column, "") for column in table.columns]
        if any(text):
            lines.append(("published", *("" for _ in axes), *text))
    heads = [f"{heading(c)}{' %' if percent(c) else ''}" for c in table.columns]
    return Grid(table.title, ("", *(a.partition(".")[2] for a in axes), *heads), tuple(lines))


def _comparable(
    expression: str, scores: Sequence[Mapping[tuple[int, str], float]]
) -> Sequence[Mapping[tuple[int, str], float]]:
    """Return the logarithms of bytes, seconds and joules, whose factors are compared; else the scores.

    A row with a zero, such as the bytes of pooled training, has no logarithms and is not compared.
    """
    if not is_sum(expression):
        return scores
    return [{} if 0 in s.values() else {key: math.log(x) for key, x in s.items()} for s in scores]


def _split(e: Experiment) -> str:
    """Return the data settings that paired runs of one seed share. Repetitions, such as folds, may differ."""
    return f"{e.dataset} {e.fraction} {e.inputs} {e.partition} {e.clients}"


def compare(results: Results, part: Differences) -> list[Compared]:
    """Return the differences between rows with finished runs, as one Compared per column."""
    rows = [row for row in results.rows(part.only, part.at) if results.of(row)]
    names = [row.name for row in rows]
    if part.against and part.against not in names:
        return []
    against = names.index(part.against) if part.against else None
    scores = {c: [results.scores(row, c, part.window) for row in rows] for c in part.columns}
    compared = [Compared.of(column, names, s, against) for column, s in scores.items()]
    return [c for c in compared if c is not None]


def _pivoted(results: Results, table: Table) -> Grid:
    (column,) = table.columns
    rows = results.rows(table.only, table.at)
    across = list(dict.fromkeys(row.point[table.pivot] for row in rows))
    rest = [a for a in _axes(rows) if a != table.pivot]
    lines: dict[tuple[str, ...], dict[object, str]] = {}
    for row in rows:
        name = (row.variant.label, *(_setting(row.point.get(a, "")) for a in rest))
        text = results.cell(row, column, table.window) + results.missing(row)
        lines.setdefault(name, {})[row.point[table.pivot]] = text
    header = ("", *(a.partition(".")[2] for a in rest), *(_setting(x) for x in across))
    unit = " (%)" if percent(column) else ""
    title = table.title or f"{heading(column)}{unit} over {table.pivot.partition('.')[2]}"
    return Grid(
        title, header, tuple((*name, *(line.get(x, "") for x in across)) for name, line in lines.items())
    )


def _axes(rows: Sequence[Row]) -> list[str]:
    """Return the grid keys in order, without those that have the same value in all rows."""
    keys = dict.fromkeys(key for row in rows for key in row.point)
    return [k for k in keys if len({str(row.point.get(k)) for row in rows}) > 1]


def _setting(x: object) -> str:
    return f"{x:g}" if isinstance(x, float) else str(x)


def draw(plot: Plot, results: Results, folder: Path) -> Path:
    over_grid = "." in plot.x
    lines: dict[str, list[Row]] = {}
    for row in results.rows(plot.only, plot.at):
        lines.setdefault(_name(row, {plot.x, *plot.at}), []).append(row)
    of = _over_grid if over_grid else _curves
    bands = {name: of(plot, results, members) for name, members in lines.items()}
    for row in results.rows(plot.limits, plot.at) if plot.limits else ():
        for x, title in zip(LIMITS, ("entropy", "KL of uploads"), strict=True):
            limit = _curves(replace(plot, x=x), results, [row])
            if np.isfinite(limit.x.astype(float)).all():  # without a precision (fola), there is no KL
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
    """Return the band over rounds or megabytes, as far as all seeds have values."""
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
