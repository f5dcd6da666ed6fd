"""Tables of a comparison as Markdown and CSV: results, costs of an accuracy, bytes by field."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev

from fedsim.learning.score_names import CALIBRATION, EXTRA
from fedsim.printable import markdown, one_line
from launch.configuration.target_accuracy import below_target, percent as target_text
from launch.results.frontier import Cost, cost, ranking
from launch.results.groups import Group
from launch.results.significance import Difference, differences, leaders
from launch.results.statistics import heading, less_is_better, percent, shown
from launch.terminal import output_file

NONE = "–"
FIRM = "\N{NO-BREAK SPACE}"
MEASURES = {
    "test_accuracy@end": "test_accuracy",
    "best test_accuracy@end": "test_accuracy",
    "test_nll@end": "test_nll",
    **{f"{name}@end": name for name in EXTRA},
}
"""Columns of launch.results.statistics, and the metric that each column needs."""
MORE_MEASURES = {
    f"{name}@end": name
    for name in (
        *(*CALIBRATION, "client_accuracy_worst"),
        *("ensemble_accuracy", "ensemble_nll", "ensemble_ece", "ensemble_brier"),
    )
}
"""The columns of the table of calibration and clients, and the metric of each column."""
IN_CSV = ("test_accuracy@end", "best test_accuracy@end", "test_nll@end")
"""Columns of MEASURES that are in the CSV, which also has all columns of MORE_MEASURES."""
SMALL = 0.0005
ALWAYS = {"header", "framing"}
"""Parts that are always shown separately."""
UNFINISHED = "*"
"""The mark of a group without a finished run."""
STOPPED = "†"
"""The mark of a group with a run that ended at its target accuracy, before its last round."""


@dataclass(frozen=True)
class Grid:
    """A table of text: a header and lines of equal length. The first cell of a line names the row."""

    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return a Markdown table. A bar in a cell, as in rho = 1/|S|, is escaped; it would end the cell."""
        rows = [self.header, ("---",) * len(self.header), *self.lines]
        body = "\n".join(f"| {' | '.join(map(markdown, cells))} |" for cells in rows)
        return f"### {markdown(self.title)}\n\n{body}\n" if self.title else f"{body}\n"


def name(group: Group) -> str:
    marks = ["" if group.done else UNFINISHED, STOPPED if group.stopped else ""]
    return " ".join([group.label, *filter(None, marks)])


