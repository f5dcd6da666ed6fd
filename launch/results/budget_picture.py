"""Which group reaches an accuracy with the fewest bytes: a picture, tables, who is ahead at which budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np

from launch.results import html
from launch.results.figures import COLOURS, DASHES, Line, chart, wide
from launch.results.frontier import FrontierPoint, by_budget, cost, winning_ranges
from launch.results.groups import Group
from launch.results.statistics import Band
from launch.results.tables import STOPPED, UNFINISHED, Grid, between, costs, megabytes, name


def slots_of(groups: Sequence[Group]) -> list[int]:
    """Slots of figures.Line: of several algorithms with few groups each, an algorithm has one colour and its
    groups have different dashes; else every group has its own."""
    names = [g.settings["algo"] for g in groups]
    algorithms = list(dict.fromkeys(names))
    places = [names[:n].count(name) for n, name in enumerate(names)]
    if not 1 < len(algorithms) <= len(COLOURS) or max(places) >= len(DASHES):
        return list(range(len(groups)))
    return [algorithms.index(name) + len(COLOURS) * place for name, place in zip(names, places, strict=True)]


def against_bytes(
    groups: Sequence[Group], lines: Mapping[int, Group], levels: Sequence[float], key: str
) -> Iterator[str]:
    """The picture that says who reaches an accuracy with the fewest bytes, and the same as tables."""
    budgets = {slot: b for slot, g in lines.items() if len((b := by_budget(g)).x)}
    if not budgets:
        return
    bottom = _bottom(list(budgets.values()), levels)
    drawn = [line for slot, b in budgets.items() for line in _drawn(lines[slot], slot, b, levels, bottom)]
    picture = chart(
        drawn,
        "megabytes, both directions",
        "best accuracy so far",
        logx=wide([line.x for line in drawn]),
        size=(6.6, 3.7),
        limits=(bottom, None),
        levels=levels,
    )
    yield key
    yield f'<figure class="large">{picture}</figure>'
    notes = [
        "The further left a line is, the fewer bytes it needs. Lines are means over the seeds, bands their "
        "range."
    ]
    if levels:
        notes.append(
            "A dashed line across is an accuracy; a dot on it is the mean of the bytes with which the seeds "
            "reach it, its bar their range, for groups of which every seed does."
        )
    if any(g.stopped for g in groups):
        notes.append(f"{STOPPED} ended (◆) when it had reached its target accuracy.")
    if not all(g.done for g in groups):
        notes.append(f"{UNFINISHED} is not finished (×): it may go on.")
    yield html.soft(" ".join(notes))
    for grid in costs(groups, levels):
        yield f"<h3>{escape(grid.title)}</h3>{table_of(grid)}"
    if levels:
        yield html.soft(
            "The fewest bytes first. Where only some seeds reach the accuracy, their number stands for the "
            "mean; a percentage in brackets is the best accuracy of a group that does not."
        )


def _bottom(budgets: Sequence[Band], levels: Sequence[float]) -> float:
    """The end of the y axis: some room below the accuracies in question and below where groups end."""
    lowest = min([*levels, *(b.mean[-1] for b in budgets)])
    highest = max([*levels, *(b.high[-1] for b in budgets)])
    return float(max(0.0, lowest - max(0.5 * (highest - lowest), 0.02)))


def _drawn(group: Group, slot: int, b: Band, levels: Sequence[float], bottom: float) -> Iterator[Line]:
    """A group's line, the mark of its end where it might have gone on, and its dots on the levels."""
    visible = np.flatnonzero(b.high >= bottom)
    begin = max(0, int(visible[0]) - 1) if len(visible) else len(b.x) - 1  # the rest needs no room
    mean, low, high = (y[begin:] for y in (b.mean, b.low, b.high))
    yield Line(name(group), b.x[begin:], mean, low, high, slot, kind="steps")
    if not group.done or group.stopped:
        mark = "D" if group.done else "x"
        yield Line(name(group), b.x[-1:], b.mean[-1:], slot=slot, kind="points", mark=mark)
    for level in levels:
        c = cost(0, group, level)
        if c.whole:
            spent = np.array(c.spent) / 1e6
            x, low, high = (end(keepdims=True) for end in (spent.mean, spent.min, spent.max))
            yield Line(name(group), x, np.array([level]), low, high, slot, "across")


def winners(groups: Sequence[Group], ahead: Sequence[FrontierPoint]) -> list[list[str]]:
    """Rows of the frontier: megabytes, the group that reaches most with them, and its accuracies in %.

    None if a run has ended at its target accuracy: how much more it would have reached is not known.
    """
    if any(g.stopped for g in groups):
        return []
    rows = []
    for r in winning_ranges(ahead):
        first = megabytes([1e6 * r.first.MB])
        budget = f"from {first}" if r.until == np.inf else between(first, megabytes([1e6 * r.until]))
        reached = between(f"{100 * r.first.accuracy:.1f}", f"{100 * r.last.accuracy:.1f}")
        rows.append([budget, name(groups[r.first.group]), reached])
    return rows


def table_of(grid: Grid) -> str:
    """'' for a grid without lines."""
    return html.table(grid.header, grid.lines) if grid.lines else ""
