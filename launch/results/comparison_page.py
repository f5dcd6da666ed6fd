"""The page of a comparison: curves with bands, accuracy against bytes, tables, differing settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedsim import plugins
from launch.numbers import extent, megabytes, ranges
from launch.results.budget_picture import against_bytes, slots_of, winners
from launch.results.differences import HOW_TO_READ, Compared, forest
from launch.results.field_bars import bars
from launch.results.figures import Figure, Line, Values, chart, legend_of, wide
from launch.results.frontier import pareto
from launch.results.groups import Member, RunGroup
from launch.results.html import Beside, Page, Part, Text
from launch.results.labels import differences, differing_hyperparameters, shared, unnamed
from launch.results.reliability_diagram import TABLES, diagram, table_of
from launch.results.significance import LEAST
from launch.results.tables import STOPPED, UNFINISHED, calibration, fields, name, parts, results, sends_once
from launch.table import Table
from workers.numerics import DRIFT

if TYPE_CHECKING:
    import pandas

MEASURES = {"test_accuracy": "accuracy", "test_nll": "NLL (nats)"}
AXES = {
    "round": "round",
    "MB": "megabytes, both directions",
    "simulated": "seconds, simulated",
    "J": "joules, all clients",
}
MOST_LINES = 12
"""The largest number of groups that a chart shows; the tables contain all groups."""
ROWS = {"dataset": "are of different data sets", "evaluate_on": "are evaluated on different rows"}
TASK = ("fraction", "partition", "clients", "model")
"""Settings of the task, besides the settings in ROWS."""
BEGINNING = 0.06
"""The share of the first rounds that the axes of charts may cut off."""
SPAN = 30
"""If the largest NLL exceeds the smallest by more than this factor, the NLL axis is logarithmic."""


def render(
    groups: Sequence[RunGroup],
    maxima: pandas.DataFrame,
    levels: Sequence[float],
    compared: Sequence[Compared] = (),
) -> Page:
    """Return the page.

    maxima: frontier.running_maxima. levels: the accuracies for which the page
    shows the cost of reaching them. compared: scores whose differences the page shows.
    """
    shown = drawn(groups, maxima)
    slots = slots_of([groups[n] for n in shown])
    lines = {slot: groups[n] for slot, n in zip(slots, shown, strict=True)}
    legend = legend_of({slot: name(g) for slot, g in lines.items()})
    left = len(groups) - len(shown)
    cut = f" {len(shown)} of {len(groups)} groups are drawn: those of the frontier and the most accurate"
    spent = {
        f"{name(g)}, {megabytes([sum(by.values())])} MB": by
        for g, by in zip(groups, parts(groups), strict=True)
    }
    scores = calibration(groups, comparable(groups))
    learning = (
        "Lines are means over the seeds and bands are their range; both end with the seed that has the "
        "fewest rounds. The first rounds are cut off if they are far from the rest."
    )
    more: list[Part] = [Text(scores.title, "heading"), scores] if scores.rows else []
    sections: dict[str, Iterable[Part]] = {
        "Accuracy against bytes": against_bytes(groups, lines, levels, legend),
        "Results": [
            results(groups, comparable(groups)),
            *more,
            *map(Text, below(groups)),
            Text(" ".join(_explained(groups))),
        ],
        "Differences": _differences(compared),
        "Learning": [legend, Beside(_curves(lines, levels)), Text(learning + cut * bool(left))],
        "Calibration": _calibration(lines, legend),
        "Clients": compared_clients(lines, legend),
        "Highest mean accuracy for a budget": _winners(groups, maxima),
        "Bytes by field": [*bars(spent), fields(groups)],
        "What differs": _differs(groups),
        "Runs": [_runs(groups)],
    }
    head = [
        Text(_description(groups)),
        *(Text(note, "warning") for note in warnings(groups)),
        *map(Text, remarks(groups)),
    ]
    return Page.of(f"Comparison on {', '.join(_values(groups, 'dataset'))}", head, sections)


def warnings(groups: Sequence[RunGroup]) -> list[str]:
    """Return the reasons why groups are not comparable, and notes on unfinished runs."""
    result = [
        f"These runs {what} ({', '.join(_values(groups, key))}): accuracies mean nothing across them"
        for key, what in ROWS.items()
        if len(_values(groups, key)) > 1
    ]
    for group in groups:
        for seed, digests in group.different_data.items():
            result.append(
                f"{name(group)}: runs with seed {seed} and the same settings saw different data "
                f"({', '.join(d[:8] for d in digests)}), and only one of them is used. Have its files "
                "changed?"
            )
        for member in group.members:
            if drift := member.drift:
                result.append(f"{name(group)}, seed {member.seed}: {DRIFT} ({'; '.join(drift)})")
            if not member.done:
                error = member.summary.get("error") if member.status == "failed" else ""
                result.append(
                    f"{name(group)}, seed {member.seed}: {member.status}, evaluated up to round "
                    f"{member.rounds} of {member.experiment['rounds']}{f' ({error})' if error else ''}"
                )
    return result


def remarks(groups: Sequence[RunGroup]) -> list[str]:
    """Return other remarks to read before the results."""
    result = []
    if other := [f"{key} ({', '.join(v)})" for key in TASK if len(v := _values(groups, key)) > 1]:
        result.append(f"The runs also differ in {', '.join(other)}")
    if tuned := differing_hyperparameters([g.settings for g in groups]):
        result.append(f"Hyperparameters of one name differ between algorithms: {', '.join(tuned)}")
    for group in groups:
        unfinished = [str(m.seed) for m in group.aside if not m.done and m.seed not in group.seeds]
        retry = sorted({m.seed for m in group.aside if m.seed in group.seeds})
        if unfinished:
            result.append(f"{name(group)}: without seed {', '.join(unfinished)}, not finished")
        if retry:
            result.append(f"{name(group)}: more than one run with seed {ranges(retry)}; only one is used")
    return result


def comparable(groups: Sequence[RunGroup]) -> bool:
    """Return whether all groups are evaluated on the same rows of the same data set."""
    return all(len(_values(groups, key)) == 1 for key in ROWS)


def drawn(groups: Sequence[RunGroup], maxima: pandas.DataFrame) -> list[int]:
    """Return the indices of the groups that charts show.

    If there are more than MOST_LINES groups, those on the frontier come first, then the most accurate ones.
    """
    ahead, top = set(pareto(maxima).group), maxima.groupby("group").accuracy.last()
    order = sorted(range(len(groups)), key=lambda n: (n not in ahead, -top.get(n, -1.0)))
    return sorted(order[:MOST_LINES])


def below(groups: Sequence[RunGroup]) -> list[str]:
    """Return the lines below the table: settings that the labels leave out, and the meaning of marks."""
    result = [f"{label}: {text}" for label, text in unnamed([g.settings for g in groups]).items() if text]
    if any(g.stopped for g in groups):
        result.append(
            f"{STOPPED} ended when it reached its target accuracy (--until): its last round is that one, and "
            "the accuracy that more bytes would give is unknown"
        )
    return result


def _explained(groups: Sequence[RunGroup]) -> Iterator[str]:
    yield (
        "± is the population standard deviation over the seeds; bold is the best and what is not "
        f"distinguishable from it, with {LEAST} seeds or more; best is the best evaluated round of each "
        "run; P down and P up are bytes per client and round in units of 4 P bytes, all exchanges; MB are "
        "both directions of all rounds."
    )
    if calibration(groups).rows:
        yield (
            "Worst client: the lowest accuracy of a client, on the test set with its own label shares. "
            "Average: predictions averaged over posterior samples."
        )
    if sends_once(groups):
        yield "P once: the set-up and other messages that each client gets and sends only once, down + up."
    if not all(g.done for g in groups):
        yield f"{UNFINISHED} is not finished."


def _differences(compared: Sequence[Compared]) -> Iterator[Part]:
    if not compared:
        return
    yield forest(compared)
    yield Text(HOW_TO_READ)
    for c in compared:
        table = c.table()
        yield Text(table.title, "heading")
        yield table
    yield from map(Text, dict.fromkeys(c.note() for c in compared))


def unranked(groups: Sequence[RunGroup]) -> str:
    """Return a remark that the order is no ranking if there are too few seeds; otherwise ''."""
    few = [g for g in groups if len(g.seeds) < LEAST]
    if not few:
        return ""
    counts = "; ".join(f"{g.label} has n = {len(g.seeds)}" for g in few[:4])
    text = f"n = {len(few[0].seeds)}" if len({len(g.seeds) for g in groups}) == 1 else counts
    return f"{text}: no ranking; {LEAST} seeds allow one."


def _values(groups: Sequence[RunGroup], key: str) -> list[str]:
    return list(dict.fromkeys(plugins.short(str(g.settings.get(key))) for g in groups))


def _description(groups: Sequence[RunGroup]) -> str:
    runs = sum(len(g.members) for g in groups)
    all_seeds = ranges(list({seed for g in groups for seed in g.seeds}))
    counts = extent([len(g.seeds) for g in groups])
    seeds = f"{counts} seed{'s' * (counts != '1')} ({all_seeds})"
    output = [f"{runs} runs of {len(groups)} configurations", seeds]
    for key, what in (("params", "P = {}"), ("clients", "{} clients"), ("rounds", "{} rounds")):
        if len(values := _values(groups, key)) == 1:
            output.append(what.format(f"{int(values[0]):,}"))
    return ", ".join(output)


def _curves(groups: Mapping[int, RunGroup], levels: Sequence[float]) -> list[Figure]:
    """Draw each measure over each axis. groups: the groups by slot."""
    created: list[Figure] = []
    for axis, what in AXES.items():
        for metric, output in MEASURES.items():
            having = {slot: g for slot, g in groups.items() if g.has(metric)}
            if axis in ("simulated", "J") and not all(g.has(axis) for g in having.values()):
                continue
            result = {slot: g.band(axis, metric) for slot, g in having.items()}
            lines = [Line.of(name(having[n]), b, slot=n) for n, b in result.items()]
            logx = axis == "MB" and wide([b.x for b in result.values()])
            low, high = _ends(list(result.values()))
            logy = metric == "test_nll" and high > SPAN * low > 0
            accurate = metric == "test_accuracy"
            across = levels if accurate else ()
            room = 0.03 * (high - low)
            least = min([low, *(level - room for level in across)])
            limits = (least if accurate else None, high if metric == "test_nll" else None)
            created += chart(
                *(lines, what, output),
                logx=logx,
                logy=logy,
                limits=limits,
                levels=across,
                shares="y" if accurate else "",
                legend="",
            )
    return created


def _calibration(groups: Mapping[int, RunGroup], legend: Figure) -> Iterator[Part]:
    """Yield reliability diagrams at the posterior mean and averaged over its samples. groups: by slot."""
    created: list[Figure] = []
    for key, what in TABLES.items():
        tables = {slot: (name(g), bins) for slot, g in groups.items() if (bins := pooled(g, key)) is not None}
        created += diagram(tables, what, legend=False)
    if created:
        yield legend
        yield Beside(created)
        yield Text(
            "Accuracy of predictions against their confidence, in 15 bins, after the last evaluated round, "
            "with the predictions of all seeds together; the area of a point grows with their number. On the "
            "dashed diagonal a model is right as often as it says; below it, it is overconfident."
        )


def pooled(group: RunGroup, key: str) -> Values | None:
    """Return the sum of the members' tables; None if a member has no table."""
    tables = [table_of(m.last, key) for m in group.trained]
    filled = [table for table in tables if table is not None]
    return np.sum(filled, axis=0) if filled and len(filled) == len(tables) else None


