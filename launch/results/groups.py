"""Groups of runs that differ only in their seed, and the one table of their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedsim.errors import UsageError, unknown
from fedsim.experiment import Experiment
from fedsim.removed import removed
from fedsim.wire.ledger_rows import COLUMNS
from launch.configuration import names
from launch.results.columns import column, metric_of
from launch.results.labels import labels, natural
from launch.runs.client_costs import ClientCosts, Sent, of_ledger
from launch.runs.folder import DONE, RunFolder, is_run, run_folders
from launch.runs.tables import LIMITS, SUMS, part_of, parts_of, sides, timed
from workers.storage.growing_file import LEDGER, METRICS

if TYPE_CHECKING:
    import pandas

    from launch.results.figures import Values

FOLLOWS = ("seed", "client_sizes", "data")
"""Settings that may differ within a group: the seed and what it determines, such as the data's split."""
SPLIT = ("fraction", "inputs", "partition", "clients")
"""Settings that determine the split, together with the data set and the seed."""
UNITS = {f"units_of_p_{once}{side}" for once in ("", "once_") for side in ("down", "up")}
PairKey = tuple[int, str]
"""The seed, and the data that paired runs must share."""


@dataclass(frozen=True)
class Group:
    """Runs of one configuration.

    curves: the table of each run, with a row per evaluated round and a column per metric and sum
    (launch.runs.tables.metrics_table). keys: the key by which a run is paired with runs of other groups, or
    None; runs with equal keys, such as folds, count as one.
    """

    label: str
    curves: Sequence[pandas.DataFrame]
    keys: Sequence[PairKey | None]

    @cached_property
    def table(self) -> pandas.DataFrame:
        """The table of all runs, with their number and the round as index."""
        import pandas

        return pandas.concat(dict(enumerate(self.curves)), names=["run"])

    def has(self, metric: str) -> bool:
        """Return whether every run has the metric; simulated and J need a number in every round from 1."""
        if not self.keys or metric not in self.table:
            return False
        if metric in ("simulated", "J"):
            return all(timed(curve, metric) for curve in self.curves)
        known = self.table[metric].notna().groupby(level="run").any()
        return metric in SUMS or metric in LIMITS or bool(known.all())

    def values(self, expression: str, window: int = 1) -> list[float]:
        """Return a column (launch.results.columns), one number per run."""
        return [column(expression).of(curve, window) for curve in self.curves]

    def known(self, expression: str) -> list[float]:
        """Return a column, or [] if a run does not have its metric."""
        return self.values(expression) if self.has(column(expression).metric) else []

    def scores(self, expression: str, window: int = 1) -> dict[PairKey, float]:
        """Return a column by key, as the mean over the runs of a key."""
        by_key: dict[PairKey, list[float]] = {}
        for key, value in zip(self.keys, self.values(expression, window), strict=True):
            if key is not None:
                by_key.setdefault(key, []).append(value)
        return {key: fmean(values) for key, values in by_key.items()}

    def band(self, x: str, y: str, window: int = 1) -> pandas.DataFrame:
        """Return y over x (`over_runs`), as far as all runs have rounds; if the runs differ in x, x is their
        mean. window: average y over so many rounds."""
        import numpy as np

        count = min((len(curve) for curve in self.curves), default=0)
        if not count:
            return over_runs(np.zeros(0), np.zeros((1, 0)))
        xs, ys = (
            np.array([metric_of(curve, name)[:count] for curve in self.curves], dtype=float)
            for name in (x, y)
        )
        if window > 1:
            ys = np.array([[row[max(0, n + 1 - window) : n + 1].mean() for n in range(count)] for row in ys])
        return over_runs(xs.mean(0), ys)


def over_runs(x: Values, ys: Values) -> pandas.DataFrame:
    """Return a table of x with the mean (y), the lowest and the highest value over the runs. ys: a row per
    run, as long as x."""
    import pandas

    return pandas.DataFrame({"x": x, "y": ys.mean(0), "low": ys.min(0), "high": ys.max(0)})


