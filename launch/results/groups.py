"""Groups of runs that differ only in their seed, and their names: the shortest texts that tell them apart."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsim import plugins
from fedsim.errors import UsageError, unknown
from fedsim.experiment import Experiment
from launch.results.statistics import messages, sides, value
from launch.runs.reader import Curve, Run

Settings = Mapping[str, Any]

CODECS = "codecs"
TELLING = (CODECS, "hyperparameters", "participation", "error_feedback", "partition", "model", "dataset")
"""What people tell runs apart by, in this order; then any other key."""
ABSENT = object()
FOLLOWS = ("seed", "client_sizes", "data")
"""What may differ within a group: the seed and what follows from it, such as the split of the data."""


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison."""

    run: Run

    @property
    def seed(self) -> int:
        return int(self.run.experiment["seed"])

    @property
    def done(self) -> bool:
        return self.run.status == "done"

    @cached_property
    def curve(self) -> Curve:
        """Empty for a run that did not get so far.

        Raises:
            DataError: if data is missing or damaged.
        """
        return Curve(self.run.lines if (self.run.path / "metrics.jsonl").is_file() else ())

    @property
    def rounds(self) -> int:
        """The last one that was evaluated."""
        return max(self.curve.rounds(), default=0)

    @cached_property
    def traffic(self) -> Mapping[str, Mapping[str, int]]:
        """Bytes of the algorithm: {direction: {field, its indices, header or framing: n}}."""
        result: dict[str, Counter[str]] = {"down": Counter(), "up": Counter()}
        if self.done:
            for side, named in self.run.summary.get("bytes", {}).get("algorithm", {}).items():
                for name, layers in named.items():
                    for layer, n in layers.items():
                        result[side][_part(name, layer)] += n
        elif (self.run.path / "ledger.csv").is_file():
            rows = self.run.ledger
            for (name, layer), row in sides(rows[rows.kind == "algorithm"], ["field", "layer"]).iterrows():
                for side in result:
                    result[side][_part(name, layer)] += int(row[side])
        return result

    @property
    def bytes(self) -> int:
        """Of the algorithm, both directions."""
        return sum(sum(named.values()) for named in self.traffic.values())

    def units(self, side: str) -> float:
        """Bytes in units of P (4 P bytes) per client and exchange; NaN if nothing was sent."""
        if self.done:
            return float(self.run.summary[f"units_of_p_{side}"])
        sent = messages(self.run.ledger, "down") if sum(self.traffic["down"].values()) else 0
        return sum(self.traffic[side].values()) / (4 * self.run.params * sent) if sent else math.nan


@dataclass(frozen=True)
class Group:
    """Runs of one experiment. members: one per seed, finished ones if there are any; aside: the rest."""

    label: str
    settings: Mapping[str, Any]
    members: tuple[ComparedRun, ...]
    aside: tuple[ComparedRun, ...] = field(default=())

    @property
    def curves(self) -> list[Curve]:
        """Of the members that were evaluated after the start."""
        return [m.curve for m in self.members if m.rounds > 0]

    @property
    def done(self) -> bool:
        return all(m.done for m in self.members)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(m.seed for m in self.members)

    @property
    def params(self) -> int:
        """P."""
        return self.members[0].run.params

    def has(self, metric: str) -> bool:
        return bool(self.curves) and all(c.has(metric) for c in self.curves)

    def values(self, expression: str, metric: str = "") -> list[float]:
        """A column of launch.results.statistics, one number per member; [] if they have no such metric."""
        return [value(expression, c) for c in self.curves] if not metric or self.has(metric) else []

    def bytes_by_field(self) -> dict[str, float]:
        """Both directions, mean over the members."""
        total: Counter[str] = Counter()
        for member in self.members:
            for named in member.traffic.values():
                total.update(named)
        return {name: n / len(self.members) for name, n in total.items() if n}


def gather(paths: Sequence[Path], where: Sequence[str] = ()) -> tuple[Group, ...]:
    """Read run folders, and folders of them, as groups; their algorithms in that order.

    where: KEY=VALUE, of which a run's experiment must have all.

    Raises:
        UsageError: if an argument is wrong.
        DataError: if data is missing or damaged.
    """
    folders = list(dict.fromkeys(folder.resolve() for path in paths for folder in _expanded(path)))
    runs = [Run.open(folder).checked() for folder in folders]
    result: dict[str, list[ComparedRun]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run, described in _selected([(run, _settings(run)) for run in runs], where):
        key = repr(sorted(described.items()))
        settings.setdefault(key, described)
        result.setdefault(key, []).append(ComparedRun(run))
    names = labels(list(settings.values()))
    groups = [
        _group(name, settings[key], members)
        for name, (key, members) in zip(names, result.items(), strict=True)
    ]
    algorithms = list(dict.fromkeys(g.settings["algo"] for g in groups))
    return tuple(sorted(groups, key=lambda g: (algorithms.index(g.settings["algo"]), natural(g.label))))


def _group(label: str, settings: Mapping[str, Any], runs: Sequence[ComparedRun]) -> Group:
    ordered = sorted(runs, key=lambda m: (m.seed, -m.rounds))
    selected: dict[int, ComparedRun] = {}
    for member in [m for m in ordered if m.done] or ordered:
        selected.setdefault(member.seed, member)
    members = tuple(selected.values())
    return Group(label, settings, members, tuple(m for m in ordered if m not in members))


def _part(name: str, layer: str) -> str:
    return layer if not name else name if layer == "values" else f"{name} {layer}"


def _settings(run: Run) -> dict[str, Any]:
    """The experiment by dotted names, without what follows from the seed; a key that is younger than the
    run has its default."""
    described = {k: v for k, v in vars(Experiment()).items() if k not in ("hyperparameters", "codecs")}
    described |= {k: v for k, v in run.experiment.items() if k not in FOLLOWS}
    flat = {k: v for k, v in described.items() if not isinstance(v, Mapping) and k not in FOLLOWS}
    for table in ("hyperparameters", "codecs", "sources"):
        flat |= {f"{table}.{key}": v for key, v in (run.experiment.get(table) or {}).items()}
    return flat


def _expanded(path: Path) -> list[Path]:
    """The run folder itself, or the run folders in it."""
    if (path / "manifest.json").is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"there is no run folder {path}")
    result = sorted(p.parent for p in path.glob("*/manifest.json"))
    if not result:
        raise UsageError(f"{path} is no run folder, and there is none in it: no manifest.json")
    return result


def _selected(
    runs: Sequence[tuple[Run, dict[str, Any]]], where: Sequence[str]
) -> Sequence[tuple[Run, dict[str, Any]]]:
    for text in where:
        name, equals, target = text.partition("=")
        if not equals:
            raise UsageError(f"--where {text!r}: give key=value, such as --where algo=fedlap")
        known = {key for _, described in runs for key in described} | {"seed"}
        if name not in {short for key in known for short in (key, key.partition(".")[2], _last(key))}:
            raise unknown("key of --where:", name, known)
        runs = [(run, d) for run, d in runs if target in _output(name, d, run)]
        if not runs:
            raise UsageError(f"no run has {text}" + (" beside the other --where" if len(where) > 1 else ""))
    return runs


def _output(name: str, settings: Mapping[str, Any], run: Run) -> set[str]:
    """The texts that a value may be asked for by."""
    if name == "seed":
        return {str(run.experiment["seed"])}
    result = [v for key, v in settings.items() if name in (key, key.partition(".")[2], _last(key))]
    return {text for v in result for text in (str(v), str(v).lower())}


def _last(key: str) -> str:
    return key.rpartition(".")[2]


# ---- names


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
