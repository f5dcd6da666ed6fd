"""Links of the repository's Markdown pages lead to files and headings that exist.

The algorithms' pages and the reference, which only the site has, are among them. Nothing is fetched: a link
to another site only needs an address of the right form.
"""

from __future__ import annotations

import re
import runpy
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.support.pages import notebooks, reference

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".github", "docs", "fedsim", "protocols", "workers", "launch", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
HOST = re.compile(r"([a-z0-9-]+\.)+[a-z]{2,}|localhost", re.IGNORECASE)
ADDRESS = re.compile(r"[^@\s]+@[^@\s]+\.[a-z]+", re.IGNORECASE)


@cache
def _generated() -> dict[Path, str]:
    """The pages that only the site has, by the path that they would have."""
    pages = runpy.run_path(str(ROOT / "docs" / "algorithm_pages.py"))["pages"]()
    pages |= {"reference.md": reference()} | {f"notebooks/{n}.md": t for n, t in notebooks().items()}
    return {ROOT / "docs" / uri: text for uri, text in pages.items()}


def _tokens(page: Path) -> list[Token]:
    text = _generated().get(page) or page.read_text(encoding="utf-8")
    return MarkdownIt("commonmark").enable("table").parse(text)


def _links(page: Path) -> Iterator[str]:
    for token in _tokens(page):
        for child in token.children or []:
            target = child.attrGet("href") or child.attrGet("src")
            if target is not None:
                yield str(target)


@cache
def _anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, by GitHub's rule."""
    tokens = _tokens(page)
    seen: Counter[str] = Counter()
    anchors = set()
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(child.content for child in inline.children or [])
            slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
            anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return frozenset(anchors)


def _complaint(link: str, page: Path, root: Path) -> str | None:
    """What is wrong with a link on a page, if anything is."""
    parts = urlsplit(link)
    if parts.scheme in {"http", "https"}:
        return None if HOST.fullmatch(parts.hostname or "") else "is no address"
    if parts.scheme == "mailto":
        return None if ADDRESS.fullmatch(parts.path) else "is no address"
    if parts.scheme or parts.netloc or parts.path.startswith("/"):
        return "is neither relative nor of a known scheme"
    file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not file.is_relative_to(root):
        return "leaves the repository"
    if not file.exists() and file not in _generated():
        return "leads to no file"
    if parts.fragment and (file.suffix != ".md" or unquote(parts.fragment) not in _anchors(file)):
        return "leads to no heading"
    return None


def complaints(page: Path, root: Path) -> list[str]:
    results = ((link, _complaint(link, page, root)) for link in _links(page))
    return [f"{link} {complaint}" for link, complaint in results if complaint is not None]


def test_every_link_of_a_page_leads_somewhere() -> None:
    results = {str(page.relative_to(ROOT)): complaints(page, ROOT) for page in [*PAGES, *_generated()]}
    assert not {page: lines for page, lines in results.items() if lines}


def test_a_broken_link_is_named_until_it_is_mended(tmp_path: Path) -> None:
    other, page = tmp_path / "other.md", tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    other.write_text("# Title\n\n## What `a_b` costs, in P\n\n## Twice\n\n## Twice\n", encoding="utf-8")
    broken = {
        "[a](../othr.md)": "../othr.md leads to no file",
        "[a](../other.md#what-it-costs)": "../other.md#what-it-costs leads to no heading",
        "| a |\n|---|\n| [b](#nowhere) |": "#nowhere leads to no heading",
        "![picture](missing.png)": "missing.png leads to no file",
        "[a](../../outside.md)": "../../outside.md leaves the repository",
        "[a](/other.md)": "/other.md is neither relative nor of a known scheme",
        "[a](https://nowhere)": "https://nowhere is no address",
        "[a](mailto:nobody)": "mailto:nobody is no address",
    }
    page.write_text("\n\n".join(broken), encoding="utf-8")
    assert complaints(page, tmp_path) == list(broken.values())
    mended = [
        "../other.md",
        "../other.md#what-a_b-costs-in-p",
        "../other.md#twice-1",
        "https://example.org/a#b",
    ]
    page.write_text(
        "\n\n".join(f"[a]({link})" for link in mended) + "\n\n`[code](is/no.link)`\n", encoding="utf-8"
    )
    assert complaints(page, tmp_path) == []


def test_the_site_loads_no_script_of_another_machine() -> None:
    """The plugin `offline` takes one of a content network where no polyfill of its name is configured."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.search(r"^  - offline\b", text, re.MULTILINE)
    listed = re.search(r"^  polyfills: \[(.*?)\]", text, re.MULTILINE)
    assert listed is not None and "iframe-worker" in listed[1]
    assert all((ROOT / "docs" / script.strip()).is_file() for script in listed[1].split(","))
    assert not re.search(r"https?://", "\n".join(line.partition(" #")[0] for line in text.splitlines()))
