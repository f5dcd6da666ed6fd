"""What state a run is in, and which of its rounds count: for every reader of a run folder.

Nothing here imports torch or pandas.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.runs.manifest import json_or_empty
from launch.runs.process_rows import process_rows
from workers.storage.atomic_files import is_locked
from workers.storage.growing_file import JOURNAL
from workers.storage.journal import read_journal

SUMMARY = "summary.json"
RUNNING, KILLED = "running", "killed"


def state_of(folder: Path, summary: Mapping[str, Any] | None = None) -> str:
    """Return the state of a run: by its lock, which the kernel releases with its process, then its summary.

    Args:
        folder: The run folder.
        summary: What summary.json holds, if it was read already.

    Returns:
        running, killed (its coordinator is gone without a summary), or what the summary says: done,
        interrupted or failed. A lock cannot be seen from another machine: a run of one is running while it
        has no summary.
    """
    if is_locked(folder):
        return RUNNING
    known = json_or_empty(folder / SUMMARY) if summary is None else summary
    return str(known.get("status") or (RUNNING if _elsewhere(folder) else KILLED))


def _elsewhere(folder: Path) -> bool:
    """Whether the coordinator was started last on another machine, as far as is known."""
    nodes = [row.get("node") for row in process_rows(folder) if row.get("role") == "coordinator"]
    return bool(nodes and nodes[-1] and nodes[-1] != platform.node())


def commits_of(folder: Path) -> dict[int, Mapping[str, Any]]:
    """Return what the journal has of committed rounds, by round.

    A round counts once the journal has its commit: its rows were written before. What the files have of later
    rounds is of one that was under way, and is computed again by a resume.

    Raises:
        DiskError: if the journal cannot be read.
    """
    journal = folder / JOURNAL
    records = read_journal(journal) if journal.is_file() else []
    return {int(r["round"]): r["about"] for r in records if r["what"] == "commit"}


def rows_until(folder: Path) -> int | None:
    """Return the last round whose rows in ledger.csv and timeline.csv count; None if all do.

    They do in a run that has ended: it writes no rows of a round that was under way.

    Raises:
        DiskError: if the journal cannot be read.
    """
    if (folder / SUMMARY).is_file() or not (folder / JOURNAL).is_file():
        return None
    return max(commits_of(folder), default=-1)
