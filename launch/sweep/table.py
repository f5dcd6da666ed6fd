"""Tables and figures of a sweep, with mean and deviation or range over seeds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from launch.numbers import extent, setting
from launch.results.columns import Column, column
from launch.results.differences import Compared
from launch.results.figures import Figure, Line, chart
from launch.results.groups import Group, PairKey
from launch.results.significance import leaders
from launch.runs.tables import LIMITS
from launch.sweep.finished import FinishedRun
from launch.sweep.recipe import Differences, Part, Plot, Recipe, Row, Table, Trial
from launch.table import Table as TextTable

SIZE = (7.6, 4.6)


@dataclass(frozen=True)
class Results:
    """The results of a recipe. finished: the runs of finished trials, by id."""

    recipe: Recipe
    trials: tuple[Trial, ...]
    finished: Mapping[str, FinishedRun]

    @cached_property
    def groups(self) -> list[tuple[Row, Group]]:
        """Every row with its finished runs. A seed of which a repetition is missing has no key."""
        result = []
        for row in self.recipe.rows():
            trials = [t for t in self.trials if t.row == row]
            missing = {key_of(t) for t in trials if t.id not in self.finished}
            done = [t for t in trials if t.id in self.finished]
            curves = [self.finished[t.id].curve for t in done]
            keys = [key if (key := key_of(t)) not in missing else None for t in done]
            part = f" ({len(done)} of {len(trials)} runs)" if 0 < len(done) < len(trials) else ""
            result.append((row, Group(part, curves, keys)))
        return result

    def of(self, part: Part) -> list[tuple[Row, Group]]:
        """Return the rows that a part of the page shows."""
        return [(row, group) for row, group in self.groups if row.fits(part)]

    def table(self, part: Table, counted: bool = False) -> TextTable:
        """Return the cells of a table; published values are in a separate row below those of the runs.
        counted: with a column of the numbers of runs."""
        rows = self.of(part)
        return _pivoted(rows, part, counted) if part.pivot else _plain(rows, part, counted)

    def compare(self, part: Differences) -> list[Compared]:
        """Return the differences between rows with finished runs, as one Compared per column."""
        rows = [(row, group) for row, group in self.of(part) if group.keys]
        names = [row.name for row, _ in rows]
        if part.against and part.against not in names:
            return []
        against = names.index(part.against) if part.against else None
        scores = {c: [group.scores(c, part.window) for _, group in rows] for c in part.columns}
        compared = [Compared.of(column(c), names, s, against) for c, s in scores.items()]
        return [c for c in compared if c is not None]

    def figure(self, plot: Plot) -> Figure:
        """Return the figure of a plot; its first rounds are left out of a logarithmic axis."""
        lines: dict[str, list[tuple[Row, Group]]] = {}
        for row, group in self.of(plot):
            lines.setdefault(_name(row, {plot.x, *plot.at}), []).append((row, group))
        drawn = []
        for name, members in lines.items():
            line = (
                _over_grid(plot, name, members)
                if plot.over_grid
                else _curve(plot, plot.x, name, members[0][1])
            )
            drawn += line
        for row, group in self.of(replace(plot, only=plot.limits)) if plot.limits else ():
            for x, what in zip(LIMITS, ("entropy", "KL of uploads"), strict=True):
                if group.has(x) and group.table[x].notna().all():  # fola has no precision, so no KL
                    drawn += _curve(plot, x, f"{_name(row, plot.at)}: {what}", group)
        y, share = _y(plot)
        ends = [end / 100 if end is not None and share else end for end in (plot.low, plot.high)]
        (figure,) = chart(
            drawn,
            plot.x.partition(".")[2] if plot.over_grid else MEGABYTES.get(plot.x, plot.x),
            y,
            label=plot.file.rpartition(".")[0],
            title=plot.title,
            marks=plot.over_grid,
            logx=plot.logx,
            limits=(ends[0], ends[1]),
            shares="y" if share else "",
            legend="right",
            size=SIZE,
        ) or [Figure(plot.title or plot.file, lambda drawing: None, size=SIZE)]
        return figure


MEGABYTES = {"MB": "megabytes, both directions"}


def key_of(trial: Trial) -> PairKey:
    """Return seed and data settings, which paired runs share. Repetitions, such as folds, may differ."""
    e = trial.experiment
    return trial.seed, f"{e.dataset} {e.fraction} {e.inputs} {e.partition} {e.clients}"


def _plain(rows: Sequence[tuple[Row, Group]], part: Table, counted: bool) -> TextTable:
    axes = _axes([row for row, _ in rows])
    columns = [column(c) for c in part.columns]
    first = 1 + len(axes) + counted
    lines: list[tuple[str, ...]] = []
    places = []
    for row, group in rows:
        at = [setting(row.point.get(a, "")) for a in axes]
        cells = [_cell(c, group, part.window) for c in columns]
        places.append(len(lines))
        lines.append((row.variant.label + group.label, *at, *[str(len(group.keys))] * counted, *cells))
        published = [row.variant.published.get(c, "") for c in part.columns]
        if any(published):
            lines.append(("published", *[""] * (first - 1), *published))
    best = {
        (places[n], first + place)
        for place, c in enumerate(columns if part.best else ())
        for n in leaders(
            [_comparable(c, group.scores(c.text, part.window)) for _, group in rows], least=c.least
        )
    }
    heads = ("", *(a.partition(".")[2] for a in axes), *["n"] * counted, *(c.head for c in columns))
    return TextTable(heads, lines, title=part.title, best=best)


def _pivoted(rows: Sequence[tuple[Row, Group]], part: Table, counted: bool) -> TextTable:
    (c,) = map(column, part.columns)
    across = list(dict.fromkeys(row.point[part.pivot] for row, _ in rows))
    rest = [a for a in _axes([row for row, _ in rows]) if a != part.pivot]
    lines: dict[tuple[str, ...], dict[object, str]] = {}
    counts: dict[tuple[str, ...], list[int]] = {}
    for row, group in rows:
        name = (row.variant.label, *(setting(row.point.get(a, "")) for a in rest))
        lines.setdefault(name, {})[row.point[part.pivot]] = _cell(c, group, part.window) + group.label
        counts.setdefault(name, []).append(len(group.keys))
    heads = ("", *(a.partition(".")[2] for a in rest), *["n"] * counted, *map(setting, across))
    title = part.title or f"{c.heading}{' (%)' * c.percent} over {part.pivot.partition('.')[2]}"
    cells = [
        (*name, *[extent(counts[name])] * counted, *(line.get(x, "") for x in across))
        for name, line in lines.items()
    ]
    return TextTable(heads, cells, title=title)


def _cell(c: Column, group: Group, window: int) -> str:
    return c.shown(group.values(c.text, window)) if group.keys else "not run"


def _comparable(c: Column, scores: Mapping[PairKey, float]) -> Mapping[PairKey, float]:
    """Return the logarithms of bytes, seconds and joules, whose factors are compared; else the scores.

    A row with a zero, such as the bytes of pooled training, has no logarithms and is not compared.
    """
    if not c.is_sum:
        return scores
    return {} if 0 in scores.values() else {key: math.log(x) for key, x in scores.items()}


def _axes(rows: Sequence[Row]) -> list[str]:
    """Return the grid keys in order, without those that have the same value in all rows."""
    keys = dict.fromkeys(key for row in rows for key in row.point)
    return [k for k in keys if len({str(row.point.get(k)) for row in rows}) > 1]


def _name(row: Row, without: Collection[str]) -> str:
    rest = {k: v for k, v in row.point.items() if k not in without}
    return Row(row.variant, rest).name


def _y(plot: Plot) -> tuple[str, bool]:
    """Return the label of the y axis, and whether it is in %."""
    metric = column(plot.y if plot.over_grid else f"{plot.y}@end")
    text = metric.heading if plot.over_grid else metric.heading.removesuffix("@end")
    return text.replace("@", " at round "), metric.percent


def _curve(plot: Plot, x: str, name: str, group: Group) -> list[Line]:
    """Return the line over rounds or megabytes, as far as all seeds have values."""
    if not group.keys:
        return []
    return [Line.of(name, group.band(x, plot.y, plot.window)[int(plot.logx) :])]


def _over_grid(plot: Plot, name: str, rows: Sequence[tuple[Row, Group]]) -> list[Line]:
    """Return the line over the values of a grid key."""
    import numpy as np

    c = column(plot.y)
    values = [(row.point[plot.x], group.values(c.text, plot.window)) for row, group in rows if group.keys]
    if not values:
        return []
    xs = np.array([x for x, _ in values], dtype=object if isinstance(values[0][0], str) else float)
    low, mean, high = (np.array([f(v) for _, v in values]) for f in (min, np.mean, max))
    return [Line(name, xs, mean, low, high)]
