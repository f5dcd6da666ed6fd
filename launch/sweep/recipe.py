"""A recipe, which defines the runs, tables and plots of a sweep in one TOML file (docs/sweeps.md).

It has title, about and notes (texts before and after the tables), seeds, preset, the tables [experiment],
[hyperparameters], [codecs] and [execution] of `fedsim launch --config`, for all runs, [grid] with lists of
values for dotted keys, every combination of which is a row, [repeat] with values that a row averages over, as
over seeds, and any number of [[variant]], [[table]], [[plot]] and [[differences]].
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fedsim import model_specs, partition_specs, plugins, traces
from fedsim.errors import UsageError, unknown
from fedsim.experiment import (
    DEFAULTS,
    Experiment,
    build_algorithm,
    convert,
    read_toml,
    resolved,
    resolved_hyperparameters,
)
from launch.configuration import names
from launch.configuration.config import absolute_choice, absolute_users_files, with_auto
from launch.configuration.config_files import completed, merged
from launch.configuration.execution import Execution
from launch.configuration.presets import Preset
from launch.tracking import selected

TABLES = ("experiment", "hyperparameters", "codecs")
PICTURES = (".png", ".svg", ".pdf")
"""The formats of pictures, by the end of the file's name."""
FIRST = (
    *("algo", "dataset", "fraction", "inputs", "partition", "model", "clients", "rounds", "participation"),
    *("seed", "eval_every", "eval_samples", "threads", "device", "hyperparameters", "codecs"),
)
"""The keys of an experiment in the first version of sweeps. A run's digest leaves out later keys that have
their default values, so that the digests of old runs stay valid."""
LATER = {"drop_last": False, "inexact": 0.0, "balance": 0.0, "factor": 2.0}
"""Later hyperparameters, also left out if they have these values. A key is the last part of a dotted name."""


@dataclass(frozen=True)
class Variant:
    """One algorithm with its settings, or several if the variant has its own grid."""

    label: str
    experiment: Mapping[str, Any] = field(default_factory=dict)
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    codecs: Mapping[str, str] = field(default_factory=dict)
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    published: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A table or a plot of the page, of the variants labelled in `only` and the values of grid keys in `at`;
    by default of all. Numbers are means (or maxima) over `window` rounds."""

    title: str = ""
    window: Annotated[int, Meta(ge=1)] = 1
    only: tuple[str, ...] = ()
    at: Mapping[str, Any] = field(default_factory=dict)

    def grid_keys(self) -> tuple[str, ...]:
        """Return the grid keys that the part names."""
        return tuple(self.at)


@dataclass(frozen=True)
class Table(Part):
    """A table. `columns` are expressions (launch.results.columns). `pivot` is a grid key whose values become
    columns, each with the single expression in `columns`. `best`: the leaders of every column are bold."""

    columns: tuple[str, ...]
    pivot: str = ""
    best: bool = False

    def grid_keys(self) -> tuple[str, ...]:
        return (*self.at, *([self.pivot] if self.pivot else []))


@dataclass(frozen=True)
class Plot(Part):
    """A plot of `y` over `x`, which is the round, the MB so far, or a grid key. Each value of a grid key is a
    point, for which y needs an @ROUND. `limits`: variants with two further curves, whose x is the entropy of
    the messages and the KL of the uploads; the plot's x must be MB."""

    file: str
    y: str
    x: str = "round"
    logx: bool = False
    low: float | None = None
    high: float | None = None
    limits: tuple[str, ...] = ()

    @property
    def over_grid(self) -> bool:
        return "." in self.x

    def grid_keys(self) -> tuple[str, ...]:
        return (*self.at, *([self.x] if self.over_grid else []))


@dataclass(frozen=True)
class Differences(Part):
    """A table of differences between rows, paired by seed, for each expression in `columns`, and their
    picture.

    `against` is the name of the row that is subtracted, by default the best row. `file` is the picture's
    name; "" for none.
    """

    columns: tuple[str, ...]
    against: str = ""
    file: str = ""


