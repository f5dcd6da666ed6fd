"""The numbers behind a picture, as a link that saves them as CSV."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Iterable, Sequence
from html import escape

from fedsim.printable import printable

EMBEDDED = 400_000
"""Bytes of a CSV file up to which a page has it."""
CHART = 100_000
"""The limit for one picture, of which a page has many."""


def link(name: str, content: bytes, text: str = "") -> str:
    """An <a> element with the whole file in it; its text is the name, if no other is given."""
    data = base64.b64encode(content).decode()
    return f'<a download="{escape(name)}" href="data:text/csv;base64,{data}">{escape(text or name)}</a>'


def caption(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A <figcaption> with what a picture draws; '' if that would be longer than CHART. As `saved`."""
    anchor = saved(title, heads, rows)
    return f"<figcaption>{anchor}</figcaption>" if anchor else ""


def saved(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An <a> element with what a picture draws, in a file named after its title; '' if that would be longer
    than CHART. heads: the names of the columns; None and NaN are empty cells."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows([_cell(value) for value in row] for row in rows)
    content = printable(written.getvalue()).encode()
    if len(content) > CHART:
        return ""
    name = re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_")
    return link(f"{name}.csv", content, "csv")


def _cell(value: object) -> object:
    if value is None or value != value:
        return ""
    return int(value) if isinstance(value, float) and value.is_integer() else value
