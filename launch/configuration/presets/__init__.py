"""Presets: hyperparameters of algorithms for a data set, each with its source and the page of its results.

The defaults of algorithms were chosen on digits. A preset is a TOML file in this folder. It has an experiment
and, for each algorithm, hyperparameters that its authors released or that were chosen on held-out training
rows. tests/launch/test_presets.py compares every entry with the recipe that produced the results.

This module does not import torch, because options are resolved before the fork server starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fedsim import plugins, user_files
from fedsim.errors import unknown
from fedsim.experiment import DEFAULTS, Experiment, convert, dotted, read_toml

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Settings:
    """One algorithm's hyperparameters, by dotted or short name, and their source.

    `variant` is the variant's label in `recipe`, or in the preset's recipe if `recipe` is empty. `experiment`
    has the settings that differ from the preset's experiment.
    """

    source: str
    variant: str
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    experiment: Mapping[str, Any] = field(default_factory=dict)
    recipe: str = ""
    results: str = ""


@dataclass(frozen=True)
class Preset:
    """A preset: a data set with its split and model, and settings by algorithm."""

    name: str
    title: str
    recipe: str
    results: str
    experiment: Mapping[str, Any]
    algorithm: Mapping[str, Settings]

    @staticmethod
    def read(name: str) -> Preset:
        """Read a preset from this folder."""
        if name not in names():
            raise unknown("preset", name, names())
        path = FOLDER / f"{name}.toml"
        return convert(Preset, {"name": name, **read_toml(path, "preset")}, f"preset {path}")

    @property
    def dataset(self) -> str:
        return str(self.experiment["dataset"])

    def tables(self, algo: str) -> dict[str, dict[str, Any]]:
        """Return the tables `experiment` and `hyperparameters` for an algorithm.
        If the preset has no settings for the algorithm, `hyperparameters` is empty, and defaults apply."""
        settings = self.algorithm.get(algo)
        return {
            "experiment": {**self.experiment, **(settings.experiment if settings else {})},
            "hyperparameters": dict(dotted(settings.hyperparameters)) if settings else {},
        }

    def source_of(self, algo: str) -> str:
        """Describe the source of an algorithm's hyperparameters in one line."""
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
    """Return the experiment of a preset for an algorithm, overridden by `changes` (fedsim.preset)."""
    tables = Preset.read(name).tables(algo)
    hyperparameters = tables["hyperparameters"] | dict(dotted(changes.get("hyperparameters", {})))
    values = {**tables["experiment"], "algo": algo, **changes, "hyperparameters": hyperparameters}
    return convert(Experiment, values, "the arguments of preset()")


def remarks(experiment: Experiment, preset: str = "") -> tuple[str, ...]:
    """Return one-line remarks on the experiment. `preset` is the preset's name, if any."""
    lines = (remark(experiment, preset), client_remark(experiment))
    return tuple(line for line in lines if line)


def client_remark(experiment: Experiment) -> str:
    """Return a line if a table names its clients, and the partition divides the rows otherwise; else ""."""
    named = [part for part in experiment.dataset.split(",")[1:] if part.startswith("client=")]
    if not named or not user_files.is_table(experiment.dataset) or experiment.partition.startswith("natural"):
        return ""
    return (
        f"{named[0]} is not used, because --partition is {plugins.short(experiment.partition)}; with "
        "--partition natural every client has its own rows"
    )


def remark(experiment: Experiment, preset: str = "") -> str:
    """Return a line on the origin of the hyperparameters, or "". `preset` is the preset's name, if any."""
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
