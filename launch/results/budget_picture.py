"""Pictures and tables of the bytes to an accuracy, and of the group that leads at each budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

import numpy as np

from launch.results import html
from launch.results.figures import COLOURS, DASHES, Line, chart, wide
from launch.results.frontier import Cost, FrontierPoint, by_budget, ranking, winning_ranges
from launch.results.groups import Group
from launch.results.statistics import Band
from launch.results.tables import STOPPED, UNFINISHED, Grid, between, costs, megabytes, name, unreached


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
    """Draw the bytes with which groups reach accuracies, with the same as tables."""
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
    scale = _Scale.of([n for costs in ranked for c in costs if c.whole for n in c.spent])
    slots = {id(g): slot for slot, g in lines.items()}
    for grid, costs_ in zip(costs(groups, levels), ranked, strict=True):
        yield f"<h3>{escape(grid.title)}</h3>{_ranges(groups, costs_, slots, scale)}{table_of(grid)}"
    if levels:
        yield html.soft(
            "A dot is the mean of the bytes with which the seeds of a group reach the accuracy, its bar "
            "their range, for groups of which every seed does. The fewest bytes first. Where only some seeds "
            "reach the accuracy, their number stands for the mean; a percentage in brackets is the best "
            "accuracy of a group that does not." + (" The axis is logarithmic." if scale.logarithmic else "")
        )


def _bottom(budgets: Sequence[Band], levels: Sequence[float]) -> float:
    """The end of the y axis: some room below the accuracies in question and below where groups end."""
    lowest = min([*levels, *(b.mean[-1] for b in budgets)])
    highest = max([*levels, *(b.high[-1] for b in budgets)])
    return float(max(0.0, lowest - max(0.5 * (highest - lowest), 0.02)))


def _drawn(group: Group, slot: int, b: Band, bottom: float) -> Iterator[Line]:
    """A group's line, and the mark of its end if it is unfinished."""
    visible = np.flatnonzero(b.high >= bottom)
    begin = max(0, int(visible[0]) - 1) if len(visible) else len(b.x) - 1  # the rest needs no room
    mean, low, high = (y[begin:] for y in (b.mean, b.low, b.high))
    yield Line(name(group), b.x[begin:], mean, low, high, slot, kind="steps")
    if not group.done or group.stopped:
        mark = "D" if group.done else "x"
        yield Line(name(group), b.x[-1:], b.mean[-1:], slot=slot, kind="points", mark=mark)


@dataclass(frozen=True)
class _Scale:
    """The position of bytes on an axis that the pictures of all accuracies share."""

    low: float
    high: float
    logarithmic: bool

    @staticmethod
    def of(counts: Sequence[float]) -> _Scale:
        """The axis from 0 to the largest count; of counts that span decades, from the least one."""
        if not counts:
            return _Scale(0.0, 1.0, False)
        logarithmic = wide([np.array(counts, dtype=np.float64)])
        return _Scale(float(min(counts)) if logarithmic else 0.0, float(max(counts)), logarithmic)

    def __call__(self, n: float) -> float:
        """The place of n bytes in percent of the axis."""
        low, high, at = (
            map(np.log, (self.low, self.high, n)) if self.logarithmic else (self.low, self.high, n)
        )
        return float(100 * (at - low) / (high - low)) if high > low else 50.0


def _ranges(groups: Sequence[Group], ranked: Sequence[Cost], slots: Mapping[int, int], scale: _Scale) -> str:
    """One row per group: a dot at the mean of its seeds' bytes and a bar over their range, in its colour."""
    rows = []
    for c in ranked:
        group, track = groups[c.group], ""
        if c.whole:
            low, high, mean = scale(min(c.spent)), scale(max(c.spent)), scale(fmean(c.spent))
            colour = f"var(--c{slots.get(id(group), 7) % len(COLOURS)})"
            track = (
                f'<i style="left: {low:.2f}%; width: {high - low:.2f}%; background: {colour}"></i>'
                f'<b style="left: {mean:.2f}%; background: {colour}"></b>'
            )
            said = f"{name(group)}: {megabytes(c.spent)} MB"
            if len(c.spent) > 1:
                said += f", {between(megabytes([min(c.spent)]), megabytes([max(c.spent)]))}"
            track = f'<div class="track" title="{escape(said)}">{track}</div>'
        else:
            track = f'<div class="soft">{escape(unreached(c))}</div>'
        rows.append(f"<span>{escape(name(group))}</span>{track}")
    if not any(c.whole for c in ranked):
        return ""
    ends = [megabytes([scale.low]) if scale.low else "0", f"{megabytes([scale.high])} MB"]
    axis = f'<span></span><div class="ends">{"".join(f"<span>{end}</span>" for end in ends)}</div>'
    return f'<div class="ranges">{"".join(rows)}{axis}</div>'


def winners(groups: Sequence[Group], ahead: Sequence[FrontierPoint]) -> list[list[str]]:
    """Rows of the frontier: megabytes, the group that reaches most with them, and its accuracies in %. No
    rows if a run has ended at its target accuracy: how much more it would have reached is not known."""
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
    """A table of HTML; '' for a grid without lines."""
    return html.table(grid.header, grid.lines) if grid.lines else ""
