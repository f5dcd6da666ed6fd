"""Tables of a comparison: results, costs of an accuracy, bytes by field, and a record per group."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from statistics import fmean
from typing import Any

from fedsim.learning.score_names import CALIBRATION, EXTRA
from launch.numbers import FIRM, NONE, below_target, between, extent, megabytes, optional, target
from launch.results.columns import column
from launch.results.frontier import Cost, cost, ranking
from launch.results.groups import Group, RunGroup
from launch.results.significance import leaders
from launch.table import Table

MEASURES = ("test_accuracy@end", "best test_accuracy@end", "test_nll@end", *(f"{name}@end" for name in EXTRA))
MORE_MEASURES = tuple(
    f"{name}@end"
    for name in (
        *(*CALIBRATION, "client_accuracy_worst"),
        *("ensemble_accuracy", "ensemble_nll", "ensemble_ece", "ensemble_brier"),
    )
)
"""The columns of the table of calibration and clients."""
IN_CSV = (*MEASURES[:3], *MORE_MEASURES)
SIDES = ("down", "up")
SMALL = 0.0005
ALWAYS = {"header", "framing"}
"""Parts that are always shown separately."""
UNFINISHED = "*"
"""The mark of a group without a finished run."""
STOPPED = "†"
"""The mark of a group with a run that ended at its target accuracy, before its last round."""


def name(group: RunGroup) -> str:
    marks = ["" if group.done else UNFINISHED, STOPPED if group.stopped else ""]
    return " ".join([group.label, *filter(None, marks)])


def results(groups: Sequence[RunGroup], marked: bool = True) -> Table:
    """Return the final results of every group. marked: whether the best value of a column, and all values
    that are not distinguishable from it, are bold. Nothing is bold if there are too few seeds
    (launch.results.significance) or if a run ended early, at its target accuracy."""
    columns, texts, best = _measured(groups, MEASURES, marked)
    once = sends_once(groups)
    rows = [
        (
            *(name(g), str(len(g.members)), extent([m.rounds for m in g.members], "d"), *row),
            *(f"{g.params:,}", _units(g, "down"), _units(g, "up")),
            *([f"{_units(g, 'down', once)} + {_units(g, 'up', once)}"] if once else []),
            megabytes([m.bytes for m in g.members]),
        )
        for g, row in zip(groups, texts, strict=True)
    ]
    heads = ("", "seeds", "rounds", *_heads(columns), "P", f"P{FIRM}down", f"P{FIRM}up")
    ends = (f"P{FIRM}once", "MB") if once else ("MB",)
    return Table((*heads, *ends), rows, title="Results", best={(row, 3 + n) for row, n in best})


def calibration(groups: Sequence[RunGroup], marked: bool = True) -> Table:
    """Return the final calibration, client and posterior-sample scores (MORE_MEASURES) of every group. The
    table has no rows if no group has any of these. marked: as in `results`."""
    columns, texts, best = _measured(groups, MORE_MEASURES, marked)
    rows = [(name(g), *row) for g, row in zip(groups, texts, strict=True)] if columns else []
    shifted = {(row, 1 + n) for row, n in best}
    return Table(("", *_heads(columns)), rows, title="Calibration and clients", best=shifted)


def _measured(
    groups: Sequence[RunGroup], measures: Sequence[str], marked: bool
) -> tuple[list[str], list[list[str]], set[tuple[int, int]]]:
    """Return the columns that at least one group has, cells for every group, and the best of them."""
    columns = [c for c in measures if any(g.has(column(c).metric) for g in groups)]
    cells = [[column(c).shown(v) if (v := g.known(c)) else NONE for c in columns] for g in groups]
    best: set[tuple[int, int]] = set()
    if marked and not any(g.stopped for g in groups):
        for n, c in enumerate(columns):
            scores = [final(g, c) if g.done else {} for g in groups]
            best |= {(row, n) for row in leaders(scores, least=column(c).least)}
    return columns, cells, best


def final(group: Group, expression: str) -> dict[tuple[int, str], float]:
    """Return the scores of a column by key; {} if a run does not have its metric."""
    return group.scores(expression) if group.has(column(expression).metric) else {}


def sends_once(groups: Sequence[RunGroup]) -> bool:
    return any(m.units(side, once=True) for g in groups for m in g.members for side in SIDES)


def _heads(columns: Sequence[str]) -> list[str]:
    result = []
    for c in columns:
        head = column(c).heading.removesuffix("@end").replace("best accuracy", "best")
        head = head.replace("client accuracy worst", "worst client").replace("ensemble", "average:")
        result.append(head + (f"{FIRM}%" if column(c).percent else ""))
    return result


def costs(groups: Sequence[RunGroup], levels: Sequence[float]) -> list[Table]:
    """Return a table per accuracy: the megabytes and rounds to reach it, in ascending order of the median."""
    heads = ("", "MB, median", "range", "× the least", "verdict", "seeds", "rounds")
    return [
        Table(heads, list(_costs(groups, ranking(groups, level))), title=cost_title(level))
        for level in levels
    ]


def cost_title(level: float) -> str:
    return f"Bytes to an accuracy of {target(level)}"


def _costs(groups: Sequence[RunGroup], ranked: Sequence[Cost]) -> Iterator[tuple[str, ...]]:
    for c in ranked:
        ends = NONE
        if c.spent and c.seeds > 1:
            last = megabytes([max(c.spent)]) if c.whole else f">{FIRM}{megabytes([max(c.ended)])}"
            ends = between(megabytes([min(c.spent)]), last)
        median = megabytes([c.median]) if math.isfinite(c.median) else unreached(c)
        low, high = (math.exp(x) for x in (c.factor.low, c.factor.high))
        ratio = optional(c.ratio, ".2f") + (f" ({low:.2f} to {high:.2f})" if c.factor.ranked else "")
        rounds = column("rounds to 1.0").shown(c.rounds) if c.whole else NONE
        count = f"{len(c.spent)}{FIRM}of{FIRM}{c.seeds}"
        yield name(groups[c.group]), median, ends, ratio, c.verdict, count, rounds


def costs_json(groups: Sequence[RunGroup], levels: Sequence[float]) -> list[dict[str, Any]]:
    """Return the tables of `costs` as one object per accuracy, with bytes instead of megabytes."""
    result = []
    for level in levels:
        rows = [
            {
                "group": groups[c.group].label,
                "median": c.median if math.isfinite(c.median) else None,
                "reached": len(c.spent),
                "seeds": c.seeds,
                "ratio": c.ratio,
                "verdict": c.verdict,
                "n": c.factor.n,
                **{key: math.exp(x) if d.ranked else None for key, x in (("low", d.low), ("high", d.high))},
                "p": d.p,
                "holm": d.holm,
                "family": d.family * d.ranked,
            }
            for c in ranking(groups, level)
            for d in [c.factor]
        ]
        result.append({"accuracy": level, "rows": rows})
    return result


def unreached(c: Cost) -> str:
    """Return the number of seeds that reach an accuracy, or the best accuracy reached, rounded down."""
    if c.spent:
        return f"{len(c.spent)}{FIRM}of{FIRM}{c.seeds}"
    if math.isnan(c.best):
        return NONE
    return f"{NONE}{FIRM}({below_target(c.best).replace(' ', FIRM)})"


def fields(groups: Sequence[RunGroup]) -> Table:
    """Return the bytes by field of both directions, as the mean over the members."""
    by = parts(groups)
    names = sorted({n for row in by for n in row}, key=lambda n: -sum(row.get(n, 0) for row in by))
    rows = [
        (name(g), *(optional(row.get(n), ",.0f") for n in names), f"{sum(row.values()):,.0f}")
        for g, row in zip(groups, by, strict=True)
    ]
    return Table(("", *names, "total"), rows, title="Bytes by field")


def parts(groups: Sequence[RunGroup]) -> list[dict[str, float]]:
    """Return each group's bytes by field. Fields with a share below SMALL in all groups are `other`."""
    rows = [g.bytes_by_field() for g in groups]
    shares = [{n: x / sum(row.values()) for n, x in row.items()} for row in rows]
    small = {n for row in rows for n in row if all(share.get(n, 0) < SMALL for share in shares)}
    small -= ALWAYS
    result = []
    for row in rows:
        other = sum(x for n, x in row.items() if n in small)
        result.append({n: x for n, x in row.items() if n not in small} | ({"other": other} if other else {}))
    return result


