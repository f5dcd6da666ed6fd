"""The numbers of a picture, as a link that saves them as CSV."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Iterable, Sequence
from html import escape

from fedsim.printable import printable

EMBEDDED = 400_000
"""The maximum size in bytes of a CSV file that a page embeds."""
CHART = 100_000
"""The maximum size in bytes of a picture's CSV file; it is smaller because a page has many pictures."""


def link(name: str, content: bytes, text: str = "") -> str:
    """Return an <a> element that contains the whole file. text: the link's text; by default the name."""
    data = base64.b64encode(content).decode()
    return f'<a download="{escape(name)}" href="data:text/csv;base64,{data}">{escape(text or name)}</a>'


def caption(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a <figcaption> with the link of `saved`; '' if the file would be longer than CHART."""
    anchor = saved(title, heads, rows)
    return f"<figcaption>{anchor}</figcaption>" if anchor else ""


def saved(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an <a> element with a picture's numbers as a CSV file named after the title; '' if the file
    would be longer than CHART. heads: the names of the columns. None and NaN become empty cells."""
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