@dataclass(frozen=True)
class Recipe:
    title: str
    variant: tuple[Variant, ...]
    seeds: Annotated[tuple[int, ...], Meta(min_length=1)] = (0,)
    preset: str = ""
    about: str = ""
    notes: str = ""
    section_of: str = ""
    """The name, without .toml, of another recipe, in whose page this recipe's text is a section."""
    experiment: Mapping[str, Any] = field(default_factory=dict)
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    codecs: Mapping[str, str] = field(default_factory=dict)
    execution: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    repeat: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    table: tuple[Table, ...] = (Table(("test_accuracy@end", "test_nll@end", "MB@end")),)
    plot: tuple[Plot, ...] = ()
    differences: tuple[Differences, ...] = ()

    def __post_init__(self) -> None:
        if not self.seeds:
            raise UsageError("seeds: give one seed at least, such as 0, 1, 2")
        if len(set(self.seeds)) < len(self.seeds):
            raise UsageError(f"seeds {', '.join(map(str, self.seeds))}: a seed is given twice")

    @staticmethod
    def read(path: Path) -> Recipe:
        """Read a recipe file, and check that the labels and keys of its tables and plots exist."""
        recipe = convert(Recipe, completed(path, read_toml(path, "recipe")), f"recipe {path}")
        labels = [v.label for v in recipe.variant]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise UsageError(f"recipe {path}: two variants are called {twice[0]!r}; labels tell rows apart")
        keys = {key for row in recipe.rows() for key in row.point}
        parts: tuple[Part, ...] = (*recipe.table, *recipe.plot, *recipe.differences)
        for part in parts:
            for label in (*part.only, *(part.limits if isinstance(part, Plot) else ())):
                if label not in labels:
                    raise unknown(f"variant in recipe {path}:", label, labels)
            for key in part.grid_keys():
                if key not in keys:
                    raise unknown(f"grid key in recipe {path}:", key, keys)
        for table in recipe.table:
            if table.pivot and len(table.columns) != 1:
                raise UsageError(
                    f"recipe {path}: a table with a pivot has one column, not {len(table.columns)}"
                )
        for d in recipe.differences:
            rows = [row.name for row in recipe.rows() if row.fits(d)]
            if d.against and d.against not in rows:
                raise unknown(f"row of differences in recipe {path}:", d.against, rows)
        files = [f for f in (*(p.file for p in recipe.plot), *(d.file for d in recipe.differences)) if f]
        for file in files:
            if Path(file).name != file or Path(file).suffix not in PICTURES or files.count(file) > 1:
                raise UsageError(
                    f"recipe {path}: file = {file!r}: give every picture a name of its own, without folder, "
                    f"that ends in {', '.join(PICTURES)}"
                )
        for plot in recipe.plot:
            if plot.limits and plot.x != "MB":
                raise UsageError(
                    f"recipe {path}: plot {plot.file} has limits, which are in megabytes, so its x must be "
                    f"MB, not {plot.x}"
                )
        return recipe

    def rows(self) -> Iterator[Row]:
        """Yield one row per variant and point of the grids, in the order of the file."""
        for v in self.variant:
            for point in _points({**self.grid, **v.grid}):
                yield Row(v, point)

    def trials(self) -> Iterator[Trial]:
        """Yield all runs, one for each row, seed and repetition."""
        for row in self.rows():
            for seed in self.seeds:
                for point in _points(self.repeat):
                    e = self.configure(Row(row.variant, {**row.point, **point}), seed)
                    yield Trial(id_of(e), f"{row.name}, seed {seed}", e, row=row, seed=seed)

    def configure(self, row: Row, seed: int) -> Experiment:
        """Return the experiment of a row, fully resolved, so that equal configurations compare equal."""
        created = self.described(row, seed)
        names.check(created)
        known = names.names("algorithms").get(created.algo)
        if known and known.defaults and not created.hyperparameters:
            named = {**known.defaults.hyperparameters}
            return resolved(replace(created, hyperparameters=named), known.defaults)
        from protocols import find  # imports torch, because only the class can check hyperparameters

        algorithm = build_algorithm(find(created.algo), created.hyperparameters)
        return resolved(replace(created, hyperparameters=resolved_hyperparameters(algorithm)), algorithm)

    def described(self, row: Row, seed: int) -> Experiment:
        """Return the experiment of a row with only the hyperparameters that the recipe names."""
        layers = [{n: getattr(source, n) for n in TABLES} for source in (self, row.variant)]
        layers.append(_tables_of(row.point))
        parts = merged(*layers)
        if self.preset:
            algo = str(parts["experiment"].get("algo", DEFAULTS.algo))
            parts = merged(Preset.read(self.preset).tables(algo), *layers)
        values = {**parts["experiment"], "seed": seed}
        values = absolute_users_files(values)
        parts["codecs"] = {name: absolute_choice(codec) for name, codec in parts["codecs"].items()}
        where = f"the experiment of {row.name}"
        return convert(Experiment, {**values, **{k: parts[k] for k in TABLES[1:]}}, where)

    def how(self, data_dir: str | None) -> Execution:
        """Return the execution of the runs, by default without workers, because a sweep has parallel runs."""
        options = {"workers": 0, "devices": "cpu", **self.execution}
        if data_dir is not None:
            options["data_dir"] = data_dir
        where = "[execution] of the recipe"
        named = with_auto(options, lambda key, value: f"{key} = {value} in {where}")
        execution = convert(Execution, named, where)
        selected(execution.track)
        return execution


