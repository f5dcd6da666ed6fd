"""Errors whose messages name the cause and the remedy.

Every error a user can meet derives from FedsimError and has the exit code of the command line
(docs/references/faults.md#exit-codes). Any other exception is a defect of fedsim and shows its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from fedsim.removed import removed


class FedsimError(Exception):
    """Base class; `exit_code` is what the command line returns.

    Examples:
        >>> import fedsim
        >>> try:
        ...     fedsim.run(algo="fedlapp")
        ... except fedsim.FedsimError as error:
        ...     print(type(error).__name__, error.exit_code, "fedlap" in str(error))
        UsageError 2 True
    """

    exit_code = 1


class UsageError(FedsimError):
    """The user asked for something that does not exist or does not fit together."""

    exit_code = 2


class DataError(FedsimError):
    """A data file is missing or invalid."""

    exit_code = 2


class WireError(FedsimError):
    """A frame that crossed the wire, or a file in wire format, does not match its schema."""


class TaskError(FedsimError):
    """A task failed; the message names worker, client and round."""


class ConnectionLost(TaskError):
    """The connection to the other side is lost."""


class Interrupted(FedsimError):
    """Ctrl-C or SIGTERM: stop cleanly."""

    exit_code = 130


class MismatchError(FedsimError):
    """A run cannot continue, because something that its results depend on has changed."""

    exit_code = 3


class AccessError(FedsimError):
    """The other side refused the connection: a wrong key, different data or a different version."""

    exit_code = 4


class DiskError(FedsimError):
    """The run folder cannot be written."""

    exit_code = 5


FEW = 8
"""The largest number of names that an error message lists; of more, it lists only similar ones."""

CLOSE, CLOSE_SHORT, CLOSE_OF_SEVERAL = 0.7, 0.66, 0.8
"""The difflib ratios from which a name counts as misspelt: in general, for up to three letters (one may be
wrong), and for names with which known names begin."""

_ELSEWHERE = {
    "algo": ("algorithm", "method"),
    "batch_size": ("batch", "bs", "minibatch"),
    "bf16": ("bfloat16",),
    "clients": ("n_clients", "num_clients"),
    "dataset": ("data",),
    "epochs": ("num_epochs",),
    "f16": ("float16", "fp16"),
    "lr": ("eta", "learning_rate", "step_size", "stepsize"),
    "out": ("output", "output_dir"),
    "rounds": ("n_rounds", "num_rounds"),
    "seed": ("random_seed", "random_state"),
    "workers": ("n_jobs", "num_workers"),
}
ALIASES = {
    **{alias: (name,) for name, aliases in _ELSEWHERE.items() for alias in aliases},
    "local_epochs": ("local.epochs", "epochs"),
    "local_lr": ("local.lr", "lr"),
}
"""Names from other libraries, with fedsim's names for them; the first one that exists is suggested."""

COMMANDS = {
    "algorithm": "fedsim list algorithms",
    "data set": "fedsim list datasets",
    "model": "fedsim list models",
    "partition": "fedsim list partitions",
    "codec": "fedsim list codecs",
    "schedule": "fedsim list schedules",
    "preset": "fedsim list presets",
}
"""The command that shows all names of a kind."""

OWN = {"data set": "FILE.csv,label=COLUMN or FILE.py:NAME"}
"""How users name things of their own of a kind."""


def nearest(name: str, known: Iterable[str], close: float | None = None) -> str | None:
    """Return the known name that a wrong name probably means; None if no known name is similar.

    The function tries, in this order: another case or other dashes, ALIASES, the only known name that begins
    with `name`, a misspelling, and the last part of a dotted name (`lr` for `local.lr`). close: the difflib
    ratio from which a name counts as misspelt; by default CLOSE or CLOSE_SHORT.
    """
    names = sorted(known)
    plain = {_plain(other): other for other in reversed(names)}
    requested = _plain(name)
    if close is None:
        close = CLOSE if len(requested) > 3 else CLOSE_SHORT
    for candidate in (requested, *ALIASES.get(requested, ())):
        if candidate in plain:
            return plain[candidate]
    begins = [other for other in plain if other.startswith(requested)]
    if len(requested) > 2 and len({other.partition(".")[0] for other in begins}) == 1:
        return plain[min(begins, key=len)]
    close = max(close, CLOSE_OF_SEVERAL) if begins else close
    if near := difflib.get_close_matches(requested, plain, n=1, cutoff=close):
        return plain[near[0]]
    behind = {other.rpartition(".")[2]: other for other in reversed(plain)}
    near = difflib.get_close_matches(requested, behind, n=1, cutoff=close)
    return plain[behind[near[0]]] if near else None


def _plain(name: str) -> str:
    """Return the name in lower case, with its words joined by underscores."""
    return name.strip().casefold().replace("-", "_").replace(" ", "_")


def unknown(
    what: str, name: str, known: Iterable[str], shown: Callable[[str], str] = str, command: str = ""
) -> UsageError:
    """Return the error for an unknown name of a kind `what`; it suggests known names or a command.

    shown: formats a known name. command: the command that lists all names; by default from COMMANDS. For a
    name that an earlier version had, the error names what replaces it.
    """
    if gone := removed(what.partition(" of ")[0], name):  # a hyperparameter, of any algorithm
        return UsageError(gone)
    names = sorted(known)
    meant = nearest(name, names)
    near = [other for other in difflib.get_close_matches(name, names, n=4, cutoff=0.6) if other != meant]
    hint = f"; did you mean {shown(meant)!r}?" if meant else ""
    command = command or COMMANDS.get(what, "")
    listed, label = names, "known"
    if len(names) > FEW and meant:
        listed, label = near[:3], "also near"
    elif len(names) > FEW and command:
        listed = []
    parts = [f"{label}: {', '.join(map(shown, listed))}"] if listed else []
    if command and len(names) > FEW:
        parts.append(f"all: {command}")
    if what in OWN:
        parts.append(f"yours: {OWN[what]}")
    return UsageError(f"unknown {what} {name!r}{hint}" + (f" ({'; '.join(parts)})" if parts else ""))
