"""The commit of the source that computes, for manifest.json and sweep.json."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The folder that the packages lie in."""
UNKNOWN = "unknown"
GIT = ("git", "describe", "--always", "--dirty=+", "--abbrev=9", "--exclude=*")
DEADLINE = 5.0
"""Seconds to wait for git, such as on a slow file system."""


@cache
def look_up(root: Path = ROOT) -> subprocess.Popen[str] | None:
    """Start git, so that commit() need not wait for it; None where the source is in no repository of its own.

    A repository above `root` does not count: it belongs to something else that has the packages installed.
    """
    if not (root / ".git").exists():
        return None
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # it only reads
    try:
        return subprocess.Popen(
            GIT, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None


@cache
def commit(root: Path = ROOT) -> str:
    """The commit in nine digits, '+' behind it if files were changed since; 'unknown' if it has none."""
    process = look_up(root)
    if process is None:
        return UNKNOWN
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return UNKNOWN
    return output.strip() or UNKNOWN
