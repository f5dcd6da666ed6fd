"""The names from which users choose, by kind.

They are read from names.json, because importing the registries and torch takes seconds. `python -m
launch.configuration.write_names` writes that file, and tests/launch/test_names.py compares it with the
registries.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedsim import event_rules, plugins, traces
from fedsim.errors import UsageError, unknown
from fedsim.experiment import Experiment, dotted
from fedsim.model_specs import ModelSpec
from fedsim.partition_specs import PartitionSpec
from fedsim.specs import Form, number, parse, split_modifiers
from fedsim.user_files import is_table

FILE = Path(__file__).with_name("names.json")
KINDS = ("algorithms", "datasets", "models", "partitions", "codecs", "compress", "schedules")
GROUPS = {"papers": "of the five papers, with their baselines", "related": "of other papers, for comparison"}
"""The headings of the groups of algorithms (protocols.PAPERS and protocols.RELATED)."""


@dataclass(frozen=True)
class Defaults:
    """The defaults that an experiment takes from an algorithm given by name only.

    Attributes:
        hyperparameters: The values by dotted name.
    """

    hyperparameters: Mapping[str, Any]
    default_model: str
    default_rounds: int
    eval_samples: int
    centralised: bool


@dataclass(frozen=True)
class Name:
    """A name that users can choose: its syntax, and its line in `fedsim list`.

    Attributes:
        usage: The name with all its arguments.
        cells: The cells of the line, one per column.
        form: The syntax of its arguments, for parsing.
        hyperparameters: The names of an algorithm's hyperparameters in --set.
        fields: The fields of an algorithm's messages.
        once: The fields that an algorithm sends once per client, as (exchange, direction, field).
        defaults: An algorithm's defaults for an experiment.
        url: The address of an algorithm's paper.
        differs: The differences of an algorithm from its paper; "" if there are none.
        group: The group of an algorithm, a key of GROUPS.
    """

    usage: str
    cells: tuple[str, ...]
    form: Form
    hyperparameters: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    once: tuple[tuple[int, str, str], ...] = ()
    defaults: Defaults | None = None
    url: str = ""
    differs: str = ""
    group: str = ""


@cache
def _file() -> Mapping[str, Any]:
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


@cache
def names(kind: str) -> Mapping[str, Name]:
    """Return all names of a kind (one of KINDS), in the order of `fedsim list`."""
    return {
        name: Name(
            entry["usage"],
            tuple(entry["cells"]),
            Form(name, tuple(entry.get("arguments", ())), entry.get("optional", 0), entry.get("help", "")),
            tuple(entry.get("hyperparameters", ())),
            tuple(entry.get("fields", ())),
            tuple((exchange, side, field) for exchange, side, field in entry.get("once", ())),
            Defaults(**entry["defaults"]) if "defaults" in entry else None,
            entry.get("url", ""),
            entry.get("differs", ""),
            entry.get("group", ""),
        )
        for name, entry in _file()[kind].items()
    }


def heads(kind: str) -> tuple[str, ...]:
    """Return the column heads of `fedsim list KIND`; () for two columns without heads."""
    return {
        "algorithms": ("algorithm", "down", "up", "paper"),
        "compress": ("--compress", "codecs", "bits of mean and precision", "measured loss"),
    }.get(kind, ())


def check(experiment: Experiment, whence: Callable[[str, str], str] = lambda table, key: "") -> None:
    """Refuse unknown names before anything is imported; other values are checked where they are used.

    `whence(table, key)` returns a text about the place of the key, for errors.
    """
    check_name("algorithms", experiment.algo)
    if not is_table(experiment.dataset):
        check_name("datasets", experiment.dataset)
    check_name("partitions", PartitionSpec.parse(experiment.partition).split)
    if experiment.model:
        _check_model(experiment.model)
    check_schedule(experiment.participation)
    for codec in experiment.codecs.values():
        check_name("codecs", codec)
    if plugins.is_spec(experiment.algo):
        return
    algorithm = names("algorithms")[experiment.algo]
    for key, _ in dotted(experiment.hyperparameters):
        if key not in algorithm.hyperparameters:
            where, command = f"hyperparameter of {experiment.algo}:", f"fedsim describe {experiment.algo}"
            error = unknown(where, key, algorithm.hyperparameters, command=command)
            if there := whence("hyperparameters", key):
                raise UsageError(
                    f"{error}; {there}: hyperparameters are one algorithm's own, so leave --algo out, or "
                    "take a --config without this key"
                )
            raise error
    every = {field for known in names("algorithms").values() for field in known.fields}
    for key in experiment.codecs:
        field = key.rpartition(".")[2]
        if not experiment.hyperparameters and field not in every:  # otherwise, Messages.codecs checks it
            raise unknown("message field", field, algorithm.fields)


def check_once(algo: str, hyperparameters: Iterable[str], where: str) -> None:
    """Refuse a hyperparameter that is set twice, by its short and by its dotted name.

    Short names of a user's algorithm cannot be resolved here. `where` is the origin of the names, for errors.
    """
    known = names("algorithms").get(algo)
    full: dict[str, str] = {}
    for key in hyperparameters:
        dotted_names = [name for name in known.hyperparameters if name.endswith(f".{key}")] if known else []
        name = dotted_names[0] if len(dotted_names) == 1 else key
        if name in full:
            raise UsageError(f"{where}: {full[name]} and {key} are the same hyperparameter; give it once")
        full[name] = key


_LABELS = {
    "algorithms": "algorithm",
    "datasets": "data set",
    "models": "model",
    "partitions": "partition",
    "codecs": "codec",
    "schedules": "schedule",
}


def check_name(kind: str, spec: str) -> None:
    """Check the name and the number of arguments of a spec NAME[:ARGUMENTS]; accept users' files."""
    if plugins.is_spec(spec):
        return
    if kind in ("algorithms", "models"):
        if spec not in names(kind):
            raise unknown(_LABELS[kind], spec, names(kind))
        return
    parse(spec, _LABELS[kind], _forms(kind))


def _check_model(text: str) -> None:
    """Check that a model's name, arguments and files exist."""
    spec = ModelSpec.parse(text)
    if spec.timm is None:
        check_name("models", spec.base)
    spec.files()


def check_schedule(spec: str) -> None:
    """Check the name and the modifiers of a schedule."""
    spec, *_ = event_rules.split(spec)
    if spec.startswith(traces.PREFIX) or plugins.is_spec(traces.split(spec)[0]):
        return
    head, _ = split_modifiers(spec, "--participation", traces.CHANCES, others=event_rules.FORMS)
    if math.isnan(number(head.removesuffix("%"))):
        parse(head, "schedule", _forms("schedules"))


def _forms(kind: str) -> Mapping[str, Form]:
    return {name: known.form for name, known in names(kind).items() if not name.startswith("...")}


def hyperparameters() -> Iterable[str]:
    """Return the names of all algorithms' hyperparameters."""
    return {name for known in names("algorithms").values() for name in known.hyperparameters}
