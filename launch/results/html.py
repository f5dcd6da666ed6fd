"""The parts of a page as values. page.html renders them, and no other file has HTML."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fedsim.errors import unknown
from fedsim.printable import printable
from launch.results.figures import Figure

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
"""Loads page.html and report.css, and escapes every text."""


class Part(Protocol):
    """A part of a page. kind: the name of its macro in page.html."""

    kind: ClassVar[str]


@dataclass(frozen=True)
class Text:
    """A paragraph or a heading."""

    kind: ClassVar[str] = "text"
    text: str
    role: Literal["note", "warning", "heading"] = "note"


@dataclass(frozen=True)
class Beside:
    """Parts side by side, as far as the page is wide enough."""

    kind: ClassVar[str] = "beside"
    parts: Sequence[Part]


@dataclass(frozen=True)
class Folded:
    """Parts that a click on their title shows or hides."""

    kind: ClassVar[str] = "folded"
    title: str
    parts: Sequence[Part]
    opened: bool = False


@dataclass(frozen=True)
class Tiles:
    """Large numbers with their names."""

    kind: ClassVar[str] = "tiles"
    values: Mapping[str, str]


@dataclass(frozen=True)
class File:
    """A text file that the page contains, as a link that saves it."""

    kind: ClassVar[str] = "file"
    name: str
    content: str
    what: str

    @property
    def address(self) -> str:
        """The link's address, which has the whole file."""
        return "data:text/csv;base64," + base64.b64encode(printable(self.content).encode()).decode()


@dataclass(frozen=True)
class Page:
    """A page. head: the parts below the title. sections: parts by title, each with one part at least."""

    title: str
    head: Sequence[Part]
    sections: Mapping[str, Sequence[Part]]

    @staticmethod
    def of(title: str, head: Iterable[Part], sections: Mapping[str, Iterable[Part]] | None = None) -> Page:
        """Return a page without the sections that have no parts."""
        made = {name: list(parts) for name, parts in (sections or {}).items()}
        return Page(title, list(head), {name: parts for name, parts in made.items() if parts})

    def html(self) -> str:
        values = {"title": self.title, "head": self.head, "sections": self.sections.items()}
        return _TEMPLATES.get_template("page.html").render(values)

    def figures(self) -> dict[str, Figure]:
        """Return the figures by label."""
        parts = [part for section in self.sections.values() for part in section]
        return {figure.label: figure for figure in _figures(parts)}

    def figure(self, label: str) -> Figure:
        """Return a figure by its label, or the first; raise UsageError if there is no such figure."""
        figures = self.figures()
        if label not in figures and (label or not figures):
            raise unknown("figure", label, figures)
        return figures[label] if label else next(iter(figures.values()))


def _figures(parts: Iterable[Part]) -> Iterator[Figure]:
    for part in parts:
        if isinstance(part, Figure):
            yield part
        elif isinstance(part, Beside | Folded):
            yield from _figures(part.parts)
