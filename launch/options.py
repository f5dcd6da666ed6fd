"""Command line over file over defaults. Paths, in a file too, are relative to the working directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fedsim import plugins, traces
from fedsim.errors import UsageError, unknown
from fedsim.experiment import DEFAULTS, Experiment, convert, dotted, parse_setting, read_toml
from launch.execution import Execution

TABLES = ("experiment", "hyperparameters", "codecs", "execution")
EXECUTION = tuple(f.name for f in fields(Execution))
CLIENTS_IN_PROCESS = DEFAULTS.clients
USERS = ("algo", "model", "dataset", "partition")
"""Keys whose value may be FILE.py:NAME as it stands; of participation there may be modifiers behind it."""


@dataclass(frozen=True)
class Given:
    """What the command line says over what the file says, paths made absolute; where: for errors."""

    experiment: dict[str, Any]
    hyperparameters: dict[str, Any]
    codecs: dict[str, str]
    execution: dict[str, Any]
    config: str | None

    @staticmethod
    def of(options: Mapping[str, Any]) -> Given:
        """See below.

        Raises:
            UsageError: naming the option, key or file that is wrong.
        """
        supplied = {key: value for key, value in options.items() if value is not None}
        config = supplied.pop("config", None)
        file = read_toml(Path(config)) if config else {}
        for table in file:
            if table not in TABLES:
                raise unknown(f"table in {config}:", table, TABLES)
            if not isinstance(file[table], dict):
                raise UsageError(f"--config {config}: {table} = {file[table]!r} is no table; write [{table}]")
        settings = dict(parse_setting(text) for text in supplied.pop("settings", ()))
        codecs = dict(_pair(text) for text in supplied.pop("codecs", ()))
        execution = file.get("execution", {}) | {k: supplied.pop(k) for k in EXECUTION if k in supplied}
        return Given(
            absolute_paths(file.get("experiment", {}) | supplied),
            dict(dotted(file.get("hyperparameters", {}))) | settings,
            {field: absolute_choice(codec) for field, codec in (file.get("codecs", {}) | codecs).items()},
            execution,
            config,
        )

    def where(self, table: str) -> str:
        """For errors."""
        return f"[{table}] of {self.config}" if self.config else "the options"


def resolve(options: Mapping[str, Any]) -> tuple[Experiment, Execution]:
    """See below.

    Raises:
        UsageError: naming the option, key or file that is wrong.
    """
    supplied = Given.of(options)
    execution = check_execution(supplied.execution, supplied)
    values = {"clients": execution.workers or CLIENTS_IN_PROCESS} | supplied.experiment
    values |= {"hyperparameters": supplied.hyperparameters, "codecs": supplied.codecs}
    return convert(Experiment, values, supplied.where("experiment")), execution


def check_execution(values: Mapping[str, Any], supplied: Given) -> Execution:
    """How a run is carried out.

    Raises:
        UsageError: if parts of it do not go together.
    """
    execution = convert(Execution, values, supplied.where("execution"))
    if execution.remote_workers:
        execution = _remote(execution, "workers" in supplied.execution)
    elif execution.bind:
        raise UsageError("--bind is where --remote-workers K come in; workers of this machine need none")
    if execution.verify_bytes and (execution.transport != "tcp" or not execution.workers):
        raise UsageError(
            "--verify-bytes asks the kernel, which counts TCP streams: add --transport tcp and workers"
        )
    return execution


def absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """A user's files, wherever a worker's working directory is."""
    values = absolute_users_files(values)
    if isinstance(values.get("participation"), str):
        values["participation"] = traces.absolute(values["participation"])
    if isinstance(values.get("link"), str) and values["link"].endswith(".csv"):
        values["link"] = str(Path(values["link"]).resolve())
    return values


def absolute_users_files(values: dict[str, Any]) -> dict[str, Any]:
    """FILE.py:NAME of a user's algorithm, data and schedule, meaning the same in every working directory."""
    changes = {key: absolute_choice(values[key]) for key in USERS if isinstance(values.get(key), str)}
    spec = values.get("participation")
    if isinstance(spec, str) and not spec.startswith(traces.PREFIX):
        base, *modifiers = traces.split(spec)
        changes["participation"] = "+".join([absolute_choice(base), *modifiers])
    return {**values, **changes}


def absolute_choice(choice: str) -> str:
    """FILE.py:NAME, meaning the same in every working directory; anything else as it is."""
    return plugins.absolute(choice) if isinstance(choice, str) and plugins.is_spec(choice) else choice


def _remote(execution: Execution, workers_given: bool) -> Execution:
    """See below.

    Raises:
        UsageError: if remote workers do not go with the rest.
    """
    if workers_given and execution.workers != execution.remote_workers:
        raise UsageError("--workers starts workers here and --remote-workers waits for others: give one")
    if not execution.bind.startswith("tcp://") or ":" not in execution.bind.removeprefix("tcp://"):
        raise UsageError(
            f"--remote-workers: --bind {execution.bind!r} is no tcp://ADDRESS:PORT of this machine; "
            "port * lets the system choose"
        )
    return replace(execution, workers=execution.remote_workers, transport="tcp")


def _pair(text: str) -> tuple[str, str]:
    field, equals, codec = text.partition("=")
    if not equals:
        raise UsageError(f"--codec {text!r}: give field=codec, such as --codec up.precision=bf16")
    return field, codec
