"""Pictures and tables of the bytes to an accuracy, and of the group that leads at each budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from launch.results import html
from launch.results.figures import COLOURS, DASHES, Line, chart, wide
from launch.results.frontier import Cost, FrontierPoint, by_budget, ranking, winning_ranges
from launch.results.groups import Group
from launch.results.statistics import Band
from launch.results.tables import STOPPED, UNFINISHED, Grid, between, costs, megabytes, name, unreached


def slots_of(groups: Sequence[Group]) -> list[int]:
    """Return the slot (figures.Line) of each group. If there are several algorithms with few groups each, an
    algorithm has one colour, and its groups have different dashes. Otherwise slots are 0, 1, 2, ..."""
    names = [g.settings["algo"] for g in groups]
    algorithms = list(dict.fromkeys(names))
    places = [names[:n].count(name) for n, name in enumerate(names)]
    if not 1 < len(algorithms) <= len(COLOURS) or max(places) >= len(DASHES):
        return list(range(len(groups)))
    return [algorithms.index(name) + len(COLOURS) * place for name, place in zip(names, places, strict=True)]


def against_bytes(
    groups: Sequence[Group], lines: Mapping[int, Group], levels: Sequence[float], key: str
) -> Iterator[str]:
    """Yield a chart and tables of the bytes that groups need to reach accuracies."""
    budgets = {slot: b for slot, g in lines.items() if len((b := by_budget(g)).x)}
    if not budgets:
        return
    bottom = _bottom(list(budgets.values()), levels)
    drawn = [line for slot, b in budgets.items() for line in _drawn(lines[slot], slot, b, bottom)]
    picture = chart(
        drawn,
        "megabytes, both directions",
        "best accuracy so far",
        logx=wide([line.x for line in drawn]),
        size=(5.0, 3.2),
        limits=(bottom, None),
        levels=levels,
        share=True,
    )
    yield key
    yield f'<figure class="large">{picture}</figure>'
    notes = [
        "The further left a line is, the fewer bytes it needs. Lines are means over the seeds; their range "
        "is said where one points."
    ]
    if levels:
        notes.append("A dashed line across is an accuracy of the tables below.")
    if any(g.stopped for g in groups):
        notes.append(f"{STOPPED} ended (◆) when it had reached its target accuracy.")
    if not all(g.done for g in groups):
        notes.append(f"{UNFINISHED} is not finished (×): it may be resumed.")
    yield html.soft(" ".join(notes))
    ranked = [ranking(groups, level) for level in levels]
    scale = _Scale.of([n for costs in ranked for c in costs if c.spent for n in (*c.spent, *c.ended)])
    slots = {id(g): slot for slot, g in lines.items()}
    for grid, costs_ in zip(costs(groups, levels), ranked, strict=True):
        yield f"<h3>{escape(grid.title)}</h3>{_ranges(groups, costs_, slots, scale)}{table_of(grid)}"
    if levels:
        yield html.soft(
            "A dot is the median of the bytes with which the seeds of a group reach the accuracy (Kaplan and "
            "Meier), a mark is a seed, and a triangle is a seed that had not reached it with all of its "
            "bytes. The smallest median first. Factors of bytes are paired by seed, with their 95 % "
            "interval. Where too few of the seeds reach the accuracy, their number stands for the "
            "median; a percentage in brackets is the best accuracy of a group that does not."
            + (" The axis is logarithmic." if scale.logarithmic else "")
        )


def _bottom(budgets: Sequence[Band], levels: Sequence[float]) -> float:
    """Return the lower end of the y axis, a margin below the levels and the groups' last accuracies."""
    lowest = min([*levels, *(b.mean[-1] for b in budgets)])
    highest = max([*levels, *(b.high[-1] for b in budgets)])
    return float(max(0.0, lowest - max(0.5 * (highest - lowest), 0.02)))


def _drawn(group: Group, slot: int, b: Band, bottom: float) -> Iterator[Line]:
    """Yield a group's line, and a mark at the end if the group is unfinished or stopped at its target."""
    visible = np.flatnonzero(b.high >= bottom)
    begin = max(0, int(visible[0]) - 1) if len(visible) else len(b.x) - 1  # earlier points are not visible
    mean, low, high = (y[begin:] for y in (b.mean, b.low, b.high))
    yield Line(name(group), b.x[begin:], mean, low, high, slot, kind="steps")
    if not group.done or group.stopped:
        mark = "D" if group.done else "x"
        yield Line(name(group), b.x[-1:], b.mean[-1:], slot=slot, kind="points", mark=mark)


@dataclass(frozen=True)
class _Scale:
    """An axis of bytes that the pictures of all accuracies share."""

    low: float
    high: float
    logarithmic: bool

    @staticmethod
    def of(counts: Sequence[float]) -> _Scale:
        """Return a linear axis from 0 or, if the counts span decades, a logarithmic one from the smallest."""
        if not counts:
            return _Scale(0.0, 1.0, False)
        logarithmic = wide([np.array(counts, dtype=np.float64)])
        return _Scale(float(min(counts)) if logarithmic else 0.0, float(max(counts)), logarithmic)

    def __call__(self, n: float) -> float:
        """Return the position of n bytes in percent of the axis."""
        low, high, at = (
            map(np.log, (self.low, self.high, n)) if self.logarithmic else (self.low, self.high, n)
        )
        return float(100 * (at - low) / (high - low)) if high > low else 50.0


def _ranges(groups: Sequence[Group], ranked: Sequence[Cost], slots: Mapping[int, int], scale: _Scale) -> str:
    """Draw one row per group in its colour: a mark per seed, a triangle per seed that does not reach the
    accuracy, and a dot at the median."""
    rows = []
    for c in ranked:
        group, track = groups[c.group], ""
        if c.spent:
            colour = f"var(--c{slots.get(id(group), 7) % len(COLOURS)})"
            at = f"background: {colour}"
            ends = [scale(n) for n in (*c.spent, *c.ended)]
            track = f'<i style="left: {min(ends):.2f}%; width: {max(ends) - min(ends):.2f}%; {at}"></i>'
            track += "".join(f'<s style="left: {scale(n):.2f}%; {at}"></s>' for n in c.spent)
            track += "".join(f'<u style="left: {scale(n):.2f}%; color: {colour}">▷</u>' for n in c.ended)
            if math.isfinite(c.median):
                track += f'<b style="left: {scale(c.median):.2f}%; {at}"></b>'
            result = f"{name(group)}: {len(c.spent)} of {c.seeds} seeds"
            if math.isfinite(c.median):
                result += f", median {megabytes([c.median])} MB"
            track = f'<div class="track" title="{escape(result)}">{track}</div>'
        else:
            track = f'<div class="soft">{escape(unreached(c))}</div>'
        rows.append(f"<span>{escape(name(group))}</span>{track}")
    if not any(c.spent for c in ranked):
        return ""
    ends_ = [megabytes([scale.low]) if scale.low else "0", f"{megabytes([scale.high])} MB"]
    axis = f'<span></span><div class="ends">{"".join(f"<span>{end}</span>" for end in ends_)}</div>'
    return f'<div class="ranges">{"".join(rows)}{axis}</div>'


def winners(groups: Sequence[Group], ahead: Sequence[FrontierPoint]) -> list[list[str]]:
    """Return rows of the frontier: megabytes, the most accurate group with this budget, and accuracies in %.
    Return no rows if a run ended at its target accuracy, because its accuracy with more bytes is unknown."""
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
    """Return a grid as an HTML table; '' for a grid without lines."""
    return html.table(grid.header, grid.lines) if grid.lines else ""
