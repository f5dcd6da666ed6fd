"""The parts of a page as values. page.html renders them, and no other file has HTML."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fedsim.printable import printable

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
"""Loads page.html and report.css, and escapes every text."""


class Part:
    """A part of a page. kind: the name of its macro in page.html."""

    kind: ClassVar[str]


@dataclass(frozen=True)
class Text(Part):
    """A paragraph or a heading."""

    kind = "text"
    text: str
    role: Literal["note", "warning", "heading"] = "note"


@dataclass(frozen=True)
class Table(Part):
    """A table. heads: '' for a column without a heading; no heading row if all are ''. texts: the number of
    leading columns that are text; all others are numbers. A cell between ** is bold, as in Markdown."""

    kind = "table"
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1

    @staticmethod
    def pairs(values: Mapping[str, object]) -> Table:
        """Return a table of names and values."""
        return Table(("", ""), [(name, str(value)) for name, value in values.items()], 2)


@dataclass(frozen=True)
class Figure(Part):
    """A drawing of matplotlib as SVG. label: what it shows. numbers: the table below it; None if the page
    has one beside it."""

    kind = "figure"
    label: str
    svg: str
    numbers: Table | None = None


@dataclass(frozen=True)
class Beside(Part):
    """Parts side by side, as far as the page is wide enough."""

    kind = "beside"
    parts: Sequence[Part]


@dataclass(frozen=True)
class Folded(Part):
    """Parts that a click on their title shows or hides."""

    kind = "folded"
    title: str
    parts: Sequence[Part]
    opened: bool = False


@dataclass(frozen=True)
class Tiles(Part):
    """Large numbers with their names."""

    kind = "tiles"
    values: Mapping[str, str]


@dataclass(frozen=True)
class File(Part):
    """A text file that the page contains, as a link that saves it."""

    kind = "file"
    name: str
    content: str
    what: str

    @property
    def address(self) -> str:
        """The link's address, which has the whole file."""
        return "data:text/csv;base64," + base64.b64encode(printable(self.content).encode()).decode()


def page(title: str, head: Iterable[Part], sections: Iterable[tuple[str, Iterable[Part]]] = ()) -> str:
    """Render the whole page. head: the parts below the title. sections: parts by title; a section without
    parts is left out."""
    filled = [(name, parts) for name, made in sections if (parts := list(made))]
    return _TEMPLATES.get_template("page.html").render(title=title, head=list(head), sections=filled)
