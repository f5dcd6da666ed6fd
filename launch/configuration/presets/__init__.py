"""Presets: hyperparameters of algorithms for a data set, each with its source and the page of its results.

An algorithm's own defaults were chosen on digits. A preset is a TOML file of this folder: the experiment, and
for each algorithm the hyperparameters that were released by its authors or chosen on held-out training rows.
tests/launch/test_presets.py checks that every entry equals the variant of the recipe whose results the page
shows.

Imports nothing heavy, because options are resolved before the fork server is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fedsim import plugins
from fedsim.errors import unknown
from fedsim.experiment import DEFAULTS, Experiment, convert, dotted, read_toml
from launch.configuration.names import asks_fewer, names as algorithms, of_those_asked

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Settings:
    """One algorithm's hyperparameters, by dotted or short name, and their source.

    variant: the variant's label in the preset's recipe, or in `recipe` if that is set. experiment: the
    settings that differ from the preset's experiment.
    """

    source: str
    variant: str
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    experiment: Mapping[str, Any] = field(default_factory=dict)
    recipe: str = ""
    results: str = ""


@dataclass(frozen=True)
class Preset:
    """One file: a data set with its split and model, and settings by algorithm."""

    name: str
    title: str
    recipe: str
    results: str
    experiment: Mapping[str, Any]
    algorithm: Mapping[str, Settings]

    @staticmethod
    def read(name: str) -> Preset:
        """Read a preset of this folder."""
        if name not in names():
            raise unknown("preset", name, names())
        path = FOLDER / f"{name}.toml"
        return convert(Preset, {"name": name, **read_toml(path, "preset")}, f"preset {path}")

    @property
    def dataset(self) -> str:
        return str(self.experiment["dataset"])

    def tables(self, algo: str) -> dict[str, dict[str, Any]]:
        """Return the tables `experiment` and `hyperparameters` for an algorithm.
        If the preset lacks the algorithm, they contain its data, and the algorithm's defaults apply."""
        settings = self.algorithm.get(algo)
        return {
            "experiment": {**self.experiment, **(settings.experiment if settings else {})},
            "hyperparameters": dict(dotted(settings.hyperparameters)) if settings else {},
        }

    def source_of(self, algo: str) -> str:
        """Say in one line where an algorithm's hyperparameters come from."""
        settings = self.algorithm.get(algo)
        if settings is None:
            return (
                f"preset {self.name} has no hyperparameters for {plugins.short(algo)}: it runs with its "
                f"defaults, which were chosen on {DEFAULTS.dataset}"
            )
        return (
            f"preset {self.name}: {algo}'s hyperparameters are {settings.source}; "
            f"results: {settings.results or self.results}"
        )


@cache
def names() -> tuple[str, ...]:
    """Return the names of all presets, in alphabetical order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def experiment_of(name: str, algo: str, changes: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a preset for an algorithm; `changes` override it (fedsim.preset)."""
    tables = Preset.read(name).tables(algo)
    hyperparameters = tables["hyperparameters"] | dict(dotted(changes.get("hyperparameters", {})))
    values = {**tables["experiment"], "algo": algo, **changes, "hyperparameters": hyperparameters}
    return convert(Experiment, values, "the arguments of preset()")


def remarks(experiment: Experiment, preset: str = "") -> tuple[str, ...]:
    """Return remarks, one line each, on hyperparameters that were left at their defaults.

    The arguments are the same as in `remark`.
    """
    return tuple(line for line in (remark(experiment, preset), step_remark(experiment)) if line)


def step_remark(experiment: Experiment) -> str:
    """Return one line if a step size's default counts all K clients, but rounds have fewer; else ""."""
    known = algorithms("algorithms").get(experiment.algo)
    if known is None or not asks_fewer(experiment):
        return ""
    named = {key.rpartition(".")[2] for key, _ in dotted(experiment.hyperparameters)}
    return "; ".join(
        f"{experiment.algo}'s {name} = {step} counts all {experiment.clients:,} clients, and --participation "
        f"{plugins.short(experiment.participation)} asks fewer in a round: "
        f"--set '{name}={of_those_asked(step)}' counts those"
        for name, step in known.steps.items()
        if name.rpartition(".")[2] not in named
    )


def remark(experiment: Experiment, preset: str = "") -> str:
    """Return one line on the origin of the hyperparameters; "" if there is nothing to say.

    preset: the name of the preset, if one is used.
    """
    if preset:
        return Preset.read(preset).source_of(experiment.algo)
    ours = not plugins.is_spec(experiment.algo)
    if not ours or experiment.hyperparameters or experiment.dataset == DEFAULTS.dataset:
        return ""
    fitting = [f"--preset {name}" for name in names() if Preset.read(name).dataset == experiment.dataset]
    there = f"{' or '.join(fitting)} has settings for" if fitting else "there is no preset for"
    return (
        f"{experiment.algo} runs with its default hyperparameters, which were chosen on {DEFAULTS.dataset}; "
        f"{there} {plugins.short(experiment.dataset)}"
    )
