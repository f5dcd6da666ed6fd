"""Files that --config reads: a configuration, one variant of a sweep's recipe, or the manifest of a run.

    [experiment]  [hyperparameters]  [codecs]  [execution]         configuration: any of these tables
    docs/recipes/fashion_mnist.toml:fedlap_cov                     recipe: FILE.toml:LABEL of a variant
    runs/20261121-fedlap_cov-0/manifest.json, or the run folder    manifest: its experiment, for a new run

A variant gets the recipe's first seed, so the run equals the sweep's first run of that variant.
This module does not import torch, because options are resolved before the fork server starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedsim.errors import DataError, UsageError, unknown
from fedsim.experiment import Experiment, dotted, read_toml
from fedsim.foreign_files import json_value
from fedsim.user_files import read_text
from launch.configuration.presets import Preset

TABLES = ("experiment", "hyperparameters", "codecs", "execution")
MANIFEST = "manifest.json"
_FILE = re.compile(r"(?<![^:=,+])[^:=,+]+\.[A-Za-z][A-Za-z.]*(?![^:=,+])")
"""The name of a file in a value, such as those of codec.py:NAME or FILE.csv,label=COLUMN,test=FILE.csv."""
Tables = dict[str, dict[str, Any]]


def read_config(text: str) -> Tables:
    """Read the tables of a --config file. Hyperparameters have dotted names."""
    path, label = _split(text)
    if path.is_dir() or path.suffix == ".json":
        return _of_manifest(path / MANIFEST if path.is_dir() else path)
    file = completed(path, read_toml(path))
    if "variant" in file:
        return _of_recipe(path, file, label)
    if label:
        raise UsageError(f"--config {text}: {path} has no [[variant]], so write it without :{label}")
    for table in file:
        if table not in TABLES:
            raise unknown(f"table in {path}:", table, TABLES)
    return _tables(path, file)


def completed(path: Path, tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a TOML file in which a path is absolute if the working folder has no such file and
    the folder of the TOML file has one, and a participation is text."""

    def absolute(match: re.Match[str]) -> str:
        there = path.parent / match[0]
        return str(there.resolve()) if there.is_file() and not Path(match[0]).exists() else match[0]

    def of(value: Any, key: str = "") -> Any:
        if isinstance(value, str):
            return _FILE.sub(absolute, value)
        if isinstance(value, dict):
            return {name: of(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [of(item, key) for item in value]
        asks = key.rpartition(".")[2] == "participation" and type(value) in (int, float)
        return str(value) if asks else value

    named = ("experiment", "codecs", "grid", "repeat")
    result = {key: of(value) if key in named else value for key, value in tables.items()}
    if isinstance(variants := tables.get("variant"), list):
        result["variant"] = [completed(path, v) if isinstance(v, dict) else v for v in variants]
    return result


def merged(*layers: Mapping[str, Mapping[str, Any]]) -> Tables:
    """Merge tables by dotted key; a later layer overrides an earlier one.

    A nested table overrides only the keys that it contains. An overridden key moves to the end, because `lr`
    and `local.lr` may name the same hyperparameter, and the last value applies.
    """
    result: Tables = {table: {} for table in TABLES}
    for layer in layers:
        for table, values in layer.items():
            for key, value in dotted(values):
                result[table].pop(key, None)
                result[table][key] = value
    return result


def _split(text: str) -> tuple[Path, str]:
    """Split FILE.toml:LABEL. A label may contain any character."""
    path, colon, label = text.partition(".toml:")
    return (Path(f"{path}.toml"), label) if colon else (Path(text), "")


def _tables(path: Path, file: Mapping[str, Any]) -> Tables:
    for table in TABLES:
        if not isinstance(file.get(table, {}), dict):
            raise UsageError(f"--config {path}: {table} = {file[table]!r} is no table; write [{table}]")
    return merged({table: file.get(table, {}) for table in TABLES})


def _of_recipe(path: Path, file: Mapping[str, Any], label: str) -> Tables:
    variants = file["variant"] if isinstance(file["variant"], list) else []
    known = {str(v["label"]): v for v in variants if isinstance(v, dict) and "label" in v}
    if not label:
        raise UsageError(
            f"--config {path} is a recipe: name one of its variants, such as "
            f"{path}:{next(iter(known), 'LABEL')} (there are {len(known)}; fedsim sweep runs them all)"
        )
    if label not in known:
        raise unknown(f"variant in {path}:", label, known)
    variant = known[label]
    if grid := {**file.get("grid", {}), **variant.get("grid", {})}:
        raise UsageError(
            f"--config {path}:{label} has a grid over {', '.join(grid)}: run it with fedsim sweep, or "
            "copy the variant into a file of its own with a single value for each of them"
        )
    layers = [_tables(path, file), _tables(path, variant)]
    algo = merged(*layers)["experiment"].get("algo")
    if file.get("preset"):
        layers.insert(0, Preset.read(str(file["preset"])).tables(str(algo)))
    result = merged(*layers)
    result["experiment"].setdefault("seed", next(iter(file.get("seeds", [0])), 0))
    return result


def _of_manifest(path: Path) -> Tables:
    """Return a manifest's experiment without the entries that were derived from data and algorithm."""
    try:
        described = json_value(read_text(path))["experiment"]
        own = {f.name: described[f.name] for f in fields(Experiment) if f.name in described}
    except OSError as e:
        raise UsageError(f"--config {path}: {e.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"--config {path} is no manifest of a run, or it is damaged") from None
    own.pop("device", None)  # --devices determines it
    tables = {name: own.pop(name, None) or {} for name in ("hyperparameters", "codecs")}
    return merged({"experiment": own}, tables)
