"""Labels that distinguish groups of runs, and tables of the settings in which the groups differ."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedsim import plugins
from fedsim.printable import one_line
from launch.table import Table

Settings = Mapping[str, Any]

CODECS = "codecs"
TELLING = (CODECS, "hyperparameters", "participation", "error_feedback", "partition", "model", "dataset")
"""Settings that come first in labels, in this order."""
NO_TASK = ("algo", "params", "eval_samples", "threads", "device", "eval_every")
"""Settings that are not part of the task: the algorithm, measurement, execution, and derived settings."""
ABSENT = object()
LONGEST = 60
"""The longest label, in characters. If one would be longer, all labels leave out what `unnamed` returns."""


def labels(groups: Sequence[Settings]) -> list[str]:
    """Return a label per group: the algorithm, the task settings (_of_task) that not all groups share, and
    just enough other settings to distinguish the groups of one algorithm. If a label would be longer than
    LONGEST, all labels keep only what distinguishes groups of one algorithm; `unnamed` returns the rest.

    groups: settings with dotted names (codecs.mean, hyperparameters.local.lr). All groups must differ.
    """
    whole = _labels(groups, _of_task(groups))
    return whole if max(map(len, whole), default=0) <= LONGEST else _labels(groups, [])


def unnamed(groups: Sequence[Settings]) -> dict[str, str]:
    """Return, by label, settings of the task that not all groups share and that the labels leave out."""
    if labels(groups) == _labels(groups, _of_task(groups)):
        return {}
    return {
        label: ", ".join(part for part in _parts(_of_task(groups), group) if part not in label)
        for label, group in zip(labels(groups), groups, strict=True)
    }


def _labels(groups: Sequence[Settings], always: Sequence[str]) -> list[str]:
    names = [plugins.short(str(g["algo"])) for g in groups]
    out = list(names)
    for name in dict.fromkeys(names):
        alike = [g for g, other in zip(groups, names, strict=True) if other == name]
        message = _telling(alike)
        for n in (n for n, other in enumerate(names) if other == name):
            keys = sorted({*_needed(groups[n], alike, message), *always}, key=_order(groups))
            if parts := _parts(keys, groups[n]):
                out[n] = f"{name} ({', '.join(parts)})"
    return list(map(one_line, out))


def _of_task(groups: Sequence[Settings]) -> list[str]:
    """Return the differing settings, except hyperparameters, sources and NO_TASK."""
    tables = ("hyperparameters", "sources")
    differing = [key for key in _differing(groups) if key.partition(".")[0] not in tables]
    return [key for key in differing if key not in NO_TASK]


def _order(groups: Sequence[Settings]) -> Callable[[str], tuple[int, int]]:
    keys = list(dict.fromkeys(key for g in groups for key in g))
    return lambda key: (_rank(key), keys.index(key))


def natural(label: str) -> list[tuple[float, str]]:
    """Return a sort key for labels: numbers sort by value, and "dense" comes first."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", label.replace("(dense", "("))
    return [(float(part), "") if n % 2 else (-math.inf, part) for n, part in enumerate(parts)]


def differences(groups: Mapping[str, Settings]) -> tuple[Table, dict[str, str]]:
    """Return a table of the settings that not all groups share, one row per group; and, by algorithm, the
    hyperparameters that are equal in all groups that have them. groups: settings by label."""
    keys: list[str] = []
    own: list[str] = []
    for key in _differing([*groups.values()]):
        values = {repr(g[key]) for g in groups.values() if key in g}
        alone = key.startswith("hyperparameters.") and len(values) == 1
        if key not in ("algo", "params"):
            (own if alone else keys).append(key)
    by: dict[str, str] = {}
    for g in groups.values():
        if parts := [f"{_short(key, own)} {g[key]}" for key in own if key in g]:
            by[plugins.short(str(g["algo"]))] = ", ".join(parts)
    rows = [(label, *(_value(key, g) for key in keys)) for label, g in groups.items()]
    return Table(("", *(_short(key, keys) for key in keys)), rows, len(keys) + 1), by


def shared(groups: Sequence[Settings]) -> dict[str, str]:
    """Return the settings that all groups share, by name."""
    differing = _differing(groups)
    return {_name(key): str(v) for key, v in groups[0].items() if key not in differing} if groups else {}


