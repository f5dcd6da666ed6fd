"""The page of a comparison: curves with bands, accuracy against bytes, tables, what differs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from fedsim import plugins
from launch.results import html
from launch.results.figures import Line, chart, wide
from launch.results.frontier import FrontierPoint, pareto, winning_ranges
from launch.results.groups import Group
from launch.results.labels import differences, shared
from launch.results.statistics import Band, band
from launch.results.tables import UNFINISHED, Grid, costs, fields, megabytes, name, parts, results, seeds

MEASURES = {"test_accuracy": "accuracy", "test_nll": "NLL (nats)"}
AXES = {
    "round": "round",
    "MB": "megabytes, both directions",
    "simulated": "seconds, simulated",
}
MOST_LINES = 12
"""Groups that are drawn; the others are in the tables."""
ROWS = {
    "dataset": "are of different data sets",
    "evaluate_on": "are evaluated on different rows",
}
TASK = ("fraction", "partition", "clients", "model")
"""Settings of the task, besides those of ROWS."""
BEGINNING = 0.06
"""The part of the rounds for which the axes of charts need not have room."""
SPAN = 30
"""A ratio of NLLs from which their axis is logarithmic."""


def render(
    groups: Sequence[Group], maxima: Sequence[Sequence[FrontierPoint]], levels: Sequence[float]
) -> str:
    """maxima: of every group, as frontier.running_maximum; levels: accuracies whose cost is asked for."""
    shown = drawn(groups, maxima)
    names = {slot: name(groups[n]) for slot, n in enumerate(shown)}
    key = html.key(names)
    left = len(groups) - len(shown)
    cut = f"{len(shown)} of {len(groups)} groups are drawn: those of the frontier and the most accurate"
    title = f"Comparison on {', '.join(_values(groups, 'dataset'))}"
    spent = dict(zip(map(name, groups), parts(groups), strict=True))
    totals = {row: f"{megabytes([sum(by.values())])} MB" for row, by in spent.items()}
    return html.page(
        title,
        (
            f'<h1>{escape(title)}</h1><p class="soft">{escape(_description(groups))}</p>',
            *(f'<p class="bad">{escape(note)}</p>' for note in warnings(groups)),
            *(f'<p class="soft">{escape(note)}</p>' for note in remarks(groups)),
            html.section("Results", _table(results(groups, comparable(groups))), _SPREAD),
            html.section(
                "Learning",
                key,
                _curves([groups[n] for n in shown]),
                _soft(
                    "Lines are means over the seeds, bands their range; the first rounds are cut off where "
                    "they are far from the rest." + (f" {cut}." if left else "")
                ),
            ),
            html.section("Accuracy against bytes", *_frontier(groups, shown, maxima, key)),
            html.section("Bytes to an accuracy", _table(costs(groups, levels))),
            html.section("Bytes by field", html.bars(spent, totals), _table(fields(groups))),
            html.section("What differs", *_differs(groups)),
            html.section("Runs", _runs(groups)),
        ),
    )


def warnings(groups: Sequence[Group]) -> list[str]:
    """What makes numbers of different groups no comparison of algorithms; which groups are unfinished."""
    result = [
        f"These runs {what} ({', '.join(_values(groups, key))}): accuracies mean nothing across them"
        for key, what in ROWS.items()
        if len(_values(groups, key)) > 1
    ]
    for group in groups:
        for member in group.members:
            if not member.done:
                error = member.run.summary.get("error") if member.run.status == "failed" else ""
                result.append(
                    f"{name(group)}, seed {member.seed}: {member.run.status}, evaluated up to round "
                    f"{member.rounds} of {member.run.experiment['rounds']}{f' ({error})' if error else ''}"
                )
    return result


def remarks(groups: Sequence[Group]) -> list[str]:
    """What else a reader should know before the numbers."""
    result = []
    if other := [f"{key} ({', '.join(v)})" for key in TASK if len(v := _values(groups, key)) > 1]:
        result.append(f"The runs also differ in {', '.join(other)}")
    for group in groups:
        unfinished = [str(m.seed) for m in group.aside if not m.done and m.seed not in group.seeds]
        retry = sorted({m.seed for m in group.aside if m.seed in group.seeds})
        if unfinished:
            result.append(f"{name(group)}: without seed {', '.join(unfinished)}, not finished")
        if retry:
            result.append(f"{name(group)}: more than one run with seed {seeds(retry)}, of which one counts")
    return result


def comparable(groups: Sequence[Group]) -> bool:
    """Whether accuracies are of one data set and of the same rows."""
    return all(len(_values(groups, key)) == 1 for key in ROWS)


def drawn(groups: Sequence[Group], maxima: Sequence[Sequence[FrontierPoint]]) -> list[int]:
    """Places of the groups that charts show: of too many, those on the frontier, then the most accurate."""
    if len(groups) <= MOST_LINES:
        return list(range(len(groups)))
    ahead = {p.group for p in pareto([p for points in maxima for p in points])}
    top = [points[-1].accuracy if points else -1.0 for points in maxima]
    order = sorted(range(len(groups)), key=lambda n: (n not in ahead, -top[n]))
    return sorted(order[:MOST_LINES])


_SPREAD = (
    '<p class="soft">± is the population standard deviation over the seeds; best is the best evaluated round '
    "of each run; P down and P up are bytes per client and exchange in units of 4 P bytes; MB are both "
    f"directions; {UNFINISHED} is not finished.</p>"
)


def _soft(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


def _values(groups: Sequence[Group], key: str) -> list[str]:
    return list(dict.fromkeys(plugins.short(str(g.settings.get(key))) for g in groups))


def _description(groups: Sequence[Group]) -> str:
    runs = sum(len(g.members) for g in groups)
    all_seeds = seeds(list({seed for g in groups for seed in g.seeds}))
    output = [f"{runs} runs of {len(groups)} configurations", f"seeds {all_seeds}"]
    for key, what in (("params", "P = {}"), ("clients", "{} clients"), ("rounds", "{} rounds")):
        if len(values := _values(groups, key)) == 1:
            output.append(what.format(f"{int(values[0]):,}"))
    return ", ".join(output)


def _table(grid: Grid) -> str:
    return html.table(grid.header, grid.lines) if grid.lines else ""


def _curves(groups: Sequence[Group]) -> str:
    """One row of charts per axis, one column per measure."""
    created = []
    for axis, what in AXES.items():
        for metric, output in MEASURES.items():
            having = {slot: g for slot, g in enumerate(groups) if g.has(metric)}
            if axis == "simulated" and not all(g.has(axis) for g in having.values()):
                continue
            result = {slot: band(g.curves, axis, metric) for slot, g in having.items()}
            lines = [Line(name(having[n]), b.x, b.mean, b.low, b.high, n) for n, b in result.items()]
            logx = axis == "MB" and wide([b.x for b in result.values()])
            low, high = _ends(list(result.values()))
            logy = metric == "test_nll" and high > SPAN * low > 0
            limits = (low if metric == "test_accuracy" else None, high if metric == "test_nll" else None)
            created.append(chart(lines, what, output, logx=logx, logy=logy, limits=limits))
    return html.charts(*created, across=2)


def _ends(bands: Sequence[Band]) -> tuple[float, float]:
    """The range of what happens after the first part of the rounds, with a margin: a chart that begins
    with guessing leaves no room for differences."""
    after = [
        np.concatenate([b.low[n:], b.high[n:]]) for b in bands for n in [math.ceil(BEGINNING * len(b.x))]
    ]
    values = np.concatenate([*after, np.zeros(0)])
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    return low - 0.03 * (high - low), high + 0.03 * (high - low)


def _frontier(
    groups: Sequence[Group],
    shown: Sequence[int],
    maxima: Sequence[Sequence[FrontierPoint]],
    key: str,
) -> Iterator[str]:
    """The picture, and who is ahead at which budget."""
    ahead = pareto([p for points in maxima for p in points])
    if not ahead:
        return
    lines = []
    for slot, n in enumerate(shown):
        if points := maxima[n]:
            xs, ys = np.array([p.MB for p in points]), np.array([p.accuracy for p in points])
            lines.append(Line(name(groups[n]), xs, ys, slot=slot, kind="steps", faint=True))
    end = max(points[-1].MB for points in maxima if points)
    xs = np.array([*(p.MB for p in ahead), end])
    ys = np.array([*(p.accuracy for p in ahead), ahead[-1].accuracy])
    lines.append(Line("frontier", xs, ys, slot=-1, kind="steps"))
    for slot, n in enumerate(shown):
        if points := maxima[n]:
            top = points[-1]
            x, y, low, high = (np.array([v]) for v in (top.MB, top.accuracy, top.low, top.high))
            lines.append(Line(name(groups[n]), x, y, low, high, slot, kind="points"))
    picture = chart(
        lines,
        "megabytes, both directions",
        "best accuracy so far",
        logx=wide([line.x for line in lines]),
        size=(5.4, 3.3),
        limits=(ahead[0].accuracy - 0.02, None),
    )
    yield key
    yield f'<figure class="large">{picture}</figure>'
    yield _soft(
        "Points: the best accuracy of each group and what was spent until then, with the range of the "
        "seeds. Faint: its way there. The frontier, in the colour of the text, is the most that any group "
        "reaches with so many bytes."
    )
    if len(groups) > 1:
        yield html.table(
            ["megabytes", "most accurate", "accuracy %"],
            (
                [
                    f"{megabytes([1e6 * r.first.MB])} "
                    + ("and more" if r.until == np.inf else f"to {megabytes([1e6 * r.until])}"),
                    name(groups[r.first.group]),
                    f"{100 * r.first.accuracy:.1f}"
                    + (f" to {100 * r.last.accuracy:.1f}" if r.last is not r.first else ""),
                ]
                for r in winning_ranges(ahead)
            ),
            2,
        )


def _differs(groups: Sequence[Group]) -> Iterator[str]:
    settings = [g.settings for g in groups]
    rows = zip(groups, differences(settings), strict=True)
    if len(groups) > 1:
        yield html.pairs(
            {g.label: ", ".join(f"{k} {v}" for k, v in row.items() if k != "algo") for g, row in rows}
        )
    yield _soft("All share: " + ", ".join(f"{k} {v}" for k, v in shared(settings).items() if v != ""))


def _runs(groups: Sequence[Group]) -> str:
    return html.table(
        ["", "seed", "status", "rounds", "folder"],
        (
            [g.label, str(m.seed), m.run.status, str(m.rounds), str(m.run.path)]
            for g in groups
            for m in (*g.members, *g.aside)
        ),
        5,
    )
