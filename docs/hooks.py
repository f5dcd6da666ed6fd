"""What mkdocs cannot do by itself, so that pages in the repository need no edit for the site.

- README.md and the other pages of the repository's root (ROOT_PAGES) become pages.
- Every module of the four packages gets a reference page, and the decisions get a table of contents.
- Every algorithm gets a page (docs/algorithm_pages.py); a link from its name to its file leads there.
- The notebooks are carried out (docs/recipes/notebook_pages.py); their pages have what the cells print.
- reference.md is made of the code and of reference.toml (docs/reference_page.py).
- `FOLDER/*` in mkdocs.yml's nav stands for the pages of that folder.
- Links are written for the repository (`../fedsim/algorithm.py`). They lead to the module's reference page
  or to a page that shows the file.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import algorithm_pages  # mkdocs puts this file's folder on the path
import reference_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fedsim", "protocols", "workers", "launch")
REFERENCE = "reference"
"""The folder of the site that has a page per module."""
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "SUPPORT.md": "support.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
}
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n"
"""Begins pages of modules and files, which the search would give before the pages that explain them."""
LANGUAGES = {".py": "python", ".toml": "toml", ".cfg": "ini", ".yml": "yaml", ".md": "markdown"}
LINK = re.compile(
    r"^```.*?^```|`[^`\n]*`|(?P<less>\\<)|(?P<text>\]\()(?P<target>[^)\s]+)(?P<end>\))",
    re.DOTALL | re.MULTILINE,
)
ALGORITHM = re.compile(r"\[(?P<name>\w+)\]\((?:\.\./)+protocols/\w+\.py\)")
ITEM = re.compile(r"(?:[-*+]|\d+\.) +(?=\S)")

Nav = list[Any]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that no file in docs/ stands for."""
    pages = {uri: (ROOT / name).read_text(encoding="utf-8") for name, uri in ROOT_PAGES.items()}
    pages |= {_reference_page(file): _reference(file) for file in _modules()}
    pages |= algorithm_pages.pages()
    pages[reference_page.PAGE] = reference_page.page()
    pages["decisions/index.md"] = _decisions()
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    for uri, content in _notebooks().items():
        files.append(File.generated(config, uri, content=content))
    for file in sorted(_linked_files(files)):
        files.append(File.generated(config, _source_page(file), content=NOT_SEARCHED + _shown(file)))
    config.nav = _expanded(config.nav or [], files)
    return files


def _notebooks() -> dict[str, str | bytes]:
    """Carry the notebooks out; return their pages and pictures."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "docs" / "recipes" / "notebook_pages.py"), "--out", folder]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        return {
            f"notebooks/{file.name}": file.read_text("utf-8") if file.suffix == ".md" else file.read_bytes()
            for file in sorted(Path(folder).iterdir())
        }


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links that are written for the repository to pages of the site.

    Python-Markdown shows the backslash of GitHub's `\\<`, and that of `\\|` in a table's code: neither stays.
    """
    here = page.file.src_uri
    start = posixpath.dirname(here) or "."

    def described(match: re.Match[str]) -> str:
        uri = f"{algorithm_pages.FOLDER}/{match['name']}.md"
        return f"[{match['name']}]({posixpath.relpath(uri, start)})" if uri in files.src_uris else match[0]

    def pointed(match: re.Match[str]) -> str:
        if match["less"]:
            return "&lt;"
        if match["target"] is None:
            row = markdown.startswith("|", markdown.rfind("\n", 0, match.start()) + 1)
            return match[0].replace("\\|", "|") if row else match[0]
        file, anchor = _in_repository(here, match["target"])
        if file is None:
            return match[0]
        uri = posixpath.relpath(_page_of(file), start)
        return f"{match['text']}{uri}{anchor}{match['end']}"

    return "\n".join(_widened(LINK.sub(pointed, ALGORITHM.sub(described, markdown)).splitlines())) + "\n"


def _widened(lines: list[str]) -> list[str]:
    """Indents what belongs to an item of a list by four, as Python-Markdown needs it; GitHub takes two."""
    out: list[str] = []
    fenced, at = False, 0
    while at < len(lines):
        fenced ^= lines[at].startswith("```")
        item = None if fenced else ITEM.match(lines[at])
        end = at + 1
        if item is not None:
            inside = " " * len(item[0])
            while end < len(lines) and (lines[end].startswith(inside) or not lines[end].strip()):
                end += 1
            first, *below = _widened([line[len(inside) :] for line in lines[at:end]])
            out.append(item[0].ljust(4) + first)
            out += [" " * 4 + line if line else line for line in below]
        else:
            out.append(lines[at])
        at = end
    return out


