"""A table, which a terminal, Markdown, a page, CSV and LaTeX show with the same words."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fedsim.printable import markdown, one_line

if TYPE_CHECKING:
    from rich.console import Console

LATEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"\,$\pm$\,",
    "×": r"$\times$",
    "†": r"\textdagger{}",
    "–": "--",
    "\N{MINUS SIGN}": "$-$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "\N{NO-BREAK SPACE}": "~",
}
"""Characters that LaTeX reads as commands, or that its fonts lack."""


@dataclass(frozen=True)
class Table:
    """A table of text.

    heads: '' for a column without a heading; a page shows no heading row if all are ''. texts: the number of
    leading columns that are text; all others are numbers. best: the (row, column) of the best values, and of
    those that are not distinguishable from them; they are bold.
    """

    kind: ClassVar[str] = "table"
    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    texts: int = 1
    title: str = ""
    best: Collection[tuple[int, int]] = field(default=())

    @staticmethod
    def pairs(values: Mapping[str, object]) -> Table:
        """Return a table of names and values."""
        return Table(("", ""), [(name, str(value)) for name, value in values.items()], 2)

    def only(self, heads: Collection[str]) -> Table:
        """Return the first column, and those with these headings."""
        columns = [n for n, head in enumerate(self.heads) if not n or head in heads]
        rows = [[row[n] for n in columns] for row in self.rows]
        best = {(row, columns.index(n)) for row, n in self.best if n in columns}
        return replace(self, heads=[self.heads[n] for n in columns], rows=rows, best=best)

    def markdown(self) -> str:
        """Return a Markdown table. A bar in a cell, as in rho = 1/|S|, is escaped; it would end the cell."""
        rows = [[self._bold(at, n, "**{}**") for n in range(len(row))] for at, row in enumerate(self.rows)]
        lines = [self.heads, ("---",) * len(self.heads), *rows]
        body = "\n".join(f"| {' | '.join(map(markdown, cells))} |" for cells in lines)
        return f"### {markdown(self.title)}\n\n{body}\n" if self.title else f"{body}\n"

    def csv(self) -> str:
        text = io.StringIO()
        rows = [[one_line(str(cell)) for cell in row] for row in (self.heads, *self.rows)]
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue()

    def latex(self, caption: str = "", label: str = "") -> str:
        r"""Return a tabular of the package booktabs; in a table environment, with a caption or a label."""
        lines = [[_latex(head) for head in self.heads]]
        for at, row in enumerate(self.rows):
            bold = [r"\textbf{%s}" if (at, n) in self.best else "%s" for n in range(len(row))]
            lines.append([form % _latex(cell) for form, cell in zip(bold, row, strict=True)])
        first, *body = (" & ".join(cells) + r" \\" for cells in lines)
        columns = "l" * self.texts + "r" * (len(self.heads) - self.texts)
        rules = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", first, r"\midrule", *body, r"\bottomrule"]
        tabular = "\n".join([*rules, r"\end{tabular}"]) + "\n"
        if not caption and not label:
            return tabular
        named = [rf"\caption{{{_latex(caption)}}}"] * bool(caption) + [rf"\label{{{label}}}"] * bool(label)
        return "\n".join([r"\begin{table}", r"\centering", *named, tabular + r"\end{table}"]) + "\n"

    def print(self, out: Console) -> None:
        """Print the table, with an empty line before its title."""
        from rich.table import Column, Table as Rich
        from rich.text import Text

        from launch.terminal import print_table

        columns: list[Any] = [
            Column(head, no_wrap="\n" in head, justify="left" if n < self.texts else "right")
            for n, head in enumerate(self.heads)
        ]
        shown = Rich(*columns, header_style="bold", title=self.title or None, show_header=any(self.heads))
        for at, row in enumerate(self.rows):
            shown.add_row(*(Text(cell, "bold" * ((at, n) in self.best)) for n, cell in enumerate(row)))
        if self.title:
            out.print()
        print_table(out, shown)

    def _repr_markdown_(self) -> str:
        """Return the table for a notebook's output cell."""
        return self.markdown()

    def _bold(self, at: int, n: int, form: str) -> str:
        cell = self.rows[at][n]
        return form.format(cell) if (at, n) in self.best else cell


def _latex(text: str) -> str:
    """Escape a text for LaTeX."""
    return "".join(LATEX.get(c, c) for c in one_line(text))