def _ends(bands: Sequence[pandas.DataFrame]) -> tuple[float, float]:
    """Return the range of values with a margin, without the first rounds, whose models are near chance."""
    after = [np.concatenate([b.low[n:], b.high[n:]]) for b in bands for n in [math.ceil(BEGINNING * len(b))]]
    values = np.concatenate([*after, np.zeros(0)])
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    return low - 0.03 * (high - low), high + 0.03 * (high - low)


def _winners(groups: Sequence[RunGroup], maxima: pandas.DataFrame) -> Iterator[Part]:
    table = winners(groups, pareto(maxima))
    if len(groups) < 2 or not table.rows:
        return
    yield table
    yield Text(f"The best accuracy so far, mean over the seeds; not tested. {unranked(groups)}")


def _differs(groups: Sequence[RunGroup]) -> Iterator[Part]:
    settings = [g.settings for g in groups]
    table, own = differences({g.label: g.settings for g in groups})
    if table.heads[1:]:
        yield table
    for algorithm, text in own.items():
        yield Text(f"Only {algorithm} has: {text}")
    yield Text("All share: " + ", ".join(f"{k} {v}" for k, v in shared(settings).items() if v != ""))


def _runs(groups: Sequence[RunGroup]) -> Table:
    rows = [
        (g.label, str(m.seed), m.status, str(m.rounds), str(m.path))
        for g in groups
        for m in (*g.members, *g.aside)
    ]
    return Table(("", "seed", "status", "rounds", "folder"), rows, 5)