class Member(RunFolder):
    """A run folder in a group, with the numbers that tables state."""

    @property
    def seed(self) -> int:
        return int(self.experiment["seed"])

    @property
    def key(self) -> PairKey:
        """The key by which runs are paired: seed, data set, evaluated rows, and split.

        The split is identified by the digest of the data or, in runs without a digest, by its settings.
        """
        e = self.experiment
        split = e.get("data") or [str(e.get(name)) for name in SPLIT]
        return self.seed, f"{e['dataset']} {e.get('evaluate_on') or 'test'} {split}"

    @cached_property
    def done(self) -> bool:
        return self.status == DONE

    @property
    def last(self) -> Mapping[str, Any]:
        """The last line of metrics.jsonl; empty if there is none."""
        return self.evaluated[-1] if self.evaluated else {}

    @property
    def evaluated(self) -> Sequence[Mapping[str, Any]]:
        """The lines of metrics.jsonl; none if the file does not exist."""
        return self.lines if self.has(METRICS) else ()

    @property
    def rounds(self) -> int:
        """The last evaluated round."""
        return int(max(self.curve.index, default=0))

    @property
    def stopped(self) -> bool:
        """True if the run ended at its target accuracy, before its last round."""
        e = self.experiment
        return self.done and bool(e.get("until")) and self.rounds < int(e["rounds"])

    @cached_property
    def traffic(self) -> Mapping[str, Mapping[str, int]]:
        """Bytes of the algorithm by direction and part (a field, indices of a field, header, framing)."""
        if self.done:
            return parts_of(self.summary.get("bytes", {}).get("algorithm", {}))
        by = sides(self.own_ledger, ["field", "layer"])
        return {side: Counter({part_of(*key): int(n) for key, n in by[side].items()}) for side in by}

    @property
    def own_ledger(self) -> pandas.DataFrame:
        """The algorithm's rows of the ledger; none if the file does not exist."""
        import pandas

        ledger = self.ledger if self.has(LEDGER) else pandas.DataFrame(columns=COLUMNS)
        return ledger[ledger.kind == "algorithm"]

    @cached_property
    def client_bytes(self) -> Values:
        """Bytes of the algorithm, both directions, by client; empty if there is no ledger."""
        import numpy as np

        if not self.has(LEDGER):
            return np.zeros(0)
        own = self.own_ledger
        spent = own[own.client >= 0].groupby("client")["bytes"].sum()
        return np.array(spent.reindex(range(self.clients), fill_value=0), dtype=np.float64)

    @property
    def bytes(self) -> int:
        """Bytes of the algorithm, both directions."""
        return sum(sum(named.values()) for named in self.traffic.values())

    def units(self, side: str, once: bool = False) -> float:
        """Return the bytes per client and round, or once per client, in units of P (4 P bytes); 0 if none."""
        return self._units[f"units_of_p_{'once_' if once else ''}{side}"]

    @cached_property
    def _units(self) -> Mapping[str, float]:
        """The units in summary.json or, in a run that has not ended, computed from the ledger."""
        if self.summary.keys() >= UNITS:
            return {key: float(self.summary[key]) for key in UNITS}
        if not self.has(LEDGER):
            return ClientCosts().units(params=self.params, participations=0, clients=self.clients)
        return of_ledger(self.ledger, self._sent_once(), params=self.params, clients=self.clients)

    def _sent_once(self) -> frozenset[Sent]:
        """Return the fields that the algorithm sends once; none for a user's file, which is not executed."""
        known = names.names("algorithms").get(str(self.experiment["algo"]))
        return frozenset(known.once) if known else frozenset()


