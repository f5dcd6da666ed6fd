"""Errors that name the cause and what to do.

Every error a user can meet derives from FedsimError and carries the exit code of the command line
(docs/references/faults.md#exit-codes). Anything else is a defect of fedsim and shows its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


class FedsimError(Exception):
    """Base class; `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(FedsimError):
    """The user asked for something that does not exist or does not fit together."""

    exit_code = 2


class DataError(FedsimError):
    """A data file is missing or is not what it should be."""

    exit_code = 2


class WireError(FedsimError):
    """A frame that crossed the wire, or a file in wire format, is not what its schema says."""


class TaskError(FedsimError):
    """A task failed; the message names worker, client and round."""


class ConnectionLost(TaskError):
    """The other side cannot be heard any more."""


class Interrupted(FedsimError):
    """Ctrl-C or SIGTERM: stop cleanly."""

    exit_code = 130


class MismatchError(FedsimError):
    """A run cannot go on as it was begun: something that its bits depend on is not the same."""

    exit_code = 3


class AccessError(FedsimError):
    """The other side refused: a wrong key, other data, another version."""

    exit_code = 4


class DiskError(FedsimError):
    """The run folder cannot be written."""

    exit_code = 5


FEW = 8
"""So many names are all shown; of more, the near ones."""

COMMANDS = {
    "algorithm": "fedsim list algorithms",
    "data set": "fedsim list datasets; yours: FILE.csv,label=COLUMN, FILE.py:NAME or hf:FOLDER",
    "model": "fedsim list models",
    "partition": "fedsim list partitions",
    "codec": "fedsim list codecs",
    "schedule": "fedsim list schedules",
}
"""The command that shows all names of a kind."""


def unknown(
    what: str, name: str, known: Iterable[str], shown: Callable[[str], str] = str, command: str = ""
) -> UsageError:
    """The error for an unknown name: the nearest known one, and how to see the others.

    Args:
        what: What it would be the name of.
        name: The name.
        known: The names that there are.
        shown: How a known name is written.
        command: The command that shows all of them; by default that of COMMANDS, if there is one.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=4, cutoff=0.4)
    good = difflib.get_close_matches(name, names, n=4, cutoff=0.6)
    hint = f"; did you mean {shown(near[0])!r}?" if near else ""
    command = command or COMMANDS.get(what, "")
    listed, label = names, "known"
    if len(names) > FEW and good:
        listed, label = good[1:], "also near"
    elif len(names) > FEW and command:
        listed = []
    parts = [f"{label}: {', '.join(map(shown, listed))}"] if listed else []
    if command and len(names) > FEW:
        parts.append(f"all: {command}")
    return UsageError(f"unknown {what} {name!r}{hint}" + (f" ({'; '.join(parts)})" if parts else ""))
