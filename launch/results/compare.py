"""fedsim compare: runs side by side, as a page, on the terminal, as Markdown and as CSV."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedsim.errors import UsageError
from launch.results import html
from launch.results.comparison_page import comparable, remarks, render, warnings
from launch.results.frontier import FrontierPoint, levels, pareto, reaching, running_maximum, winning_ranges
from launch.results.groups import Group, gather
from launch.results.statistics import shown
from launch.results.tables import NONE, costs, fields, megabytes, name, results, write_csv

MOST_RANGES = 6
"""Budgets whose winner the terminal names; the page names all."""


def compare(
    paths: Sequence[Path],
    *,
    out: Path,
    to: Sequence[str] = (),
    where: Sequence[str] = (),
    markdown: Path | None = None,
    csv: Path | None = None,
) -> None:
    """Write the files and print the table. to: accuracies, as 0.75 or 75%; default: some that tell the groups
    apart. where: KEY=VALUE of the experiment.

    Raises:
        UsageError: if an argument is wrong.
        DataError: if data is missing or damaged.
        DiskError: if the disk cannot be read or written.
    """
    asked = sorted({accuracy(text) for text in to})
    groups = gather(paths, where)
    maxima = [running_maximum(n, g) for n, g in enumerate(groups)]
    target = asked or levels(maxima, _start(groups))
    html.save(out, render(groups, maxima, target))
    written = [("page", out)]
    if markdown is not None:
        grids = (results(groups, comparable(groups)), costs(groups, target), fields(groups))
        html.save(markdown, "\n".join(grid.markdown() for grid in grids if grid.lines))
        written.append(("Markdown", markdown))
    if csv is not None:
        write_csv(csv, groups, target)
        written.append(("CSV", csv))
    console = Console(highlight=False, emoji=False)
    for note in (*warnings(groups), *remarks(groups)):
        console.print(f"note: {escape(note)}")
    room = len(asked) or max(1, (console.width - 58) // 9)
    console.print(_table(groups, target[-room:]))
    _print_frontier(console, groups, maxima)
    for what, path in written:
        console.print(f"{what}: {escape(str(path))}", soft_wrap=True)


def accuracy(text: str) -> float:
    """Read an accuracy, such as 0.75 or 75%.

    Raises:
        UsageError: for what is none.
    """
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise UsageError(f"--to {text!r}: give an accuracy, such as 0.75 or 75%")
    return value


def _start(groups: Sequence[Group]) -> float:
    """The accuracy that comes for nothing: the highest of the start models."""
    starts = [c.metric("test_accuracy")[0] for g in groups for c in g.curves if c.has("test_accuracy")]
    return max((s for s in starts if not math.isnan(s)), default=0.0)


def _table(groups: Sequence[Group], target: Sequence[float]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", overflow="fold")
    heads = ["seeds", "acc. %", "NLL", "MB", *(f"MB to\n{level:g}" for level in target)]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for g in groups:
        ends = (("test_accuracy@end", "test_accuracy"), ("test_nll@end", "test_nll"))
        cells = [shown(c, v) if (v := g.values(c, metric)) else NONE for c, metric in ends]
        cells.append(_megabytes([m.bytes for m in g.members]))
        for level in target:
            result = reaching(g, level)
            there = [n for at in result if at is not None for n in at[1:]]
            partly = f"{len(there)} of {len(result)}" if there else NONE
            cells.append(_megabytes(there) if there and len(there) == len(result) else partly)
        table.add_row(escape(name(g)), str(len(g.members)), *cells)
    return table


def _megabytes(counts: Sequence[float]) -> str:
    return megabytes(counts, least=0, spread=False)


def _print_frontier(
    console: Console, groups: Sequence[Group], maxima: Sequence[Sequence[FrontierPoint]]
) -> None:
    result = winning_ranges(pareto([p for points in maxima for p in points]))
    if len(groups) < 2 or not 0 < len(result) <= MOST_RANGES:
        return
    output = [
        f"{escape(name(groups[r.first.group]))} {'from' if math.isinf(r.until) else 'to'} "
        f"{_megabytes([1e6 * (r.first.MB if math.isinf(r.until) else r.until)])} MB"
        for r in result
    ]
    console.print(f"most accurate: {', '.join(output)}")
