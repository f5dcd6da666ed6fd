"""fedsim compare: runs side by side, as a page, on the terminal, as Markdown, CSV, LaTeX and figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fedsim.errors import DiskError, UsageError, unknown
from launch import terminal
from launch.configuration.target_accuracy import parsed
from launch.numbers import NONE, megabytes, target
from launch.results.budget_picture import winners
from launch.results.columns import column
from launch.results.comparison_page import below, comparable, remarks, render, unranked, warnings
from launch.results.differences import Compared
from launch.results.figures import write_figures
from launch.results.frontier import cost, levels, pareto, running_maxima
from launch.results.groups import RunGroup, gather
from launch.results.html import Page
from launch.results.tables import (
    calibration,
    costs,
    costs_json,
    fields,
    final,
    name,
    records,
    results,
    unreached,
)
from launch.table import Table
from launch.terminal import print_json, write_text

if TYPE_CHECKING:
    import pandas

MOST_RANGES = 6
"""With more ranges of budgets than this, only the page shows the best group of each range."""
WIDE = 110
"""The minimum terminal width for the columns of MORE."""
COMPARED = ("test_accuracy@end", "test_nll@end", "test_ece@end")
"""Columns whose differences are tested."""
SHOWN = ("p (Holm)", "difference", "95 % interval", "verdict")
"""Columns of the terminal's table of differences; the first one needs a width of WIDE."""
MORE = {
    "test_ece@end": "ECE",
    "test_brier@end": "Brier",
    "client_accuracy_worst@end": "worst\nclient %",
    "simulated@end": "s,\nsimulated",
}
FOLDER = Path("comparisons")
"""The folder of the page if --out is not given."""


