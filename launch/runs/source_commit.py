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


def look_up(root: Path = ROOT) -> None:
    """Start git, so that commit() need not wait for it. Call commit() later in any case, to end it."""
    _started(root)


@cache
def commit(root: Path = ROOT) -> str:
    """The commit, nine digits, '+' behind it if files were changed since; 'unknown' without a repository.

    It is looked up once: that of the source as this process has imported it, or nearly so. A repository above
    `root` does not count, because it belongs to something else that has the packages installed.
    """
    process = _started(root)
    if process is None:
        return UNKNOWN
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return UNKNOWN
    return output.strip() or UNKNOWN


@cache
def _started(root: Path) -> subprocess.Popen[str] | None:
    if not (root / ".git").exists():
        return None
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # it only reads
    try:
        return subprocess.Popen(
            GIT, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None
