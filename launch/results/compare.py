"""fedsim compare: runs side by side, as a page, on the terminal, as Markdown and as CSV."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fedsim.errors import DiskError, UsageError, unknown
from launch import terminal
from launch.configuration.target_accuracy import parsed, percent
from launch.results.budget_picture import winners
from launch.results.comparison_page import below, comparable, remarks, render, unranked, warnings
from launch.results.differences import Compared
from launch.results.frontier import FrontierPoint, cost, levels, pareto, running_maximum
from launch.results.groups import Group, gather
from launch.results.statistics import shown
from launch.results.tables import (
    NONE,
    calibration,
    costs,
    costs_json,
    fields,
    megabytes,
    name,
    records,
    results,
    unreached,
    write_csv,
)
from launch.terminal import print_json, print_table, write_text

MOST_RANGES = 6
"""With more ranges of budgets than this, only the page shows the best group of each range."""
WIDE = 110
"""The minimum terminal width for the columns of MORE."""
COMPARED = {"test_accuracy@end": "test_accuracy", "test_nll@end": "test_nll", "test_ece@end": "test_ece"}
"""Columns whose differences are tested, and their metrics."""
SHOWN = ("p (Holm)", "difference", "95 % interval", "verdict")
"""Columns of the terminal's table of differences; the first one needs a width of WIDE."""
MORE_HEADS = {
    "test_ece": "ECE",
    "test_brier": "Brier",
    "client_accuracy_worst": "worst\nclient %",
    "simulated_seconds": "s,\nsimulated",
}
MORE = {f"{metric.removesuffix('_seconds')}@end": metric for metric in MORE_HEADS}
FOLDER = Path("comparisons")
"""The folder of the page if --out is not given."""


