"""The resolved configuration of a run. Precedence: command line, --config file, preset, defaults.

Relative paths, even those in a file, are relative to the working directory. This module must not
import torch: the fork server is started after the options are resolved, from a process without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from fedsim import model_specs, partition_specs, plugins, traces, user_files
from fedsim.errors import UsageError
from fedsim.experiment import DEFAULTS, Experiment, Named, convert, parse_setting
from fedsim.specs import plain_share
from launch.configuration import names
from launch.configuration.config_files import merged, read_config
from launch.configuration.execution import AUTO, EXECUTION, Execution
from launch.configuration.presets import Preset, remarks
from launch.configuration.target_accuracy import parsed_until
from launch.tracking import selected
from workers.devices import gpus_of
from workers.transport.tcp_address import TcpAddress

PYTHON = "Python"
REPEATED = ("hyperparameters", "codecs")
"""Tables whose keys are set one by one: --set KEY=VALUE, --codec FIELD=CODEC."""


@cache
def options() -> Mapping[str, str]:
    """Return the option of every field of Experiment and Execution."""
    result = {}
    for kind in (Experiment, Execution):
        hints = get_type_hints(kind, include_extras=True)
        for f in fields(kind):
            supplied = (hints[f.name].__metadata__[0].extra or {})["name"]
            result[f.name] = "--" + f.name.replace("_", "-") if supplied is None else supplied
    return result


@dataclass(frozen=True)
class Origins:
    """The origins of the values of an experiment and its execution.

    Attributes:
        typed: The dotted keys on the command line, by table.
        file: The file of --config; "" without --config, and "Python" for arguments in Python.
        written: The keys in that file, by table.
    """

    typed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    file: str = ""
    written: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def named(self, table: str, key: str, value: Any) -> str:
        """Return a key and its value in the form that the user wrote."""
        if self.file == PYTHON:
            return f"{table}={{{key!r}: {value!r}}}" if table in REPEATED else f"{key}={value!r}"
        if self._in_file(table, key):
            return f"[{table}] of {self.file}: {key} = {value!r}"
        text = f"{value:g}" if isinstance(value, float) else f"{value}"
        if table in REPEATED:
            return f"{options()[table]} {key}={text}"
        return f"{options().get(key) or key} {text}"

    def whence(self, table: str, key: str) -> str:
        """Return a text about the place of a key, for an error; "" for the command line."""
        return f"it is in {self.file}" if self._in_file(table, key) else ""

    def _in_file(self, table: str, key: str) -> bool:
        return key not in self.typed.get(table, ()) and key in self.written.get(table, ())


@dataclass(frozen=True)
class Overrides:
    """The values that were set; paths in `experiment` are absolute.

    `origins` tells where each value was set, for errors. `preset` names the preset among the values.
    """

    experiment: Mapping[str, Any] = field(default_factory=dict)
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    codecs: Mapping[str, str] = field(default_factory=dict)
    execution: Mapping[str, Any] = field(default_factory=dict)
    origins: Origins = Origins()
    preset: str = ""

    @staticmethod
    def of(options: Mapping[str, Any]) -> Overrides:
        """Merge the command line, the --config file and the preset, in this order of precedence."""
        supplied = {key: value for key, value in options.items() if value is not None}
        config, preset = supplied.pop("config", None), supplied.pop("preset", "")
        settings = once("--set", map(parse_setting, supplied.pop("hyperparameters", ())))
        codecs = once("--codec", map(_codec_setting, supplied.pop("codecs", ())))
        execution = {key: supplied.pop(key) for key in EXECUTION if key in supplied}
        here = {
            "experiment": supplied,
            "hyperparameters": settings,
            "codecs": general_first(codecs),
            "execution": execution,
        }
        written = read_config(config) if config else {}
        tables = merged(written, here)
        algo = str(tables["experiment"].get("algo", DEFAULTS.algo))
        names.check_once(algo, settings, "--set")
        names.check_once(algo, written.get("hyperparameters", {}), f"{config}: [hyperparameters]")
        if preset:
            tables = merged(Preset.read(preset).tables(algo), tables)
        typed = {table: frozenset(values) for table, values in here.items()}
        there = {table: frozenset(values) for table, values in written.items()}
        origins = Origins(typed, config or "", there)
        _refuse_unset(tables["experiment"], origins)
        return Overrides(
            absolute_paths(plain_numbers(tables["experiment"])),
            tables["hyperparameters"],
            {name: absolute_choice(codec) for name, codec in tables["codecs"].items()},
            tables["execution"],
            origins,
            preset,
        )

    def resolve(self, here: bool = True) -> tuple[Experiment, Execution]:
        """Fill in defaults and check all values. `here` is True if the run uses this machine's GPUs."""
        execution = check_execution(self.execution, self)
        values = {**self.experiment, "hyperparameters": self.hyperparameters, "codecs": self.codecs}
        experiment = convert(Experiment, values, self.where("experiment"), self.named("experiment"))
        names.check(experiment, self.origins.whence)
        if "workers" not in self.execution and not execution.remote_workers:
            usual = (gpus_of(execution.devices) if here else 0) or execution.workers
            execution = replace(execution, workers=min(usual, experiment.clients))
        return experiment, execution

    def remarks(self, experiment: Experiment) -> tuple[str, ...]:
        """Return remarks on hyperparameters that were left at their defaults."""
        return remarks(experiment, self.preset)

    def where(self, table: str) -> str:
        """Return the origin of a table's values, for an error."""
        return f"[{table}] of {self.origins.file}" if self.origins.file else "the options"

    def named(self, table: str) -> Named:
        """Return a function that names, in errors, a hyperparameter, a codec or another setting."""

        def of(key: str, value: Any) -> str:
            inner, dot, name = key.partition(".")
            if dot and inner in ("hyperparameters", "codecs"):
                return self.origins.named(inner, name, value)
            return self.origins.named(table, key, value)

        return of


