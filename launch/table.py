"""A table, which a terminal, Markdown, a page, CSV and LaTeX show with the same words."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fedsim.printable import markdown, one_line
from launch.terminal import UNFOLDED

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

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
PROSE = 28
"""The minimum width of a column of text on a terminal, unless all its cells are narrower."""
GAP, INDENT = 2, 4


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

    def print(self, out: Console, apart: bool = True) -> None:
        """Print the table without cutting words: cells fold between words; columns may move below the rows.

        A column is at least as wide as its longest word, and a column of text at least PROSE wide. If not all
        columns fit, some move below each row: first text columns from the widest, then others from the last.
        apart: with an empty line before the title.
        """
        from rich.table import Table as Grid
        from rich.text import Text

        if out.width == UNFOLDED:
            before = [*[""] * apart, self.title] if self.title else []
            out.print(*before, *self._lines(), sep="\n", soft_wrap=True)
            return
        heads = [Text(head) for head in self.heads]
        rows = [
            [Text(cell, "bold" * ((at, n) in self.best)) for n, cell in enumerate(row)]
            for at, row in enumerate(self.rows)
        ]
        natural, least = [], []
        for n, head in enumerate(heads):
            wide, words = _widths([head, *(row[n] for row in rows)])
            natural.append(wide)
            least.append(wide if "\n" in head.plain else max(words, min(wide, PROSE)))
        beside = _beside(natural, least, out.width)
        widths = _shared([natural[n] for n in beside], [least[n] for n in beside], out.width)
        below = [n for n in range(len(heads)) if n not in beside]

        def grid(header: bool) -> Grid:
            created = Grid(box=None, pad_edge=False, show_header=header, header_style="bold")
            for n, width in zip(beside, widths, strict=True):
                justify: Any = "left" if n < self.texts else "right"
                created.add_column(heads[n], width=width, justify=justify, overflow="fold")
            return created

        if self.title:
            out.print(*[""] * apart, self.title, sep="\n", style="table.title", soft_wrap=True)
        shown = grid(any(self.heads))
        for row in rows:
            shown.add_row(*(row[n] for n in beside))
            if below:
                out.print(shown)
                _print_below(out, [(heads[n], row[n], natural[n] > PROSE) for n in below])
                shown = grid(False)
        if not below:
            out.print(shown)

    def _lines(self) -> list[str]:
        """Return the rows as single lines; a text that is wider than PROSE moves the rest of its line."""
        heads = [[" ".join(head.split()) for head in self.heads]] * any(self.heads)
        rows = [*heads, *([str(cell).replace("\n", "; ") for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for n in range(1, self.texts):
            widths[n] = min(widths[n], PROSE)
        return [
            (" " * GAP).join(c.ljust(w) if n < self.texts else c.rjust(w) for n, (c, w) in cells).rstrip()
            for cells in (enumerate(zip(row, widths, strict=True)) for row in rows)
        ]

    def _repr_markdown_(self) -> str:
        """Return the table for a notebook's output cell."""
        return self.markdown()

    def _bold(self, at: int, n: int, form: str) -> str:
        cell = self.rows[at][n]
        return form.format(cell) if (at, n) in self.best else cell


def _latex(text: str) -> str:
    """Escape a text for LaTeX."""
    return "".join(LATEX.get(c, c) for c in one_line(text))


def _print_below(out: Console, cells: Sequence[tuple[Text, Text, bool]]) -> None:
    """Print cells below their row: each text on its own line, and all other cells, labelled, on one line."""
    from rich.padding import Padding
    from rich.text import Text

    pairs = [
        Text(f"{' '.join(head.plain.split())}: " if head.plain.strip() else "").append(cell)
        for head, cell, prose in cells
        if cell.plain.strip() and not prose
    ]
    texts = [cell for _, cell, prose in cells if cell.plain.strip() and prose]
    for text in [*([Text("  ").join(pairs)] if pairs else []), *texts]:
        out.print(Padding(text, (0, 0, 0, INDENT), expand=False))


def _widths(texts: Sequence[Text]) -> tuple[int, int]:
    """Return the width of the widest line and of the widest word."""
    from rich.cells import cell_len

    lines = [line for text in texts for line in text.plain.splitlines()]
    words = [word for line in lines for word in line.split()]
    return max(map(cell_len, lines), default=0), max(map(cell_len, words), default=0)


def _beside(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return the columns that are printed side by side, in order; the first is always among them."""
    beside = list(range(len(least)))
    while len(beside) > 1 and sum(least[n] for n in beside) + GAP * (len(beside) - 1) > room:
        widest = max(beside[1:], key=lambda n: (natural[n] > PROSE, natural[n] if natural[n] > PROSE else n))
        beside.remove(widest)
    return beside


def _shared(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return the column widths. Spare room goes to the columns that are narrowest relative to their cells."""
    widths = list(least)
    left = min(room - GAP * (len(least) - 1), sum(natural)) - sum(widths)
    for _ in range(left):
        narrowest = max(range(len(widths)), key=lambda n: natural[n] / max(1, widths[n]))
        widths[narrowest] += 1
    return widths if left >= 0 else [min(width, room) for width in widths]