def _tables_of(point: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    for key, value in point.items():
        table, dot, name = key.partition(".")
        if table not in TABLES or not dot:
            raise UsageError(f"grid key {key!r}: write experiment.KEY, hyperparameters.KEY or codecs.FIELD")
        result.setdefault(table, {})[name] = value
    return result


def _points(axes: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for point in itertools.product(*axes.values()):
        yield dict(zip(axes, point, strict=True))


@dataclass(frozen=True)
class Row:
    """A variant at a point of the grids."""

    variant: Variant
    point: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The label with the point; the folder of a file that is beside the recipe is left out."""
        texts = {key.partition(".")[2]: str(value) for key, value in self.point.items()}
        at = ", ".join(f"{key} {plugins.short(v) if v[:1] == '/' else v}" for key, v in texts.items())
        return f"{self.variant.label} ({at})" if at else self.variant.label

    def fits(self, part: Part) -> bool:
        """Return True if a part of the page shows the row."""
        selected = not part.only or self.variant.label in part.only
        return selected and all(self.point.get(key, value) == value for key, value in part.at.items())


class Task(msgspec.Struct, frozen=True):
    """One run of a sweep. id: the name of its folder (`id_of`). name: for messages."""

    id: str
    name: str
    experiment: Experiment


class Trial(Task, frozen=True, kw_only=True):
    """A run of a recipe's row."""

    row: Row
    seed: int


def id_of(e: Experiment) -> str:
    """Return the algorithm, and a digest of all that determines the results but code and versions."""
    described = asdict(e)
    for key in described.keys() - set(FIRST):
        if described[key] == getattr(DEFAULTS, key):
            del described[key]
    asks_all = e.participation.startswith("full") or bool(e.asynchronous)
    described["hyperparameters"] = {
        name: value.replace("|S|", "K") if asks_all and isinstance(value, str) else value  # the same bits
        for name, value in described["hyperparameters"].items()
        if (last := name.rpartition(".")[2]) not in LATER or LATER[last] != value
    }
    for key, choice in described.items():  # the content, not the path, identifies a user's file
        if key == "model":
            described[key] = model_specs.fingerprint(choice)
        elif key == "partition" and partition_specs.is_file(choice):
            described[key] = partition_specs.fingerprint(choice)
        elif isinstance(choice, str) and plugins.is_spec(choice) and not choice.startswith(traces.PREFIX):
            described[key] = plugins.fingerprint(choice)
    if described.get("codecs"):
        described["codecs"] = {
            field: plugins.fingerprint(codec) if plugins.is_spec(codec) else codec
            for field, codec in described["codecs"].items()
        }
    text = json.dumps(described, sort_keys=True)
    return f"{plugins.short(e.algo)}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def one_numerics(numerics: Collection[str]) -> str:
    """Return the numerics (native or portable) of all runs of a sweep; raise UsageError if they differ."""
    if len(numerics) > 1:
        raise UsageError("a sweep's runs share one import of torch: numerics is native or portable for all")
    return next(iter(numerics), "native")
