"""Groups of runs that differ only in their seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.errors import UsageError, unknown
from fedsim.experiment import Experiment
from fedsim.removed import removed
from launch.configuration import names
from launch.results.labels import labels, natural
from launch.results.statistics import Values, sides, value
from launch.runs.client_costs import ClientCosts, Sent, of_ledger
from launch.runs.folder import RunFolder, is_run, run_folders
from launch.runs.tables import Curve
from workers.storage.growing_file import LEDGER

FOLLOWS = ("seed", "client_sizes", "data")
"""Settings that may differ within a group: the seed and what it determines, such as the data's split."""

SPLIT = ("fraction", "inputs", "partition", "clients")
"""Settings that determine the split, together with the data set and the seed."""
UNITS = {f"units_of_p_{once}{side}" for once in ("", "once_") for side in ("down", "up")}
PairKey = tuple[int, str]


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison."""

    run: RunFolder

    @property
    def seed(self) -> int:
        return int(self.run.experiment["seed"])

    @property
    def key(self) -> PairKey:
        """The key by which runs are paired: seed, data set, evaluated rows, and split.

        The split is identified by the digest of the data or, in runs without a digest, by its settings.
        """
        e = self.run.experiment
        split = e.get("data") or [str(e.get(name)) for name in SPLIT]
        return self.seed, f"{e['dataset']} {e.get('evaluate_on') or 'test'} {split}"

    @property
    def done(self) -> bool:
        return self.run.status == "done"

    @cached_property
    def curve(self) -> Curve:
        """The run's curve; it has no lines if no round has been evaluated."""
        return self.run.curve

    @property
    def rounds(self) -> int:
        return max(self.curve.rounds(), default=0)

    @property
    def stopped(self) -> bool:
        """True if the run ended at its target accuracy, before its last round."""
        experiment = self.run.experiment
        return self.done and bool(experiment.get("until")) and self.rounds < int(experiment["rounds"])

    @cached_property
    def traffic(self) -> Mapping[str, Mapping[str, int]]:
        """Bytes of the algorithm by direction and part (a field, indices of a field, header, framing)."""
        result: dict[str, Counter[str]] = {"down": Counter(), "up": Counter()}
        if self.done:
            for side, named in self.run.summary.get("bytes", {}).get("algorithm", {}).items():
                for name, layers in named.items():
                    for layer, n in layers.items():
                        result[side][_part(name, layer)] += n
        elif self.run.has(LEDGER):
            rows = self.run.ledger
            for (name, layer), row in sides(rows[rows.kind == "algorithm"], ["field", "layer"]).iterrows():
                for side in result:
                    result[side][_part(name, layer)] += int(row[side])
        return result

    @cached_property
    def client_bytes(self) -> Values:
        """Bytes of the algorithm, both directions, by client; empty if there is no ledger."""
        if not self.run.has(LEDGER):
            return np.zeros(0)
        rows = self.run.ledger
        spent = rows[(rows.kind == "algorithm") & (rows.client >= 0)].groupby("client")["bytes"].sum()
        return np.array(spent.reindex(range(self.run.clients), fill_value=0), dtype=np.float64)

    @cached_property
    def client_accuracies(self) -> Values:
        """Accuracies of the clients after the last evaluated round; empty if they are not known."""
        last = self.curve.lines[-1].get("client_accuracies") if self.curve.lines else None
        return np.array([a for a in last or () if a is not None], dtype=np.float64)

    @property
    def bytes(self) -> int:
        """Bytes of the algorithm, both directions."""
        return sum(sum(named.values()) for named in self.traffic.values())

    def units(self, side: str, once: bool = False) -> float:
        """Return the bytes per client and round, or once per client, in units of P (4 P bytes); 0 if none."""
        return self._units[f"units_of_p_{'once_' if once else ''}{side}"]

    @cached_property
    def _units(self) -> Mapping[str, float]:
        """The units in summary.json or, if it has none, computed from the ledger.

        A summary has none if the run has not ended.
        """
        summary = self.run.summary
        if summary.keys() >= UNITS:
            return {key: float(summary[key]) for key in UNITS}
        clients = self.run.clients
        if not self.run.has(LEDGER):
            return ClientCosts().units(params=self.run.params, participations=0, clients=clients)
        return of_ledger(self.run.ledger, _sent_once(self.run), params=self.run.params, clients=clients)