def seeds(numbers: Sequence[int]) -> str:
    """Return seed numbers as text, such as 62–64, 70 for 62, 63, 64, 70."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]}–{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


def results(groups: Sequence[Group], marked: bool = True) -> Grid:
    """Return the final results of every group. marked: whether the best value of a column, and all values
    that are not distinguishable from it, are bold. Nothing is bold if there are too few seeds
    (launch.results.significance) or if a run ended early, at its target accuracy."""
    columns, texts = _measured(groups, MEASURES, marked)
    heads = _heads(columns)
    once = any(m.units(side, once=True) for g in groups for m in g.members for side in ("down", "up"))
    lines = [
        (
            *(name(g), str(len(g.members)), _rounds(g), *row, f"{g.params:,}"),
            *(_units(g, side) for side in ("down", "up")),
            *([f"{_units(g, 'down', once)} + {_units(g, 'up', once)}"] if once else []),
            megabytes([m.bytes for m in g.members]),
        )
        for g, row in zip(groups, texts, strict=True)
    ]
    units = [f"P{FIRM}down", f"P{FIRM}up", *([f"P{FIRM}once"] if once else [])]
    return Grid("Results", ("", "seeds", "rounds", *heads, "P", *units, "MB"), tuple(lines))


def calibration(groups: Sequence[Group], marked: bool = True) -> Grid:
    """Return the final calibration, client and posterior-sample scores (MORE_MEASURES) of every group. The
    table has no lines if no group has any of these. marked: as in `results`."""
    columns, texts = _measured(groups, MORE_MEASURES, marked)
    lines = [(name(g), *row) for g, row in zip(groups, texts, strict=True)] if columns else []
    return Grid("Calibration and clients", ("", *_heads(columns)), tuple(lines))


def _measured(
    groups: Sequence[Group], measures: Mapping[str, str], marked: bool
) -> tuple[list[str], list[list[str]]]:
    """Return the columns that at least one group has, and a line of cells per group."""
    columns = [c for c, metric in measures.items() if any(g.has(metric) for g in groups)]
    cells = [[g.values(c, measures[c]) for c in columns] for g in groups]
    texts = [[shown(c, v) if v else NONE for c, v in zip(columns, row, strict=True)] for row in cells]
    if marked and not any(g.stopped for g in groups):
        for n, column in enumerate(columns):
            scores = [g.scores(column, measures[column]) if g.done else {} for g in groups]
            for top in leaders(scores, least=less_is_better(column)):
                texts[top][n] = f"**{texts[top][n]}**"
    return columns, texts


def _heads(columns: Sequence[str]) -> list[str]:
    result = []
    for column in columns:
        head = heading(column).removesuffix("@end").replace("best accuracy", "best")
        head = head.replace("client accuracy worst", "worst client").replace("ensemble", "average:")
        result.append(head + (f"{FIRM}%" if percent(column) else ""))
    return result


def costs(groups: Sequence[Group], levels: Sequence[float]) -> list[Grid]:
    """Return a table per accuracy: the megabytes and rounds to reach it, in ascending order of the median."""
    return [
        Grid(
            f"Bytes to an accuracy of {target_text(level)}",
            ("", "MB, median", "range", "× the least", "verdict", "seeds", "rounds"),
            tuple(_costs(groups, ranking(groups, level))),
        )
        for level in levels
    ]


def _costs(groups: Sequence[Group], ranked: Sequence[Cost]) -> Iterator[tuple[str, ...]]:
    for c, factor in zip(ranked, factors(ranked), strict=True):
        ends = NONE
        if c.spent and c.seeds > 1:
            last = megabytes([max(c.spent)]) if c.whole else f">{FIRM}{megabytes([max(c.ended)])}"
            ends = between(megabytes([min(c.spent)]), last)
        median = megabytes([c.median]) if math.isfinite(c.median) else unreached(c)
        ratio = NONE if factor.ratio is None else f"{factor.ratio:.2f}"
        if factor.low is not None:
            ratio += f" ({factor.low:.2f} to {factor.high:.2f})"
        rounds = shown("rounds to 1.0", c.rounds) if c.whole else NONE
        count = f"{len(c.spent)}{FIRM}of{FIRM}{c.seeds}"
        yield name(groups[c.group]), median, ends, ratio, factor.verdict, count, rounds


@dataclass(frozen=True)
class Factor:
    """The bytes of a group to an accuracy, divided by those of the group with the least; None if unknown.

    n: the number of seeds that both have. low, high: the 95 % interval of the ratio. p, holm: the p-value of
    the paired t-test of logarithms, by itself and corrected for `family` comparisons.
    """

    ratio: float | None
    verdict: str
    n: int = 0
    low: float | None = None
    high: float | None = None
    p: float | None = None
    holm: float | None = None
    family: int = 0


def factors(ranked: Sequence[Cost]) -> list[Factor]:
    """Return the factor of each of `ranked` over the first one that sends bytes and has a median.

    Differences of logarithms are paired and tested (launch.results.significance), so the ratio is a geometric
    mean and has an interval. A group with a seed that does not reach the accuracy is not tested; its ratio is
    that of the medians, if both are known.
    """
    first = next((c for c in ranked if 0 < c.median < math.inf), None)
    tested = _tested(ranked, first) if first is not None and first.whole else {}
    return [_factor(c, first, tested.get(c.group)) for c in ranked]


def _factor(c: Cost, first: Cost | None, d: Difference | None) -> Factor:
    """Return the factor of one group. d: its difference of logarithms from `first`, if both are tested."""
    ratio = c.median / first.median if first and math.isfinite(c.median) else None
    if c is first:
        return Factor(ratio, "least")
    if d is not None and d.ranked:
        low, mean, high = (math.exp(x) for x in (d.low, d.mean, d.high))
        return Factor(mean, d.verdict("more bytes", "fewer bytes"), d.n, low, high, d.p, d.holm, d.family)
    if d is not None:
        return Factor(ratio, d.verdict(), d.n)
    if c.median == 0:
        return Factor(ratio, "sends nothing")
    if c.whole and first is not None:
        return Factor(ratio, f"{len(first.spent)} of {first.seeds} of the first reach it")
    return Factor(ratio, f"{len(c.spent)} of {c.seeds} reach it")


def _tested(ranked: Sequence[Cost], first: Cost) -> dict[int, Difference]:
    """Return the differences of logarithms from `first`, by group, of all groups whose seeds all reach it."""
    whole = [first, *(c for c in ranked if c is not first and c.whole and min(c.spent) > 0)]
    logs = [{key: math.log(n) for key, n in c.by_seed.items()} for c in whole]
    compared = differences(logs, 0, all_pairs=True)
    return {c.group: d for c, d in zip(whole[1:], compared[1:], strict=True)}


def costs_json(groups: Sequence[Group], levels: Sequence[float]) -> list[dict[str, object]]:
    """Return the tables of `costs` as one object per accuracy, with bytes instead of megabytes."""
    result: list[dict[str, object]] = []
    for level in levels:
        ranked = ranking(groups, level)
        rows = [
            {
                "group": groups[c.group].label,
                "median": c.median if math.isfinite(c.median) else None,
                "reached": len(c.spent),
                "seeds": c.seeds,
                **asdict(factor),
            }
            for c, factor in zip(ranked, factors(ranked), strict=True)
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


def between(low: str, high: str) -> str:
    """Return a range as text; only one end if both ends are equal."""
    return low if low == high else f"{low} to {high}"


def extent(values: Sequence[float], form: str = ",.0f") -> str:
    """Return the smallest and the largest value as text, such as 3 to 5; NONE without values."""
    return between(format(min(values), form), format(max(values), form)) if values else NONE


def megabytes(counts: Sequence[float], least: int = 1, spread: bool = True) -> str:
    """Return mean ± population standard deviation in MB, to three figures and at least `least` decimals."""
    mean, sd = fmean(counts) / 1e6, pstdev(counts) / 1e6
    digits = max(least, 2 - math.floor(math.log10(mean))) if mean else least
    exact = not spread or len(counts) < 2 or sd < 0.5 * 10**-digits
    return f"{mean:,.{digits}f}" + ("" if exact else f"±{sd:.{digits}f}")


def fields(groups: Sequence[Group]) -> Grid:
    """Return the bytes by field of both directions, as the mean over the members."""
    rows = parts(groups)
    names = sorted({n for row in rows for n in row}, key=lambda n: -sum(row.get(n, 0) for row in rows))
    lines = [
        (name(g), *(f"{row[n]:,.0f}" if n in row else NONE for n in names), f"{sum(row.values()):,.0f}")
        for g, row in zip(groups, rows, strict=True)
    ]
    return Grid("Bytes by field", ("", *names, "total"), tuple(lines))


def parts(groups: Sequence[Group]) -> list[dict[str, float]]:
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


def write_csv(path: Path, groups: Sequence[Group], levels: Sequence[float]) -> None:
    """Write one line per group, with the mean, minimum and maximum of every measure over the members."""
    rows = records(groups, levels)
    with output_file(path) as file, io.TextIOWrapper(file, "utf-8", newline="") as text:
        out = csv.writer(text, lineterminator="\n")
        for row in (rows[0], *(row.values() for row in rows)):
            out.writerow([one_line(cell) if isinstance(cell, str) else cell for cell in row])


def records(groups: Sequence[Group], levels: Sequence[float]) -> list[dict[str, object]]:
    """Return one flat record per group, with '' for a missing number."""
    names = sorted({n for g in groups for n in g.bytes_by_field()})
    return [_record(g, levels, names) for g in groups]


def _record(group: Group, levels: Sequence[float], names: Sequence[str]) -> dict[str, object]:
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
    three = {column: MEASURES[column] for column in IN_CSV}
    for column, metric in (three | MORE_MEASURES).items():
        row |= _spread(column.replace(" ", "_").removesuffix("@end"), group.values(column, metric))
    row |= _spread("bytes", [m.bytes for m in group.members])
    for side in ("down", "up"):
        row[f"units_of_p_{side}"] = _mean([m.units(side) for m in group.members])
        row[f"units_of_p_once_{side}"] = _mean([m.units(side, once=True) for m in group.members])
    for level in levels:
        c = cost(0, group, level)
        row[f"reached_{level:g}"] = len(c.spent)
        row |= _spread(f"bytes_to_{level:g}", c.spent if c.whole else ())
        row |= _spread(f"rounds_to_{level:g}", c.rounds if c.whole else ())
        row[f"bytes_to_{level:g}_median"] = c.median if math.isfinite(c.median) else ""
    spent = group.bytes_by_field()
    return row | {f"bytes of {n}": spent.get(n, 0) for n in names}


def _spread(name: str, values: Sequence[float]) -> dict[str, object]:
    return {
        f"{name}_mean": _mean(values),
        f"{name}_low": min(values, default=""),
        f"{name}_high": max(values, default=""),
    }


def _mean(values: Sequence[float]) -> float | str:
    return fmean(values) if values else ""


def _units(group: Group, side: str, once: bool = False) -> str:
    return f"{fmean(m.units(side, once) for m in group.members):.3f}"


def _rounds(group: Group) -> str:
    """Return the last evaluated rounds of the members as text."""
    ends = sorted({m.rounds for m in group.members})
    return between(str(ends[0]), str(ends[-1]))