def records(groups: Sequence[RunGroup], levels: Sequence[float]) -> Table:
    """Return one row per group, with the mean, minimum and maximum of every measure over the members, and ''
    for a missing number."""
    names = sorted({n for g in groups for n in g.bytes_by_field()})
    rows = [_record(g, levels, names) for g in groups]
    return Table(tuple(rows[0]), [tuple(row.values()) for row in rows])


def _record(group: RunGroup, levels: Sequence[float], names: Collection[str]) -> dict[str, object]:
    row: dict[str, object] = {
        "group": group.label,
        "algo": group.settings["algo"],
        "dataset": group.settings["dataset"],
        "finished": group.done,
        "ended_at_target": group.stopped,
        "seeds": len(group.members),
        "seed_numbers": " ".join(map(str, group.seeds)),
        "params": group.params,
    }
    for c in IN_CSV:
        row |= _spread(c.replace(" ", "_").removesuffix("@end"), group.known(c))
    row |= _spread("bytes", [m.bytes for m in group.members])
    for side in SIDES:
        row[f"units_of_p_{side}"] = _mean([m.units(side) for m in group.members])
        row[f"units_of_p_once_{side}"] = _mean([m.units(side, once=True) for m in group.members])
    for level in levels:
        spending = cost(0, group, level)
        row[f"reached_{level:g}"] = len(spending.spent)
        row |= _spread(f"bytes_to_{level:g}", spending.spent if spending.whole else ())
        row |= _spread(f"rounds_to_{level:g}", spending.rounds if spending.whole else ())
        row[f"bytes_to_{level:g}_median"] = spending.median if math.isfinite(spending.median) else ""
    spent = group.bytes_by_field()
    return row | {f"bytes of {n}": spent.get(n, 0) for n in names}


def _spread(name: str, values: Sequence[float]) -> dict[str, object]:
    ends = {"mean": _mean(values), "low": min(values, default=""), "high": max(values, default="")}
    return {f"{name}_{what}": x for what, x in ends.items()}


def _mean(values: Sequence[float]) -> float | str:
    return fmean(values) if values else ""


def _units(group: RunGroup, side: str, once: bool = False) -> str:
    return f"{fmean(m.units(side, once) for m in group.members):.3f}"
