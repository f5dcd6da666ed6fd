"""The commit of the source code of fedsim, for manifest.json and sweep.json."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains the packages."""
UNKNOWN = "unknown"
GIT = ("git", "describe", "--always", "--dirty=+", "--abbrev=9", "--exclude=*")
DEADLINE = 5.0
"""Seconds to wait for git, which may be slow on some file systems."""


def look_up(root: Path = ROOT) -> None:
    """Start git, so that commit() need not wait for it. The caller must call commit() later, to end git."""
    _started(root)


@cache
def commit(root: Path = ROOT) -> str:
    """Return the commit's nine digits, then '+' if files were changed since; 'unknown' without a repository.

    The commit is looked up once, close to the import of the source. A repository above `root` does not count,
    because it belongs to another project, in which the packages are installed.
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
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # git only reads here
    try:
        return subprocess.Popen(
            GIT, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None