@dataclass(frozen=True)
class RunGroup(Group):
    """Run folders of one configuration.

    members: one run per seed; only finished runs, if there are any. aside: all other runs. Curves are those
    of the members with an evaluated round after round 0, `trained`.
    """

    settings: Mapping[str, Any]
    members: tuple[Member, ...]
    aside: tuple[Member, ...] = ()

    @staticmethod
    def of(label: str, settings: Mapping[str, Any], runs: Sequence[Member]) -> RunGroup:
        ordered = sorted(runs, key=lambda m: (m.seed, -m.rounds))
        selected: dict[int, Member] = {}
        for member in [m for m in ordered if m.done] or ordered:
            selected.setdefault(member.seed, member)
        members = tuple(selected.values())
        trained = [m for m in members if m.rounds > 0]
        aside = tuple(m for m in ordered if m not in members)
        curves, keys = [m.curve for m in trained], [m.key for m in trained]
        return RunGroup(label, curves, keys, settings, members, aside)

    @property
    def trained(self) -> list[Member]:
        return [m for m in self.members if m.rounds > 0]

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
            digest = m.experiment.get("data")
            if digest and digest not in digests.setdefault(m.seed, []):
                digests[m.seed].append(str(digest))
        return {seed: several for seed, several in digests.items() if len(several) > 1}

    @property
    def params(self) -> int:
        """The number of parameters, P."""
        return self.members[0].params

    def bytes_by_field(self) -> dict[str, float]:
        """Return the bytes of both directions by field, as the mean over the members."""
        total: Counter[str] = Counter()
        for member in self.members:
            for named in member.traffic.values():
                total.update(named)
        return {name: n / len(self.members) for name, n in total.items() if n}


def gather(paths: Sequence[Path], where: Sequence[str] = ()) -> tuple[RunGroup, ...]:
    """Read run folders, and folders that contain run folders, as groups.

    Groups are sorted by algorithm, in the order in which the algorithms first appear, and then by label.
    where: KEY=VALUE conditions, all of which a run's experiment must meet.
    """
    folders = list(dict.fromkeys(folder.resolve() for path in paths for folder in _expanded(path)))
    runs = [Member.open(folder).checked() for folder in folders]
    for run in runs:
        run.check_numbers()
    members: dict[str, list[Member]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run, described in _selected([(run, settings_of(run)) for run in runs], where):
        key = repr(sorted(described.items()))
        settings.setdefault(key, described)
        members.setdefault(key, []).append(run)
    named = zip(labels(list(settings.values())), members.items(), strict=True)
    groups = [RunGroup.of(name, settings[key], of) for name, (key, of) in named]
    algorithms = list(dict.fromkeys(g.settings["algo"] for g in groups))
    return tuple(sorted(groups, key=lambda g: (algorithms.index(g.settings["algo"]), natural(g.label))))


def settings_of(run: RunFolder) -> dict[str, Any]:
    """Return the experiment by dotted name, without FOLLOWS and settings that left; a missing key has its
    default."""
    described = {k: v for k, v in vars(Experiment()).items() if k not in ("hyperparameters", "codecs")}
    described |= {
        k: v for k, v in run.experiment.items() if k not in FOLLOWS and removed("option", f"--{k}") is None
    }
    flat = {k: v for k, v in described.items() if not isinstance(v, Mapping | list) and k not in FOLLOWS}
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
    runs: Sequence[tuple[Member, dict[str, Any]]], where: Sequence[str]
) -> Sequence[tuple[Member, dict[str, Any]]]:
    """Return the runs that meet all conditions. A key may lack its table: lr for hyperparameters.local.lr."""

    def short(key: str) -> set[str]:
        return {key, key.partition(".")[2], key.rpartition(".")[2]}

    for text in where:
        name, equals, target = text.partition("=")
        if not equals:
            raise UsageError(f"--where {text!r}: give key=value, such as --where algo=fedlap")
        described = [{**settings, "seed": run.seed} for run, settings in runs]
        keys = {key for settings in described for key in settings}
        if not any(name in short(key) for key in keys):
            raise unknown("key of --where:", name, keys)
        values = [[str(v) for key, v in of.items() if name in short(key)] for of in described]
        runs = [run for run, of in zip(runs, values, strict=True) if target in (*of, *map(str.lower, of))]
        if not runs:
            raise UsageError(
                f"no run has {text}" + (" and meets the other --where" if len(where) > 1 else "")
            )
    return runs