@dataclass(frozen=True)
class Comparison:
    """Groups of runs side by side. maxima: frontier.running_maxima. accuracies: the
    levels for which the bytes to reach them are shown. compared: the final scores, with their differences."""

    groups: Sequence[RunGroup]
    maxima: pandas.DataFrame
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
        maxima = running_maxima(groups)
        targets = sorted({float(until) for g in groups if (until := g.settings.get("until"))})
        accuracies = asked or targets or levels(maxima, _start(groups))
        return Comparison(groups, maxima, accuracies, _compared(groups, against))

    @cached_property
    def page(self) -> Page:
        return render(self.groups, self.maxima, self.accuracies, self.compared)

    @cached_property
    def tables(self) -> Mapping[str, Table]:
        """The tables by title."""
        firm = comparable(self.groups)
        tables = (
            *(results(self.groups, firm), calibration(self.groups, firm)),
            *(c.table() for c in self.compared),
            *costs(self.groups, self.accuracies),
            fields(self.groups),
        )
        return {table.title: table for table in tables if table.rows}

    def table(self, title: str) -> Table:
        """Return a table by its title; raise UsageError if there is no such table."""
        if title not in self.tables:
            raise unknown("table", title, self.tables)
        return self.tables[title]

    def write(
        self,
        out: Path | None = None,
        markdown: Path | None = None,
        csv: Path | None = None,
        latex: Path | None = None,
        figures: Path | None = None,
    ) -> list[tuple[str, Path]]:
        """Write each file whose path is given; return the kind and the path of each."""
        written = []
        if out is not None:
            write_text(out, self.page.html())
            written.append(("page", out))
        if markdown is not None:
            write_text(markdown, "\n".join(table.markdown() for table in self.tables.values()))
            written.append(("Markdown", markdown))
        if csv is not None:
            write_text(csv, records(self.groups, self.accuracies).csv())
            written.append(("CSV", csv))
        if latex is not None:
            write_text(latex, self.table("Results").latex())
            written.append(("LaTeX", latex))
        if figures is not None:
            write_figures(figures, self.page.figures().values())
            written.append(("figures", figures))
        return written

    def to_json(self, written: Sequence[tuple[str, Path]] = ()) -> dict[str, object]:
        """Return the tables; `groups` has the columns of --csv, with null for a missing number."""
        table = records(self.groups, self.accuracies)
        rows = [dict(zip(table.heads, row, strict=True)) for row in table.rows]
        return {
            "groups": [{key: None if v == "" else v for key, v in row.items()} for row in rows],
            "accuracies": list(self.accuracies),
            "differences": [c.to_json() for c in self.compared],
            "costs": costs_json(self.groups, self.accuracies),
            "frontier": [
                {**p, "group": self.groups[p["group"]].label} for p in pareto(self.maxima).to_dict("records")
            ],
            "notes": [*warnings(self.groups), *remarks(self.groups), *below(self.groups)],
            "files": {what.lower(): path for what, path in written},
        }

    def print_tables(self, out: Console, shown_levels: int = 0) -> None:
        """Print the results, the differences, and the best group by budget. shown_levels: the number of
        accuracies to show; 0 for as many as fit the width."""
        for note in (*warnings(self.groups), *remarks(self.groups)):
            out.print(f"note: {note}")
        more = [c for c in MORE if out.width >= WIDE and any(g.has(column(c).metric) for g in self.groups)]
        room = shown_levels or max(1, (out.width - 58 - 14 * len(more)) // 11)
        _table(self.groups, self.accuracies[-room:], more).print(out)
        for note in below(self.groups):
            out.print(note)
        for c in self.compared[:1]:
            if max(d.n for d in c.differences) > 1:  # otherwise there are only single seeds
                c.table().only(SHOWN if out.width >= WIDE else SHOWN[1:]).print(out)
                out.print(c.note())
        leading = winners(self.groups, pareto(self.maxima))
        if len(self.groups) > 1 and 0 < len(leading.rows) <= MOST_RANGES:
            out.print()
            leading.print(out)
        if len(self.groups) > 1 and (note := unranked(self.groups)):
            out.print(note)


def compare(
    paths: Sequence[Path],
    *,
    to: Sequence[str] = (),
    where: Sequence[str] = (),
    against: str | None = None,
    as_json: bool = False,
    out: Path | None = None,
    **files: Path | None,
) -> None:
    """Write the files (Comparison.write) and print the table. out: by default a new file in FOLDER."""
    comparison = Comparison.of(paths, to, where, against)
    written = comparison.write(out or _new_file(), **files)
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


def _compared(groups: Sequence[RunGroup], against: str | None) -> list[Compared]:
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
    for c in COMPARED:
        scores = [{} if n in without else final(g, c) for n, g in enumerate(groups)]
        result.append(Compared.of(column(c), [name(g) for g in groups], scores, reference, without))
    return [c for c in result if c is not None]


def _place(groups: Sequence[RunGroup], text: str) -> int:
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


def _start(groups: Sequence[RunGroup]) -> float:
    """Return the accuracy that needs no bytes: the highest accuracy of the initial models."""
    starts = [
        curve["test_accuracy"].iloc[0] for g in groups for curve in g.curves if "test_accuracy" in curve
    ]
    return max((float(s) for s in starts if not math.isnan(s)), default=0.0)


def _table(groups: Sequence[RunGroup], levels: Sequence[float], more: Sequence[str]) -> Table:
    ends = ("test_accuracy@end", "test_nll@end", *more)
    heads = ("", "seeds", "acc. %", "NLL", *(MORE[c] for c in more), "MB")
    rows = []
    for g in groups:
        cells = [column(c).shown(v) if (v := g.known(c)) else NONE for c in ends]
        cells.append(_megabytes([m.bytes for m in g.members]))
        for level in levels:
            c = cost(0, g, level)
            median = _megabytes([c.median]) if math.isfinite(c.median) else ""
            cells.append(median if c.whole else f"{median} {unreached(c)}".strip())
        rows.append((name(g), str(len(g.members)), *cells))
    return Table((*heads, *(f"median MB\nto {target(level)}" for level in levels)), rows)


def _megabytes(counts: Sequence[float]) -> str:
    return megabytes(counts, least=0, deviation=False)
