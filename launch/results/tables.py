"""Tables of a comparison: results, what an accuracy costs, bytes by field; as Markdown and as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

from fedsim.errors import DiskError
from fedsim.learning.likelihoods import EXTRA
from launch.results.frontier import reaching
from launch.results.groups import Group
from launch.results.statistics import heading, percent, shown

NONE = "–"
FIRM = "\N{NO-BREAK SPACE}"
MEASURES = {
    "test_accuracy@end": "test_accuracy",
    "best test_accuracy@end": "test_accuracy",
    "test_nll@end": "test_nll",
    **{f"{name}@end": name for name in ("ensemble_accuracy", "ensemble_nll", *EXTRA)},
}
"""Columns of launch.results.statistics and the metric that they need."""
SMALL = 0.0005
ALWAYS = {"header", "framing"}
"""Parts that are named however small they are."""
UNFINISHED = "*"
"""Behind the name of a group that no run of has finished."""


@dataclass(frozen=True)
class Grid:
    """A table as text: a header and lines of equal length, the first cell naming the row."""

    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        rows = [self.header, ("---",) * len(self.header), *self.lines]
        body = "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
        return f"### {self.title}\n\n{body}\n" if self.title else f"{body}\n"


def best(expression: str, column: Sequence[Sequence[float]]) -> int:
    """The row with the highest accuracy, the lowest NLL, the fewest rounds or megabytes; -1: none."""
    sign = 1 if percent(expression) and " to " not in expression else -1
    means = [sign * sum(v) / len(v) if v and not any(map(math.isnan, v)) else -math.inf for v in column]
    return means.index(max(means)) if means and max(means) > -math.inf else -1


def name(group: Group) -> str:
    return group.label if group.done else f"{group.label} {UNFINISHED}"


def seeds(numbers: Sequence[int]) -> str:
    """62–64, 70 for 62, 63, 64, 70."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]}–{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


def results(groups: Sequence[Group], marked: bool = True) -> Grid:
    """The end of every group. marked: whether the best of a column is bold."""
    columns = [c for c, metric in MEASURES.items() if any(g.has(metric) for g in groups)]
    cells = [[g.values(c, MEASURES[c]) for c in columns] for g in groups]
    texts = [[_text(c, v) for c, v in zip(columns, row, strict=True)] for row in cells]
    if marked and len(groups) > 1:
        for n, column in enumerate(columns):
            top = best(column, [row[n] for row in cells])
            if top >= 0:
                texts[top][n] = f"**{texts[top][n]}**"
    heads = [f"{_head(c)}{f'{FIRM}%' if percent(c) else ''}" for c in columns]
    lines = [
        (name(g), seeds(g.seeds), *row, f"{g.params:,}", *_units(g), megabytes([m.bytes for m in g.members]))
        for g, row in zip(groups, texts, strict=True)
    ]
    return Grid("Results", ("", "seeds", *heads, "P", f"P{FIRM}down", f"P{FIRM}up", "MB"), tuple(lines))


def costs(groups: Sequence[Group], levels: Sequence[float]) -> Grid:
    """Megabytes and rounds until an accuracy is reached."""
    heads, columns = [""], []
    for level in levels:
        heads += [f"MB to {level:g}", f"rounds to {level:g}"]
        columns.append([reaching(g, level) for g in groups])
    lines = [
        (name(g), *(text for column in columns for text in reached_text(column[n])))
        for n, g in enumerate(groups)
    ]
    return Grid("Bytes to an accuracy", tuple(heads), tuple(lines) if levels else ())


def reached_text(result: Sequence[tuple[int, int] | None]) -> tuple[str, str]:
    """Megabytes and rounds; if not all members get there, how many do."""
    there = [at for at in result if at is not None]
    if not there:
        return NONE, NONE
    if len(there) < len(result):
        return f"{len(there)} of {len(result)} seeds", NONE
    return megabytes([n for _, n in there]), shown("rounds to 1.0", [r for r, _ in there])


def megabytes(counts: Sequence[float], least: int = 1, spread: bool = True) -> str:
    """Mean ± population standard deviation of bytes in MB, to three figures and `least` decimals at least."""
    mean, sd = fmean(counts) / 1e6, pstdev(counts) / 1e6
    digits = max(least, 2 - math.floor(math.log10(mean))) if mean else least
    exact = not spread or len(counts) < 2 or sd < 0.5 * 10**-digits
    return f"{mean:,.{digits}f}" + ("" if exact else f"±{sd:.{digits}f}")


def fields(groups: Sequence[Group]) -> Grid:
    """Bytes by field, mean over the members, both directions."""
    rows = parts(groups)
    names = sorted({n for row in rows for n in row}, key=lambda n: -sum(row.get(n, 0) for row in rows))
    lines = [
        (name(g), *(f"{row[n]:,.0f}" if n in row else NONE for n in names), f"{sum(row.values()):,.0f}")
        for g, row in zip(groups, rows, strict=True)
    ]
    return Grid("Bytes by field", ("", *names, "total"), tuple(lines))


def parts(groups: Sequence[Group]) -> list[dict[str, float]]:
    """Bytes by field of every group; fields of which no group has a share of SMALL are one, other."""
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
    """One line per group: mean, low and high over the members of every measure.

    Raises:
        DiskError: if the disk cannot be read or written.
    """
    names = sorted({n for g in groups for n in g.bytes_by_field()})
    try:
        with path.open("w", newline="") as file:
            out = csv.writer(file, lineterminator="\n")
            rows = [_record(g, levels, names) for g in groups]
            out.writerow(rows[0])
            out.writerows(row.values() for row in rows)
    except OSError as e:
        raise DiskError(f"cannot write {path}: {e.strerror}") from None


def _record(group: Group, levels: Sequence[float], names: Sequence[str]) -> dict[str, object]:
    row: dict[str, object] = {
        "group": group.label,
        "algo": group.settings["algo"],
        "dataset": group.settings["dataset"],
        "finished": group.done,
        "seeds": " ".join(map(str, group.seeds)),
        "params": group.params,
    }
    for column in ("test_accuracy@end", "best test_accuracy@end", "test_nll@end"):
        row |= _spread(column.replace(" ", "_").removesuffix("@end"), group.values(column, MEASURES[column]))
    row |= _spread("bytes", [m.bytes for m in group.members])
    for side in ("down", "up"):
        row[f"units_of_p_{side}"] = _mean([m.units(side) for m in group.members])
    for level in levels:
        result = reaching(group, level)
        there = [at for at in result if at is not None]
        row[f"reached_{level:g}"] = len(there)
        whole = there if len(there) == len(result) else []
        row |= _spread(f"bytes_to_{level:g}", [n for _, n in whole])
        row |= _spread(f"rounds_to_{level:g}", [r for r, _ in whole])
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


def _head(column: str) -> str:
    return heading(column).removesuffix("@end").replace("best accuracy", "best")


def _text(column: str, values: Sequence[float]) -> str:
    return shown(column, values) if values else NONE


def _units(group: Group) -> list[str]:
    """Down and up, per client and exchange."""
    means = [fmean(m.units(side) for m in group.members) for side in ("down", "up")]
    return [NONE if math.isnan(mean) else f"{mean:.3f}" for mean in means]
