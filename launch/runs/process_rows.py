"""processes.json: which processes carry a run out, and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def process_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's processes.json; none if it cannot be read: nothing depends on it."""
    try:
        rows = json.loads((folder / "processes.json").read_text())
    except (OSError, ValueError):
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
