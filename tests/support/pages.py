"""Pages that only the site has."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from functools import cache
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


@cache
def reference() -> str:
    """Return docs/reference.md as the site has it."""
    return str(runpy.run_path(str(DOCS / "reference_page.py"))["page"]())


@cache
def notebooks() -> dict[str, str]:
    """Return the pages of the notebooks by name, without what the cells print."""
    spec = importlib.util.spec_from_file_location("notebook_pages", DOCS / "recipes" / "notebook_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    pages = {}
    for file in sorted((DOCS / "notebooks").glob("*.py")):
        cells = list(module.cells(file.read_text(encoding="utf-8")))
        pages[file.stem] = str(module.page(file.stem, cells, [""] * len(cells)))
    return pages