EXPLAINED = (
    "Each run's clients are sorted, the smallest first; lines are means over the seeds, bands their range. "
    "Accuracies are those after the last evaluated round, on the test set with the label shares of a client; "
    "runs of more than 100 clients have none."
)


MOST_CLIENTS = 1000
"""The largest number of clients that a line goes through; of more, some are left out."""


def compared_clients(groups: Mapping[int, RunGroup], legend: Figure) -> Iterator[Part]:
    """Yield charts of bytes and accuracies by client; none for runs with one client. groups: by slot."""
    spent = {slot: [m.client_bytes / 1e6 for m in g.members] for slot, g in groups.items()}
    scores = {slot: [_accuracies(m) for m in g.members] for slot, g in groups.items()}
    drawn: list[Figure] = []
    for values, label in ((spent, "megabytes of a client"), (scores, "accuracy of a client")):
        lines, shares = _lines(groups, values), "y" if values is scores else ""
        drawn += chart(lines, "client, sorted", label, marks=True, shares=shares, legend="")
    if drawn:
        yield legend
        yield Beside(drawn)
        yield Text(EXPLAINED)


def _accuracies(run: Member) -> Values:
    """Return the clients' accuracies after the last evaluated round; empty if they are not known."""
    return np.array([a for a in run.last.get("client_accuracies") or () if a is not None], dtype=np.float64)


def _lines(groups: Mapping[int, RunGroup], values: Mapping[int, Sequence[Values]]) -> list[Line]:
    """Return lines for the groups whose runs all have the same number of values."""
    lines = []
    for slot, members in values.items():
        count = len(members[0])
        if count < 2 or any(len(m) != count for m in members):
            continue
        at = np.unique(np.linspace(0, count - 1, min(count, MOST_CLIENTS)).round().astype(int))
        rows = np.sort(np.array(members), axis=1)[:, at]
        lines.append(Line(name(groups[slot]), at + 1.0, rows.mean(0), rows.min(0), rows.max(0), slot))
    return lines
