"""Names of groups of runs: the shortest texts that tell them apart, and what else differs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedsim import plugins

Settings = Mapping[str, Any]

CODECS = "codecs"
TELLING = (CODECS, "hyperparameters", "participation", "error_feedback", "partition", "model", "dataset")
"""What people tell runs apart by, in this order; then any other key."""
ABSENT = object()


def labels(groups: Sequence[Settings]) -> list[str]:
    """The algorithm and, among groups of one algorithm, the fewest settings that no other has.

    Settings are dotted (codecs.mean, hyperparameters.local.lr); no two groups are equal.
    """
    names = [plugins.short(str(g["algo"])) for g in groups]
    out = list(names)
    for name in dict.fromkeys(names):
        alike = [g for g, other in zip(groups, names, strict=True) if other == name]
        message = _telling(alike)
        for n in (n for n, other in enumerate(names) if other == name):
            if parts := _parts(_needed(groups[n], alike, message), groups[n]):
                out[n] = f"{name} ({', '.join(parts)})"
    return out


def natural(label: str) -> list[tuple[float, str]]:
    """A key that sorts labels by their numbers, dense first."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", label.replace("(dense", "("))
    return [(float(part), "") if n % 2 else (-math.inf, part) for n, part in enumerate(parts)]


def differences(groups: Sequence[Settings]) -> list[dict[str, str]]:
    """Per group, its settings that not all groups share, by name."""
    keys = _differing(groups)
    return [{_name(key): str(g[key]) for key in keys if key in g} for g in groups]


def shared(groups: Sequence[Settings]) -> dict[str, str]:
    """Settings that all groups share, by name."""
    differing = _differing(groups)
    return {_name(key): str(v) for key, v in groups[0].items() if key not in differing} if groups else {}


def _differing(groups: Sequence[Settings]) -> list[str]:
    """Keys that not all groups have with one value, in the order of TELLING."""
    keys = dict.fromkeys(key for g in groups for key in g)
    result = [key for key in keys if len({repr(g.get(key, ABSENT)) for g in groups}) > 1]
    return sorted(result, key=_rank)


def _telling(groups: Sequence[Settings]) -> list[str]:
    """Few keys whose values no two groups share: always the choice next that tells most apart."""
    differing = _differing(groups)
    choices: dict[str, list[str]] = {}
    for key in differing:
        choices.setdefault(_choice(key), []).append(key)
    message: list[str] = []

    def apart(keys: Sequence[str]) -> int:
        return len({repr([g.get(key, ABSENT) for key in keys]) for g in groups})

    while apart(message) < len(groups) and choices:
        best = max(choices, key=lambda choice: apart([*message, *choices[choice]]))  # the first of equals
        message += choices.pop(best)
    return sorted(message, key=_rank)


def _needed(group: Settings, alike: Sequence[Settings], message: Sequence[str]) -> list[str]:
    """Without the choices, last first, that the others do without to exclude the other groups."""
    keys = list(message)
    for choice in dict.fromkeys(_choice(key) for key in reversed(message)):
        fewer = [key for key in keys if _choice(key) != choice]
        same = [g for g in alike if all(g.get(k, ABSENT) == group.get(k, ABSENT) for k in fewer)]
        keys = fewer if len(same) == 1 and fewer else keys
    return keys


def _parts(keys: Sequence[str], group: Settings) -> list[str]:
    """In words; a group without a codec where others have one is dense."""
    codecs = [key for key in keys if _choice(key) == CODECS]
    parts = [text for key in keys if (text := _setting(key, _short(key, keys), group))]
    if codecs and not any(key in group for key in codecs):
        plain = not any(_choice(key) == CODECS for key in group)
        parts.insert(0, "dense" if plain else f"{_name(codecs[0])} dense")
    return parts


def _choice(key: str) -> str:
    """Codecs are one choice, so those that differ come together."""
    return CODECS if key.startswith(f"{CODECS}.") else key


def _rank(key: str) -> int:
    first = key.partition(".")[0]
    return TELLING.index(first) if first in TELLING else len(TELLING)


def _setting(key: str, name: str, settings: Settings) -> str:
    """'' for a field without codec."""
    if key not in settings:
        return "" if key.startswith(("codecs.", "sources.")) else f"no {name}"
    value = settings[key]
    if key.startswith("sources."):
        return f"source {str(value)[:8]}"
    return f"{name} {plugins.short(value) if isinstance(value, str) else value}"


def _name(key: str) -> str:
    """hyperparameters.local.lr is local.lr, codecs.up.mean up.mean, evaluate_on evaluate on."""
    table, _, rest = key.partition(".")
    if table == "sources":
        return f"source {rest}"
    return rest or key.replace("_", " ")


def _short(key: str, beside: Sequence[str]) -> str:
    """lr for hyperparameters.local.lr, where no other key ends so."""
    last = key.rpartition(".")[2]
    alone = sum(other.rpartition(".")[2] == last for other in beside) == 1
    return last if key.startswith("hyperparameters.") and alone else _name(key)