@dataclass(frozen=True)
class Group:
    """Runs of one experiment.

    members: one run per seed; only finished runs, if there are any. aside: all other runs.
    """

    label: str
    settings: Mapping[str, Any]
    members: tuple[ComparedRun, ...]
    aside: tuple[ComparedRun, ...] = field(default=())

    @property
    def curves(self) -> list[Curve]:
        """Curves of the members that have an evaluated round after round 0."""
        return [m.curve for m in self.members if m.rounds > 0]

    @property
    def done(self) -> bool:
        return all(m.done for m in self.members)

    @property
    def stopped(self) -> bool:
        """True if a member ended at its target accuracy, before its last round."""
        return any(m.stopped for m in self.members)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(m.seed for m in self.members)

    @property
    def different_data(self) -> dict[int, list[str]]:
        """Digests of the data by seed, for seeds whose runs have different digests. This should not happen,
        because settings and seed determine the data."""
        digests: dict[int, list[str]] = {}
        for m in (*self.members, *self.aside):
            digest = m.run.experiment.get("data")
            if digest and digest not in digests.setdefault(m.seed, []):
                digests[m.seed].append(str(digest))
        return {seed: several for seed, several in digests.items() if len(several) > 1}

    @property
    def params(self) -> int:
        """The number of parameters, P."""
        return self.members[0].run.params

    def has(self, metric: str) -> bool:
        return bool(self.curves) and all(c.has(metric) for c in self.curves)

    def values(self, expression: str, metric: str = "") -> list[float]:
        """Return a column of launch.results.statistics, one number per member; [] without the metric."""
        return [value(expression, c) for c in self.curves] if not metric or self.has(metric) else []

    def scores(self, expression: str, metric: str) -> dict[PairKey, float]:
        """Return a column by ComparedRun.key; {} without the metric."""
        if not self.has(metric):
            return {}
        there = [m for m in self.members if m.rounds > 0]
        return {m.key: value(expression, m.curve) for m in there}

    def bytes_by_field(self) -> dict[str, float]:
        """Return the bytes of both directions by field, as the mean over the members."""
        total: Counter[str] = Counter()
        for member in self.members:
            for named in member.traffic.values():
                total.update(named)
        return {name: n / len(self.members) for name, n in total.items() if n}


def gather(paths: Sequence[Path], where: Sequence[str] = ()) -> tuple[Group, ...]:
    """Read run folders, and folders that contain run folders, as groups.

    Groups are sorted by algorithm, in the order in which the algorithms first appear, and then by label.
    where: KEY=VALUE conditions, all of which a run's experiment must meet.
    """
    folders = list(dict.fromkeys(folder.resolve() for path in paths for folder in _expanded(path)))
    runs = [RunFolder.open(folder).checked() for folder in folders]
    for run in runs:
        run.check_numbers()
    result: dict[str, list[ComparedRun]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run, described in _selected([(run, settings_of(run)) for run in runs], where):
        key = repr(sorted(described.items()))
        settings.setdefault(key, described)
        result.setdefault(key, []).append(ComparedRun(run))
    headings = labels(list(settings.values()))
    groups = [
        _group(name, settings[key], members)
        for name, (key, members) in zip(headings, result.items(), strict=True)
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


def settings_of(run: RunFolder) -> dict[str, Any]:
    """Return the experiment by dotted name, without FOLLOWS and settings that left; a missing key has its
    default."""
    described = {k: v for k, v in vars(Experiment()).items() if k not in ("hyperparameters", "codecs")}
    described |= {
        k: v for k, v in run.experiment.items() if k not in FOLLOWS and removed("option", f"--{k}") is None
    }
    flat = {k: v for k, v in described.items() if not isinstance(v, Mapping) and k not in FOLLOWS}
    for table in ("hyperparameters", "codecs", "sources"):
        values = (run.experiment.get(table) or {}).items()
        flat |= {f"{table}.{key}": v for key, v in values if removed("hyperparameter", key) is None}
    return flat


def _expanded(path: Path) -> list[Path]:
    """Return the run folder itself, or the run folders in a folder."""
    if is_run(path):
        return [path]
    if not path.is_dir():
        raise UsageError(f"there is no run folder {path}")
    result = [folder for folder in run_folders(path) if is_run(folder)]
    if not result:
        raise UsageError(f"{path} is not a run folder, and there is none in it: no manifest.json")
    return result


def _selected(
    runs: Sequence[tuple[RunFolder, dict[str, Any]]], where: Sequence[str]
) -> Sequence[tuple[RunFolder, dict[str, Any]]]:
    for text in where:
        name, equals, target = text.partition("=")
        if not equals:
            raise UsageError(f"--where {text!r}: give key=value, such as --where algo=fedlap")
        known = {key for _, described in runs for key in described} | {"seed"}
        if name not in {short for key in known for short in (key, key.partition(".")[2], _last(key))}:
            raise unknown("key of --where:", name, known)
        runs = [(run, d) for run, d in runs if target in _output(name, d, run)]
        if not runs:
            raise UsageError(
                f"no run has {text}" + (" and meets the other --where" if len(where) > 1 else "")
            )
    return runs


def _output(name: str, settings: Mapping[str, Any], run: RunFolder) -> set[str]:
    if name == "seed":
        return {str(run.experiment["seed"])}
    result = [v for key, v in settings.items() if name in (key, key.partition(".")[2], _last(key))]
    return {text for v in result for text in (str(v), str(v).lower())}


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _sent_once(run: RunFolder) -> frozenset[Sent]:
    """Return the fields that the algorithm sends once; none for a user's file, which is not executed here."""
    known = names.names("algorithms").get(str(run.experiment["algo"]))
    return frozenset(known.once) if known else frozenset()
