"""The layout of a page: one self-contained HTML file, in the reader's light or dark colour scheme."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, select_autoescape

from fedsim.printable import printable
from launch.results.figures import COLOURS, DASHES
from workers.storage.atomic_files import disk_errors

_DARK = ("#4c9be8", "#ff8a50", "#2fc79a", "#f0a3cf", "#f0b73f", "#a5dcf5", "#b565d8", "#dddddd")
HINT = "Point at a chart to read its values; click it to enlarge it; csv has its numbers."
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=select_autoescape(), keep_trailing_newline=True
)
"""Loads page.html and report.css, and escapes the title."""


def page(title: str, parts: Iterable[str]) -> str:
    """Render the whole page. parts: HTML. title: text."""

    def variables(colours: Sequence[str]) -> str:
        return " ".join(f"--c{n}: {c};" for n, c in enumerate(colours))

    light, dark = variables([c.lower() if c != "#000000" else "#444444" for c in COLOURS]), variables(_DARK)
    body = "\n".join(filter(None, parts))
    return _TEMPLATES.get_template("page.html").render(title=title, light=light, dark=dark, body=body)


def section(title: str, *parts: str) -> str:
    """Return a section with its title; '' if the section would be empty."""
    body = "\n".join(filter(None, parts))
    return f"<h2>{escape(title)}</h2>\n{body}" if body else ""


def key(names: Mapping[int, str]) -> str:
    """Return a legend. names: by slot of figures.Line; pointing at one dims the other lines."""
    lengths = dict(zip(DASHES, ("", "5 2", "1.5 1.5", "5 1.5 1.5 1.5"), strict=True))
    created = (
        f'<span class="key k{n}"><svg class="swatch" viewBox="0 0 24 8" aria-hidden="true"><path d="M0 4H24" '
        f'stroke="var(--c{n % len(COLOURS)})" stroke-width="3" '
        f'stroke-dasharray="{lengths[DASHES[n // len(COLOURS) % len(DASHES)]]}"/></svg>{escape(name)}</span>'
        for n, name in names.items()
    )
    dim = (
        f"body:has(.k{n}:hover) svg :is({', '.join(f'.l{m}' for m in names if m != n)}) {{ opacity: .1 }}"
        for n in names
        if len(names) > 1
    )
    return f"<style>{' '.join(dim)}</style><p>{' '.join(created)}</p>" if names else ""


def charts(*drawn: str, across: int = 3) -> str:
    """Return figures side by side, at most `across` (2 or 3) in a row; a click makes a figure page-wide."""
    result = "".join(f'<figure tabindex="0">{svg}</figure>' for svg in drawn if svg)
    return f'<div class="charts by{across}">{result}</div>' if result else ""


def soft(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


def folded(title: str, body: str, opened: bool) -> str:
    """Return a body that a click on its title shows or hides."""
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>{body}</details>"


def columns(parts: Iterable[tuple[str, str]]) -> str:
    """Return titles with their content, side by side if there is room; leave out empty content."""
    created = (f"<div><h3>{escape(title)}</h3>{body}</div>" for title, body in parts if body)
    return f'<div class="columns">{"".join(created)}</div>'


def tiles(values: Mapping[str, str]) -> str:
    cells = (f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in values.items())
    return f'<div class="tiles">{"".join(cells)}</div>'


def pairs(values: Mapping[str, object]) -> str:
    """Return a table of names and values."""
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in values.items())
    return f"<table>{rows}</table>" if rows else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int = 1) -> str:
    """Return a table. A cell between ** is bold, as in Markdown. On a narrow page, a row is a block: the
    first cell, and below it the other cells, each after its column heading (report.css)."""

    def text(cell: str) -> str:
        bold = len(cell) > 4 and cell.startswith("**") and cell.endswith("**")
        return f"<b>{escape(cell[2:-2])}</b>" if bold else escape(cell)

    def line(tag: str, cells: Sequence[str]) -> str:
        labels = [f' data-head="{escape(head)}"' if head and tag == "td" else "" for head in heads]
        created = (
            f'<{tag} class="{"n" if n >= numbers_from else "t"}"{label}>{text(c)}</{tag}>'
            for n, (c, label) in enumerate(zip(cells, labels, strict=True))
        )
        return f"<tr>{''.join(created)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="wide"><table>{line("th", heads)}{body}</table></div>'


def save(path: Path, text: str) -> None:
    """Write a text file, with control characters escaped."""
    with disk_errors(f"cannot write {path}"):
        path.write_text(printable(text), encoding="utf-8")
