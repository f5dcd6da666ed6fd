"""The syntax of schedules that are read from a trace file, trace:FILE[+...].

This module is separate from fedsim.participation, because options are resolved and the manifest is written
before the fork server imports NumPy.
"""

from __future__ import annotations

from pathlib import Path

from fedsim import event_rules, foreign_files

PREFIX = "trace:"
CHANCES = ("gone", "lost")
MODIFIERS = (*CHANCES, *event_rules.MODIFIERS)


def split(spec: str) -> tuple[str, str]:
    """Return the file of trace:FILE[+...], and the modifiers after it, each with its +.

    A path may contain a +, so only a part with the name of a modifier counts as one.
    """
    path, modifiers = spec.removeprefix(PREFIX), ""
    while True:
        rest, plus, last = path.rpartition("+")
        if not plus or last.partition(":")[0] not in MODIFIERS:
            return path, modifiers
        path, modifiers = rest, f"+{last}{modifiers}"


def absolute(spec: str) -> str:
    """Return the same schedule with the absolute path of its trace file, valid in every working directory."""
    if not spec.startswith(PREFIX):
        return spec
    path, modifiers = split(spec)
    return f"{PREFIX}{Path(path).expanduser().resolve()}{modifiers}"


def digest(spec: str) -> dict[str, str]:
    """Return the digest {path: sha256} of a schedule's trace file; {} for other schedules."""
    if not spec.startswith(PREFIX):
        return {}
    path, _ = split(spec)
    return {path: sha256(path)}


def sha256(path: str) -> str:
    """Return the digest of a file that results depend on."""
    return foreign_files.sha256(Path(path))
