"""Pages that only the site has."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


@cache
def reference() -> str:
    """Return docs/reference.md as the site has it."""
    return str(runpy.run_path(str(DOCS / "reference_page.py"))["page"]())
