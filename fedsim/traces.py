"""Trace files of schedules, trace:FILE[+...], by name only: options are resolved before numpy is imported."""

from __future__ import annotations

import hashlib
from pathlib import Path

PREFIX = "trace:"


def split(spec: str) -> list[str]:
    """trace:FILE and the modifiers behind it. A path may have a + in it; only what reads like a modifier
    is one."""
    parts = [spec]
    while True:
        path, plus, last = parts[0].rpartition("+")
        if not plus or last.partition(":")[0] not in ("gone", "lost"):
            return parts
        parts = [path, last, *parts[1:]]


def absolute(spec: str) -> str:
    """The same schedule, its trace file named for every working directory."""
    if not spec.startswith(PREFIX):
        return spec
    first, *modifiers = split(spec)
    return "+".join([f"{PREFIX}{Path(first.removeprefix(PREFIX)).resolve()}", *modifiers])


def digest(spec: str) -> dict[str, str]:
    """{path: sha256} of the trace file that a schedule is read from, if it is."""
    if not spec.startswith(PREFIX):
        return {}
    path = split(spec)[0].removeprefix(PREFIX)
    return {path: sha256(path)}


def sha256(path: str) -> str:
    """Of a file that bits depend on."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
