"""The arguments of fedsim.run and related functions: types, and conversion to an experiment."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from fedsim import live_objects
from fedsim.errors import UsageError, nearest, unknown
from fedsim.experiment import DEFAULTS, Experiment, convert, dotted, plain_number, resolved_hyperparameters
from fedsim.removed import removed
from launch.configuration import names
from launch.configuration.config import (
    PYTHON,
    Origins,
    Overrides,
    absolute_choice,
    absolute_paths,
    check_execution,
    general_first,
    plain_numbers,
)
from launch.configuration.execution import EXECUTION, Execution

if TYPE_CHECKING:
    import numpy
    import numpy.typing
    from torch import nn

    from fedsim.algorithm import Algorithm
    from fedsim.data.datasets import Dataset
    from fedsim.participation import ClientPopulation, Participation

    IntArray = numpy.typing.NDArray[numpy.int64]
    AlgorithmChoice: TypeAlias = str | type[Algorithm[Any, Any, Any, Any]] | Algorithm[Any, Any, Any, Any]
    DatasetChoice: TypeAlias = str | Dataset | Callable[[], Dataset]
    ModelChoice: TypeAlias = str | Callable[[tuple[int, ...], int], nn.Module]
    PartitionChoice: TypeAlias = (
        str
        | Callable[[numpy.typing.NDArray[Any], int, int], Sequence[IntArray]]
        | Mapping[Any, Sequence[int] | IntArray]
    )
    ParticipationChoice: TypeAlias = (
        str | int | float | Callable[[ClientPopulation], Callable[[int], Participation | Iterable[int]]]
    )

WHERE = "the arguments"
IN_PYTHON = Origins(file=PYTHON)
OBJECTS = ("algo", "dataset", "partition", "model", "participation")
"""Arguments for which a program may pass an object instead of a name."""


class ExperimentOptions(TypedDict, total=False):
    """The fields of fedsim.Experiment, which determine a run's results. A missing field has its default."""

    algo: AlgorithmChoice
    dataset: DatasetChoice
    fraction: float
    inputs: Literal["", "raw", "scaled"]
    partition: PartitionChoice
    model: ModelChoice
    train: str
    freeze: str
    statistics: Literal["", "frozen", "local", "average"]
    clients: int
    rounds: int
    until: float | str
    participation: ParticipationChoice
    seed: int
    eval_every: int
    eval_samples: int
    threads: int
    numerics: Literal["native", "portable", "tf32"]
    hyperparameters: Mapping[str, Any]
    codecs: Mapping[str, str]
    compress: Literal["none", "lossless", "few-bits", "fewest-bits"]
    error_feedback: bool
    evaluate_on: str
    link: str
    compute: str
    deadline: str
    asynchronous: str
    tree: str
    bad_uploads: Literal["stop", "skip", "retry"]
    max_norm: float


class Options(ExperimentOptions, total=False):
    """An experiment and its execution (launch.configuration.execution), which does not change results."""

    workers: int | Literal["auto"]
    lanes: int | Literal["auto"]
    transport: Literal["ipc", "tcp"]
    devices: str
    data_dir: str | Path | None
    out: str | Path | None
    runs: str | Path
    remote_workers: int
    bind: str
    keys: str
    join_within: float
    verify_bytes: bool
    track: str
    allow_drift: bool
    lease: float
    patience: float
    durability: Literal["", "process", "power"]


EXAMPLES = {
    "hyperparameters": "{'local.lr': 0.01}",
    "codecs": "{'up.mean': 'bf16'}",
}


def _by_name(table: Any) -> bool:
    """Return whether a dictionary, and every dictionary in it, has text as keys."""
    return isinstance(table, Mapping) and all(
        isinstance(name, str) and (not isinstance(value, Mapping) or _by_name(value))
        for name, value in table.items()
    )


def resolved(experiment: Experiment | None, options: Mapping[str, Any]) -> tuple[Experiment, Execution]:
    """Return the checked experiment and its execution."""
    check_keywords(options)
    if not isinstance(experiment, Experiment | None):
        raise UsageError(
            f"the first argument is an Experiment, not {experiment!r}"
            + (f"; write algo={experiment!r}" if isinstance(experiment, str) else "")
        )
    base = experiment or DEFAULTS
    values = {f.name: getattr(base, f.name) for f in fields(base)}
    values |= {key: value for key, value in options.items() if key in values}
    for key, example in EXAMPLES.items():
        table = values[key] or {}
        if not _by_name(table):
            raise UsageError(f"{key}={table!r}: write a dictionary by name, such as {key}={example}")
    algo, brought = _algorithm(values["algo"])
    settings = _plain(values["hyperparameters"] or {})
    if experiment is not None:
        settings = {**_plain(experiment.hyperparameters), **settings}
    spelled = {key.rpartition(".")[2]: key for key in brought}
    settings = brought | {spelled.get(key, key): value for key, value in settings.items()}
    values |= {"algo": algo, "hyperparameters": settings}
    values |= {key: text_of(key, values[key]) for key in OBJECTS if key != "algo"}
    values = absolute_paths(plain_numbers(values))
    codecs = general_first(values["codecs"] or {})
    values["codecs"] = {field: absolute_choice(codec) for field, codec in codecs.items()}
    checked = convert(Experiment, values, WHERE, Overrides(origins=IN_PYTHON).named("experiment"))
    names.check(checked)
    names.check_once(checked.algo, checked.hyperparameters, "hyperparameters=")
    return checked, _execution({key: value for key, value in options.items() if key in EXECUTION})