def check_execution(values: Mapping[str, Any], overrides: Overrides) -> Execution:
    """Build the execution, and check that its settings are compatible."""
    named = overrides.named("execution")
    values = with_auto(values, named)
    execution = convert(Execution, values, overrides.where("execution"), named)
    if execution.out and "runs" in values:
        raise UsageError(
            f"{named('runs', execution.runs)}: the run folder is {named('out', execution.out)}; give one"
        )
    selected(execution.track)
    if execution.remote_workers and execution.workers == AUTO:
        raise UsageError("--workers auto is for workers of this machine alone: give a number")
    if execution.remote_workers:
        execution = _remote(execution, execution.workers if "workers" in values else 0)
    elif execution.bind or execution.keys:
        raise UsageError("--bind and --keys need --remote-workers K; workers of this machine use neither")
    if execution.verify_bytes and (execution.transport != "tcp" or not execution.workers):
        raise UsageError(
            "--verify-bytes asks the kernel, which counts TCP streams: add --transport tcp and workers"
        )
    return execution


def with_auto(values: Mapping[str, Any], named: Named) -> Mapping[str, Any]:
    """Replace `auto` for workers and lanes by AUTO; refuse negative numbers and lanes = 0."""
    values = dict(values)
    for key, least in (("workers", 0), ("lanes", 1)):
        if values.get(key) == "auto":
            values[key] = AUTO
        elif isinstance(values.get(key), int) and values[key] < least:
            raise UsageError(f"{named(key, values[key])}: give a number of at least {least}, or auto")
    return values


def plain_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values that may be percentages: until (78%) and participation (30% of the clients)."""
    result = dict(values)
    if isinstance(result.get("until"), str):
        result["until"] = parsed_until(result["until"])
    if isinstance(result.get("participation"), str):
        result["participation"] = plain_share(result["participation"])
    return result


USERS = ("algo", "dataset", "partition")
"""Keys whose whole value may be FILE.py:NAME. In `model` and `participation`, more may follow it."""


def absolute_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Make paths of files absolute, so that they are valid in any working directory, such as a worker's."""
    absolute = absolute_users_files(values)
    if isinstance(absolute.get("participation"), str):
        absolute["participation"] = traces.absolute(absolute["participation"])
    for name, suffix in (("link", ".csv"), ("tree", ".toml")):
        if isinstance(absolute.get(name), str) and absolute[name].endswith(suffix):
            absolute[name] = str(Path(absolute[name]).resolve())
    return absolute


def absolute_users_files(values: Mapping[str, Any]) -> dict[str, Any]:
    """Make paths of a user's algorithm, model, data, partition and participation absolute."""
    changes = {key: absolute_choice(values[key]) for key in USERS if isinstance(values.get(key), str)}
    if isinstance(values.get("model"), str):
        changes["model"] = model_specs.absolute(values["model"])
    spec = values.get("participation")
    if isinstance(spec, str) and not spec.startswith(traces.PREFIX):
        base, modifiers = traces.split(spec)
        changes["participation"] = absolute_choice(base) + modifiers
    spec = values.get("dataset")
    if isinstance(spec, str) and user_files.is_table(spec):
        changes["dataset"] = user_files.absolute_table(spec)
    spec = values.get("partition")
    if isinstance(spec, str) and partition_specs.is_file(spec):
        changes["partition"] = partition_specs.absolute(spec)
    return {**values, **changes}


def absolute_choice(choice: str) -> str:
    """Make the path in FILE.py:NAME absolute; return any other choice unchanged."""
    return plugins.absolute(choice) if isinstance(choice, str) and plugins.is_spec(choice) else choice


def _refuse_unset(experiment: Mapping[str, Any], origins: Origins) -> None:
    """Refuse values of rounds and eval_samples that internally mean "as the algorithm sets it"."""
    for key, least, otherwise in (("rounds", 1, ""), ("eval_samples", 0, "; 0: none")):
        value = experiment.get(key)
        if isinstance(value, int) and value < least:
            supplied = origins.named("experiment", key, value)
            raise UsageError(f"{supplied}: must be a whole number of at least {least}{otherwise}")


def _remote(execution: Execution, here: int) -> Execution:
    """Return the execution over tcp, with `here` workers of this machine added to the remote workers."""
    if not execution.bind:
        raise UsageError(
            f"--remote-workers {execution.remote_workers} needs an address for them: "
            "add --bind tcp://ADDRESS:PORT, an address of this machine"
        )
    TcpAddress.to_listen(execution.bind)
    return replace(execution, workers=here + execution.remote_workers, transport="tcp")


def once(option: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the KEY=VALUE pairs of a repeatable option as a table; raise UsageError if a key is repeated."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise UsageError(f"{option} {key}=: the key is given twice; give it once")
        result[key] = value
    return result


def general_first(codecs: Mapping[str, str]) -> dict[str, str]:
    """Sort codecs so that those of one direction (up.mean) follow and override those of both (mean)."""
    return dict(sorted(codecs.items(), key=lambda item: "." in item[0]))


def _codec_setting(text: str) -> tuple[str, str]:
    """Split a value FIELD=CODEC of --codec."""
    name, equals, codec = text.partition("=")
    if not equals:
        raise UsageError(f"--codec {text!r}: give field=codec, such as --codec up.precision=bf16")
    return name, codec
