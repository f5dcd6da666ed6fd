"""Figures and tables of the bytes to an accuracy, and of the group that leads at each budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from launch.numbers import between, megabytes
from launch.results.figures import COLOURS, DASHES, TWO_COLUMNS, Figure, Line, chart, plain, style, wide
from launch.results.frontier import Cost, by_budget, ranking, winning_ranges
from launch.results.groups import RunGroup
from launch.results.html import Part, Text
from launch.results.tables import STOPPED, UNFINISHED, costs, name
from launch.table import Table

if TYPE_CHECKING:
    import pandas


def slots_of(groups: Sequence[RunGroup]) -> list[int]:
    """Return the slot (figures.Line) of each group. If there are several algorithms with few groups each, an
    algorithm has one colour, and its groups have different dashes. Otherwise slots are 0, 1, 2, ..."""
    names = [g.settings["algo"] for g in groups]
    algorithms = list(dict.fromkeys(names))
    places = [names[:n].count(name) for n, name in enumerate(names)]
    if not 1 < len(algorithms) <= len(COLOURS) or max(places) >= len(DASHES):
        return list(range(len(groups)))
    return [algorithms.index(name) + len(COLOURS) * place for name, place in zip(names, places, strict=True)]


def against_bytes(
    groups: Sequence[RunGroup], lines: Mapping[int, RunGroup], levels: Sequence[float], key: Figure
) -> Iterator[Part]:
    """Yield a chart and tables of the bytes that groups need to reach accuracies. lines: the groups of the
    chart by slot."""
    budgets = {slot: b for slot, g in lines.items() if len(b := by_budget(g))}
    if not budgets:
        return
    bottom = _bottom(list(budgets.values()), levels)
    drawn = [line for slot, b in budgets.items() for line in _drawn(lines[slot], slot, b, bottom)]
    yield key
    yield from chart(
        drawn,
        "megabytes, both directions",
        "best accuracy so far",
        logx=wide([line.x for line in drawn]),
        size=(TWO_COLUMNS, 4.0),
        limits=(bottom, None),
        levels=levels,
        shares="y",
        legend="",
    )
    notes = ["The further left a line is, the fewer bytes it needs. Lines are means over the seeds."]
    if levels:
        notes.append("A dashed line across is an accuracy of the tables below.")
    if any(g.stopped for g in groups):
        notes.append(f"{STOPPED} ended (◆) when it had reached its target accuracy.")
    if not all(g.done for g in groups):
        notes.append(f"{UNFINISHED} is not finished (×): it may be resumed.")
    yield Text(" ".join(notes))
    slots = {id(g): slot for slot, g in lines.items()}
    for level, table in zip(levels, costs(groups, levels), strict=True):
        yield Text(table.title, "heading")
        yield from _ranges(groups, ranking(groups, level), slots, table.title)
        yield table
    if levels:
        yield Text(
            "A dot is the median of the bytes with which the seeds of a group reach the accuracy (Kaplan and "
            "Meier), a mark is a seed, and a triangle is a seed that had not reached it with all of its "
            "bytes. The smallest median first. Factors of bytes are paired by seed, with their 95 % "
            "interval, for all comparisons. Where too few of the seeds reach the accuracy, their number "
            "stands for the median; a percentage in brackets is the best accuracy of a group that does not."
        )


def _bottom(budgets: Sequence[pandas.DataFrame], levels: Sequence[float]) -> float:
    """Return the lower end of the y axis, a margin below the levels and the groups' last accuracies."""
    lowest = min([*levels, *(b.y.iloc[-1] for b in budgets)])
    highest = max([*levels, *(b.high.iloc[-1] for b in budgets)])
    return float(max(0.0, lowest - max(0.5 * (highest - lowest), 0.02)))


def _drawn(group: RunGroup, slot: int, b: pandas.DataFrame, bottom: float) -> Iterator[Line]:
    """Yield a group's line, and a mark at the end if the group is unfinished or stopped at its target."""
    visible = np.flatnonzero(b.high >= bottom)
    begin = max(0, int(visible[0]) - 1) if len(visible) else len(b) - 1  # earlier points are not visible
    yield Line.of(name(group), b[begin:], slot=slot, kind="steps")
    if not group.done or group.stopped:
        mark = "D" if group.done else "x"
        yield Line.of(name(group), b[["x", "y"]][-1:], slot=slot, kind="points", mark=mark)


def _ranges(
    groups: Sequence[RunGroup], ranked: Sequence[Cost], slots: Mapping[int, int], title: str
) -> list[Figure]:
    """Draw one row per group in its colour: a mark per seed, a triangle per seed that does not reach the
    accuracy, and a dot at the median; no figure if no seed reaches it."""
    reaching = [c for c in ranked if c.spent]
    if not reaching:
        return []

    def draw(drawing: Any) -> None:
        axes = drawing.subplots()
        for n, c in enumerate(reaching):
            colour, _ = style(slots.get(id(groups[c.group]), len(COLOURS) - 1))
            rows = ((c.spent, "|", 9), (c.ended, ">", 6), ([c.median], "o", 7))
            for counts, mark, size in rows:
                shown = [1e-6 * bytes for bytes in counts if math.isfinite(bytes)]
                axes.plot(shown, [n] * len(shown), linestyle="", marker=mark, markersize=size, color=colour)
        axes.set_yticks(range(len(reaching)), [name(groups[c.group]) for c in reaching])
        axes.invert_yaxis()
        if wide([np.array([bytes for c in reaching for bytes in (*c.spent, *c.ended)], dtype=np.float64)]):
            axes.set_xscale("log", nonpositive="mask")
        else:
            axes.set_xlim(left=0)
        axes.set_xlabel("megabytes, both directions")
        plain(axes)

    return [Figure(title, draw, None, (TWO_COLUMNS, 0.8 + 0.25 * len(reaching)))]


def winners(groups: Sequence[RunGroup], frontier: pandas.DataFrame) -> Table:
    """Return the frontier as a table: megabytes, the most accurate group with this budget, and accuracies in
    %. It has no rows if a run ended at its target accuracy, because its accuracy with more bytes is
    unknown."""
    rows = []
    for r in winning_ranges(frontier).itertuples() if not any(g.stopped for g in groups) else ():
        low = megabytes([1e6 * r.MB])
        budget = f"from {low}" if r.until == math.inf else between(low, megabytes([1e6 * r.until]))
        accuracies = between(f"{100 * r.first:.1f}", f"{100 * r.last:.1f}")
        rows.append((budget, name(groups[r.group]), accuracies))
    return Table(("budget, MB", "highest mean", "accuracy %"), rows, 2)