def path_of(name: str, value: Any) -> Path:
    """Return an argument as a path."""
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise UsageError(f"{name}={value!r}: give a path")
    return Path(value)


def list_of(name: str, values: Any, kind: type | UnionType | tuple[type, ...], example: str) -> list[Any]:
    """Return an argument's values, which have to be a list of this kind."""
    many = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping)
    listed = [plain_number(value) for value in values] if many else []
    if not many or any(isinstance(value, bool) or not isinstance(value, kind) for value in listed):
        raise UsageError(f"{name}={values!r}: give a list, such as {name}={example}")
    return listed


def text_of(key: str, value: Any) -> str:
    """Return an argument as command-line text; an object is registered by name (fedsim.live_objects)."""
    if key == "algo":
        return _algorithm(value)[0]
    if key == "participation" and isinstance(value, numbers.Integral):
        return str(int(value))
    if key == "participation" and isinstance(value, numbers.Real):  # a decimal point marks a share
        text = repr(float(value))
        return text if "e" not in text else f"{float(value):.20f}".rstrip("0")
    return value if isinstance(value, str) else live_objects.register(value, key)


def text_in_file(key: str, value: Any) -> Any:
    """Return an argument for a sweep. Objects are refused, because other processes compute the runs."""
    if key not in OBJECTS:
        return str(value) if isinstance(value, Path) else value
    text = text_of(key, value)
    if live_objects.is_live(text):
        raise live_objects.refuse_workers(text, f"{key}=")
    return text


def setting(value: Any) -> str:
    """Return a value as text for --set and --over."""
    return str(value).lower() if isinstance(value, bool) else str(plain_number(value))


def _algorithm(choice: Any) -> tuple[str, dict[str, Any]]:
    """Return an algorithm's text (the name, if built in), and the hyperparameters of an instance."""
    if isinstance(choice, str):
        return choice, {}
    brought: dict[str, Any] = {}
    if is_dataclass(choice) and not isinstance(choice, type):
        choice, brought = type(choice), resolved_hyperparameters(choice)
    ours = isinstance(choice, type) and choice.__module__.startswith("protocols.")
    return (str(choice.name) if ours else live_objects.register(choice, "algo")), brought


def _plain(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters by dotted name, with NumPy numbers as Python numbers."""
    return {key: plain_number(value) for key, value in dotted(hyperparameters)}


def _execution(values: Mapping[str, Any]) -> Execution:
    """Return the execution, by default in this process without workers."""
    texts = {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
    if not texts.get("remote_workers"):
        texts.setdefault("workers", 0)
    elif not texts.get("workers"):
        texts.pop("workers", None)
    return check_execution(texts, Overrides(execution=texts, origins=IN_PYTHON))


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Refuse an unknown keyword. The error suggests the nearest argument, or `hyperparameters`."""
    known = {*EXECUTION, *(f.name for f in fields(Experiment))} - {"device"}
    for key, value in keywords.items():
        if key in known:
            continue
        if gone := removed("option", f"--{key.replace('_', '-')}"):
            raise UsageError(f"{key}=: {gone}")
        hyperparameters = set(names.hyperparameters())
        if nearest(key, known) is None and (name := nearest(key, hyperparameters, 0.9)):
            raise UsageError(
                f"{key}= is no argument; a hyperparameter is set by hyperparameters={{{name!r}: {value!r}}} "
                "(fedsim describe ALGO lists them)"
            )
        raise unknown("argument", key, known, command="help(fedsim.run)")


def check_objects(experiment: Experiment, execution: Execution) -> None:
    """Refuse objects of this process if other processes compute."""
    for key in ("algo", "dataset", "partition", "model"):
        spec = getattr(experiment, key)
        if execution.workers and live_objects.is_live(spec):
            raise live_objects.refuse_workers(spec, f"{key}=")