@dataclass(frozen=True)
class Comparison:
    """Groups of runs side by side. maxima: frontier.running_maximum of each group. accuracies: the
    levels for which the bytes to reach them are shown. compared: the final scores, with their differences."""

    groups: Sequence[Group]
    maxima: Sequence[Sequence[FrontierPoint]]
    accuracies: Sequence[float]
    compared: Sequence[Compared] = ()

    @staticmethod
    def of(
        paths: Sequence[Path], to: Sequence[str] = (), where: Sequence[str] = (), against: str | None = None
    ) -> Comparison:
        """Read run folders, and folders that contain run folders.

        to: accuracies such as 0.75 or 75%; by default the target accuracies of the runs, or levels that
        distinguish the groups. where: KEY=VALUE conditions, all of which a run's experiment must meet.
        against: the reference of the differences, by its label or a part of it; by default the best group.
        """
        asked = sorted({parsed(text, "--to") for text in to})
        groups = gather(paths, where)
        maxima = [running_maximum(n, g) for n, g in enumerate(groups)]
        targets = sorted({float(until) for g in groups if (until := g.settings.get("until"))})
        accuracies = asked or targets or levels(maxima, _start(groups))
        return Comparison(groups, maxima, accuracies, _compared(groups, against))

    def write(self, page: Path | None, markdown: Path | None, csv: Path | None) -> list[tuple[str, Path]]:
        """Write each file whose path is given; return the kind and the path of each."""
        written = []
        if page is not None:
            write_text(page, render(self.groups, self.maxima, self.accuracies, self.compared))
            written.append(("page", page))
        if markdown is not None:
            firm = comparable(self.groups)
            tables = (results(self.groups, firm), calibration(self.groups, firm))
            grids = (
                *tables,
                *(c.grid() for c in self.compared),
                *costs(self.groups, self.accuracies),
                fields(self.groups),
            )
            write_text(markdown, "\n".join(grid.markdown() for grid in grids if grid.lines))
            written.append(("Markdown", markdown))
        if csv is not None:
            write_csv(csv, self.groups, self.accuracies)
            written.append(("CSV", csv))
        return written

    def to_json(self, written: Sequence[tuple[str, Path]] = ()) -> dict[str, object]:
        """Return the tables; `groups` has the columns of --csv, with null for a missing number."""
        rows = records(self.groups, self.accuracies)
        frontier = pareto([p for points in self.maxima for p in points])
        return {
            "groups": [{key: None if v == "" else v for key, v in row.items()} for row in rows],
            "accuracies": list(self.accuracies),
            "differences": [c.to_json() for c in self.compared],
            "costs": costs_json(self.groups, self.accuracies),
            "frontier": [{**asdict(p), "group": self.groups[p.group].label} for p in frontier],
            "notes": [*warnings(self.groups), *remarks(self.groups), *below(self.groups)],
            "files": {what.lower(): path for what, path in written},
        }

    def print_tables(self, console: Console, shown_levels: int = 0) -> None:
        """Print the results, the differences, and the best group by budget. shown_levels: the number of
        accuracies to show; 0 for as many as fit the width."""
        for note in (*warnings(self.groups), *remarks(self.groups)):
            console.print(f"note: {note}")
        more = [c for c in MORE if console.width >= WIDE and any(g.has(MORE[c]) for g in self.groups)]
        room = shown_levels or max(1, (console.width - 58 - 14 * len(more)) // 11)
        print_table(console, _table(self.groups, self.accuracies[-room:], more))
        for note in below(self.groups):
            console.print(note)
        _print_differences(console, self.compared)
        _print_frontier(console, self.groups, self.maxima)
        if len(self.groups) > 1 and (note := unranked(self.groups)):
            console.print(note)


def compare(
    paths: Sequence[Path],
    *,
    out: Path | None = None,
    to: Sequence[str] = (),
    where: Sequence[str] = (),
    markdown: Path | None = None,
    csv: Path | None = None,
    against: str | None = None,
    as_json: bool = False,
) -> None:
    """Write the files and print the table. out: by default a new file in FOLDER."""
    comparison = Comparison.of(paths, to, where, against)
    written = comparison.write(out or _new_file(), markdown, csv)
    if as_json:
        return print_json(comparison.to_json(written))
    console = terminal.console()
    comparison.print_tables(console, len(set(to)))
    for what, path in written:
        console.print(f"{what}: {path}", soft_wrap=True)
    return None


def _new_file() -> Path:
    """Return FOLDER/<time>.html, with a number if that file exists; an earlier page is never replaced."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}"
    path, n = FOLDER / f"{stem}.html", 1
    while path.exists():
        path, n = FOLDER / f"{stem}-{n}.html", n + 1
    try:
        FOLDER.mkdir(exist_ok=True)
    except OSError as e:
        raise DiskError(
            f"cannot make the folder {FOLDER}: {e.strerror}; --out FILE is another place"
        ) from None
    return path


def _compared(groups: Sequence[Group], against: str | None) -> list[Compared]:
    """Compare the final scores. Groups that are unfinished or ended at their target accuracy have none.

    Raises:
        UsageError: If `against` names a group without scores.
    """
    reference = None if against is None else _place(groups, against)
    reasons = ["not finished" if not g.done else "ended at its target" if g.stopped else "" for g in groups]
    without = {n: reason for n, reason in enumerate(reasons) if reason}
    if reference is not None and (reference in without or len(groups) < 2):
        reason = without.get(reference, "there is no other group")
        raise UsageError(f"--against {against!r}: no differences from {groups[reference].label}: {reason}")
    result = []
    for column, metric in COMPARED.items():
        scores = [{} if n in without else g.scores(column, metric) for n, g in enumerate(groups)]
        result.append(Compared.of(column, [name(g) for g in groups], scores, reference, without))
    return [c for c in result if c is not None]


def _place(groups: Sequence[Group], text: str) -> int:
    """Return the index of the group with this label, or of the only group whose label contains the text."""
    labels = [g.label for g in groups]
    matching = [n for n, label in enumerate(labels) if label == text] or [
        n for n, label in enumerate(labels) if text in label
    ]
    if len(matching) > 1:
        several = ", ".join(repr(labels[n]) for n in matching)
        raise UsageError(f"--against {text!r} is a part of {several}: write a whole label")
    if not matching:
        raise unknown("group of --against:", text, labels)
    return matching[0]


def _start(groups: Sequence[Group]) -> float:
    """Return the accuracy that needs no bytes: the highest accuracy of the initial models."""
    starts = [c.metric("test_accuracy")[0] for g in groups for c in g.curves if c.has("test_accuracy")]
    return max((s for s in starts if not math.isnan(s)), default=0.0)


def _table(groups: Sequence[Group], target: Sequence[float], more: Sequence[str]) -> Table:
    added = [MORE_HEADS[MORE[c]] for c in more]
    heads = ["seeds", "acc. %", "NLL", *added, "MB", *(f"median MB\nto {percent(level)}" for level in target)]
    table = Table("", *map(_number, heads), header_style="bold")
    for g in groups:
        ends = {"test_accuracy@end": "test_accuracy", "test_nll@end": "test_nll"}
        ends |= {c: MORE[c] for c in more}
        cells = [shown(c, v) if (v := g.values(c, metric)) else NONE for c, metric in ends.items()]
        cells.append(_megabytes([m.bytes for m in g.members]))
        for level in target:
            c = cost(0, g, level)
            median = _megabytes([c.median]) if math.isfinite(c.median) else ""
            cells.append(median if c.whole else f"{median} {unreached(c)}".strip())
        table.add_row(name(g), str(len(g.members)), *cells)
    return table


def _number(head: str) -> Column:
    return Column(head, justify="right", no_wrap=True)


def _megabytes(counts: Sequence[float]) -> str:
    return megabytes(counts, least=0, spread=False)


def _print_differences(console: Console, compared: Sequence[Compared]) -> None:
    """Print the differences of the first score, with a note; print nothing if there are only single seeds."""
    for c in [c for c in compared[:1] if max(d.n for d in c.differences) > 1]:
        grid = c.grid()
        heads = SHOWN if console.width >= WIDE else SHOWN[1:]
        kept = [n for n, head in enumerate(grid.header) if n == 0 or head in heads]
        table = Table(*(_number(grid.header[n]) if n else Column("") for n in kept))
        table.header_style = "bold"
        for line in grid.lines:
            table.add_row(*(line[n] for n in kept))
        console.print(Text(f"\n{grid.title}", "bold"))
        print_table(console, table)
        console.print(c.note())


def _print_frontier(
    console: Console, groups: Sequence[Group], maxima: Sequence[Sequence[FrontierPoint]]
) -> None:
    rows = winners(groups, pareto([p for points in maxima for p in points]))
    if len(groups) < 2 or not 0 < len(rows) <= MOST_RANGES:
        return
    table = Table(_number("budget, MB"), "highest mean", _number("accuracy %"), header_style="bold")
    for row in rows:
        table.add_row(*row)
    console.print()
    print_table(console, table)