def differing_hyperparameters(groups: Sequence[Settings]) -> list[str]:
    """Return names and values of hyperparameters whose values differ between algorithms."""
    result = []
    for key in (key for key in _differing(groups) if key.startswith("hyperparameters.")):
        values: dict[str, list[str]] = {}
        for g in groups:
            if key in g and str(g[key]) not in values.setdefault(str(g["algo"]), []):
                values[str(g["algo"])].append(str(g[key]))
        if len({tuple(v) for v in values.values()}) > 1:
            every = dict.fromkeys(text for v in values.values() for text in v)
            result.append(f"{_name(key)} ({', '.join(every)})")
    return result


def _value(key: str, group: Settings) -> str:
    if key not in group:
        return "dense" if _choice(key) == CODECS else "–"
    value = group[key]
    return "none" if value == "" else plugins.short(value) if isinstance(value, str) else str(value)


def _differing(groups: Sequence[Settings]) -> list[str]:
    """Return the keys whose values differ between groups, or that a group lacks, in the order of TELLING."""
    keys = dict.fromkeys(key for g in groups for key in g)
    result = [key for key in keys if len({repr(g.get(key, ABSENT)) for g in groups}) > 1]
    return sorted(result, key=_rank)


def _telling(groups: Sequence[Settings]) -> list[str]:
    """Greedily choose a few keys that distinguish all groups; return them in the order of TELLING."""
    differing = _differing(groups)
    choices: dict[str, list[str]] = {}
    for key in differing:
        choices.setdefault(_choice(key), []).append(key)
    message: list[str] = []

    def apart(keys: Sequence[str]) -> int:
        return len({repr([g.get(key, ABSENT) for key in keys]) for g in groups})

    while apart(message) < len(groups) and choices:
        best = max(choices, key=lambda choice: apart([*message, *choices[choice]]))  # ties: the first
        message += choices.pop(best)
    return sorted(message, key=_rank)


def _needed(group: Settings, alike: Sequence[Settings], message: Sequence[str]) -> list[str]:
    """Return the keys without the choices that are not needed to distinguish `group` from the others in
    `alike`, the groups of its algorithm. The last choice is tried first."""
    keys = list(message)
    for choice in dict.fromkeys(_choice(key) for key in reversed(message)):
        fewer = [key for key in keys if _choice(key) != choice]
        same = [g for g in alike if all(g.get(k, ABSENT) == group.get(k, ABSENT) for k in fewer)]
        keys = fewer if len(same) == 1 and fewer else keys
    return keys


def _parts(keys: Sequence[str], group: Settings) -> list[str]:
    """Describe a group; a group without a codec is "dense" if other groups have one."""
    codecs = [key for key in keys if _choice(key) == CODECS]
    parts = [text for key in keys if (text := _setting(key, _short(key, keys), group))]
    if codecs and not any(key in group for key in codecs):
        plain = not any(_choice(key) == CODECS for key in group)
        parts.insert(0, "dense" if plain else f"{_name(codecs[0])} dense")
    return parts


def _choice(key: str) -> str:
    """Return the choice of a key: CODECS for a codec, because codecs are chosen together; else the key."""
    return CODECS if key.startswith(f"{CODECS}.") else key


def _rank(key: str) -> int:
    first = key.partition(".")[0]
    return TELLING.index(first) if first in TELLING else len(TELLING)


def _setting(key: str, name: str, settings: Settings) -> str:
    """Return the text of a setting; '' for a missing codec or source."""
    if key not in settings:
        return "" if key.startswith(("codecs.", "sources.")) else f"no {name}"
    value = settings[key]
    if key.startswith("sources."):
        return f"source {str(value)[:8]}"
    if value is True:
        return name
    if value == "" or value is False or (key == "until" and not value):
        return f"no {name}"
    return f"{name} {plugins.short(value) if isinstance(value, str) else value}"


def _name(key: str) -> str:
    """Return the name to show: "up.mean" for codecs.up.mean, and "evaluate on" for evaluate_on."""
    table, _, rest = key.partition(".")
    if table == "sources":
        return f"source {rest}"
    return rest or key.replace("_", " ")


def _short(key: str, beside: Sequence[str]) -> str:
    """Return lr for hyperparameters.local.lr if no other key ends with lr; otherwise local.lr."""
    last = key.rpartition(".")[2]
    alone = sum(other.rpartition(".")[2] == last for other in beside) == 1
    return last if key.startswith("hyperparameters.") and alone else _name(key)
