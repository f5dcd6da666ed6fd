"""metrics.jsonl: one line per evaluated round. Nothing here imports torch: `fedsim resume` relies on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def metrics_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The whole lines of metrics.jsonl and where each ends, until one is damaged."""
    at = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if not line.endswith(b"\n"):
            return
        at += len(line)
        try:
            read = json.loads(line)
        except ValueError:
            return
        if not isinstance(read, dict) or not isinstance(read.get("round"), int):
            return
        yield read, at
