"""What is in a page: well-formed tags, and the numbers below a figure."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "hr", "input", "path", "use", "rect", "line", "circle"}


class Checked(HTMLParser):
    """Every tag that is opened is closed, and nothing is loaded from anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        loaded = [v for k, v in attrs if k in ("src", "href", "xlink:href") and v]
        self.loads += [v for v in loaded if not v.startswith(("#", "data:"))]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def check(text: str, cited: str = "") -> None:
    """Check that a page is well formed and loads nothing. cited: an address that it has as text."""
    page = Checked()
    page.feed(text)
    assert page.open == [] and page.loads == []
    named = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text.replace(cited, "") if cited else text)  # what SVG is
    assert "<script" not in text and not re.search(r"https?://", named)


def below(text: str, label: str) -> list[list[str]]:
    """The cells of the table below a figure."""
    table = text.partition(f'aria-label="{label}"')[2].partition("</figure>")[2].partition("</table>")[0]
    return [row for line in table.split("<tr>") if (row := re.findall(r"<td[^>]*>([^<]*)", line))]