def _in_repository(page: str, target: str) -> tuple[str | None, str]:
    """The path in the repository that a link on a page means, if that exists, and its anchor."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc or not parts.path:
        return None, ""
    origin = next((name for name, uri in ROOT_PAGES.items() if uri == page), f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), parts.path))
    made = path == f"docs/{reference_page.PAGE}" or (ROOT / path).match("docs/notebooks/*.md")
    known = not path.startswith("..") and ((ROOT / path).exists() or made)
    return (path if known else None), f"#{parts.fragment}" if parts.fragment else ""


def _page_of(path: str) -> str:
    """The page or asset of the site that shows a file of the repository."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    file = PurePosixPath(path)
    if file.suffix == ".py" and file.parts[0] in PACKAGES:
        return _reference_page(file)
    if path == "docs/decisions":
        return "decisions/index.md"
    if path.startswith("docs/") and file.suffix in {".md", ".png", ".svg", ".csv"}:
        return path.removeprefix("docs/")
    return _source_page(path)


def _linked_files(files: Files) -> Iterator[str]:
    """The files of the repository that a page links to and that are neither a page nor an asset."""
    seen = set()
    for file in files.documentation_pages():
        for match in LINK.finditer(file.content_string):
            path, _ = _in_repository(file.src_uri, match["target"]) if match["target"] else (None, "")
            if path is not None and path not in seen and _page_of(path) == _source_page(path):
                seen.add(path)
                yield path


def _reference(file: PurePosixPath) -> str:
    """A module's page: what its docstrings say, and then the file."""
    return f"{NOT_SEARCHED}# {_dotted(file)}\n\n::: {_dotted(file)}\n\n" + _shown(str(file), "## ")


def _shown(path: str, heading: str = "# ") -> str:
    """A file's text, or the names in a folder, under a heading."""
    file = ROOT / path
    if file.is_dir():
        text = "\n".join(
            sorted(p.name for p in file.iterdir() if not p.name.startswith((".", "__pycache__")))
        )
    else:
        text = file.read_text(encoding="utf-8")
    fence = "`" * (max(map(len, re.findall("`{3,}", text)), default=2) + 1)
    return f"{heading}{path}\n\n{fence}{LANGUAGES.get(file.suffix, 'text')}\n{text}\n{fence}\n"


def _source_page(path: str) -> str:
    return f"source/{path}.md"


def _modules() -> list[PurePosixPath]:
    found = (file.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return sorted(PurePosixPath(file) for file in found if file.stem != "__main__")


def _dotted(file: PurePosixPath) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def _reference_page(file: PurePosixPath) -> str:
    page = file.with_name("index.md") if file.stem == "__init__" else file.with_suffix(".md")
    return f"{REFERENCE}/{page}"


def _decisions() -> str:
    lines = ["# Decisions", "", "What was decided, and why.", ""]
    for file in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        title = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        lines.append(f"- [{title}]({file.name})")
    return "\n".join(lines) + "\n"


def _expanded(nav: Nav, files: Files) -> Nav:
    """The nav with every FOLDER/* replaced by the pages of that folder."""
    expanded: Nav = []
    for entry in nav:
        match entry:
            case str() if entry == f"{REFERENCE}/*":
                expanded += _tree(REFERENCE, files)
            case str() if entry.endswith("/*"):
                expanded += [uri for uri in _in_folder(entry[:-2], files) if uri not in nav]
            case dict():
                expanded += [
                    {title: _expanded(below if isinstance(below, list) else [below], files)}
                    if isinstance(below, list) or below.endswith("/*")
                    else {title: below}
                    for title, below in entry.items()
                ]
            case _:
                expanded.append(entry)
    return expanded


def _in_folder(folder: str, files: Files) -> list[str]:
    uris = sorted(f.src_uri for f in files.documentation_pages() if posixpath.dirname(f.src_uri) == folder)
    return sorted(uris, key=lambda uri: not uri.endswith("/index.md"))


def _tree(folder: str, files: Files) -> Nav:
    """The reference: packages in the order of the ladder, then modules by name."""
    inside = (PurePosixPath(file.src_uri) for file in files.documentation_pages())
    below = {path.relative_to(folder).parts[0] for path in inside if path.is_relative_to(folder)}
    nav: Nav = []
    for name in sorted(below, key=lambda n: (n != "index.md", PACKAGES.index(n) if n in PACKAGES else 0, n)):
        if name == "index.md":
            nav.append(f"{folder}/{name}")
        elif name.endswith(".md"):
            nav.append({name.removesuffix(".md"): f"{folder}/{name}"})
        else:
            nav.append({name: _tree(f"{folder}/{name}", files)})
    return nav
