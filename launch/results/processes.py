"""The placement of a run's processes: machine, cores or GPU, and the engine that has placed them there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launch.results import html
from launch.runs.folder import RunFolder

SHOWN = {"node": "machine", "device": "computes on", "gpu": "GPU", "engine": "engine", "pid": "process id"}
"""Keys of processes.json and their headings; one that no process has is left out."""
OPEN = 20
"""The table is open for up to this many processes."""


def processes(run: RunFolder) -> Iterator[str]:
    """A table of RUN/processes.json; nothing if it is not there."""
    rows = run.processes
    keys = [key for key in SHOWN if any(row.get(key) for row in rows)]
    if not keys:
        return
    heads = ["", *(SHOWN[key] for key in keys), "from", "to"]
    lines = [[_name(row), *(str(row.get(key) or "") for key in keys), *_times(row)] for row in rows]
    last = " of the last start" if len(run.starts) > 1 else ""
    title = f"Table of processes{last}"
    yield html.folded(title, html.table(heads, lines, len(heads)), opened=len(rows) <= OPEN)


def _name(row: Mapping[str, Any]) -> str:
    role = str(row.get("role", ""))
    return f"{role} {row.get('index')}" if role.endswith("worker") else role


def _times(row: Mapping[str, Any]) -> tuple[str, str]:
    """Time of day, as both are of one run."""
    begun, ended = (str(row.get(key) or "").partition("T")[2][:8] for key in ("started", "ended"))
    return begun, ended
