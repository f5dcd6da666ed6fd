"""Command line over file over defaults. Paths, in a file too, are relative to the working directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fedsim import plugin, traces
from fedsim.errors import UsageError, unknown
from fedsim.experiment import DEFAULTS, Experiment, convert, parse_setting, read_toml
from launch.execution import Execution

TABLES = ("experiment", "hyperparameters", "codecs", "execution")
EXECUTION = tuple(f.name for f in fields(Execution))
CLIENTS_IN_PROCESS = DEFAULTS.clients


def resolve(options: Mapping[str, Any]) -> tuple[Experiment, Execution]:
    """Errors: UsageError naming the option, key or file that is wrong."""
    given = {key: value for key, value in options.items() if value is not None}
    config = given.pop("config", None)
    file = read_toml(Path(config)) if config else {}
    for table in file:
        if table not in TABLES:
            raise unknown(f"table in {config}:", table, TABLES)
        if not isinstance(file[table], dict):
            raise UsageError(f"--config {config}: {table} = {file[table]!r} is no table; write [{table}]")
    settings = dict(parse_setting(text) for text in given.pop("settings", ()))
    codecs = dict(_pair(text) for text in given.pop("codecs", ()))
    execution = file.get("execution", {}) | {k: given.pop(k) for k in EXECUTION if k in given}
    resolved = convert(Execution, execution, f"[execution] of {config}" if config else "the options")
    if resolved.external_workers:
        resolved = _elsewhere(resolved, "workers" in execution)
    elif resolved.bind:
        raise UsageError("--bind is where --external-workers K come in; workers of this machine need none")
    if resolved.verify_bytes and (resolved.transport != "tcp" or not resolved.workers):
        raise UsageError(
            "--verify-bytes asks the kernel, which counts TCP streams: add --transport tcp and workers"
        )
    values = file.get("experiment", {}) | given
    values["hyperparameters"] = file.get("hyperparameters", {}) | settings
    values["codecs"] = file.get("codecs", {}) | codecs
    for key in ("algo", "model", "dataset"):  # a user's file, wherever a worker's working directory is
        if isinstance(values.get(key), str) and plugin.is_spec(values[key]):
            values[key] = plugin.absolute(values[key])
    if isinstance(values.get("participation"), str):
        values["participation"] = traces.absolute(values["participation"])
    if isinstance(values.get("link"), str) and values["link"].endswith(".csv"):
        values["link"] = str(Path(values["link"]).resolve())
    values.setdefault("clients", resolved.workers or CLIENTS_IN_PROCESS)
    return convert(Experiment, values, f"[experiment] of {config}" if config else "the options"), resolved


def _elsewhere(execution: Execution, workers_given: bool) -> Execution:
    """Errors: UsageError if external workers do not go with the rest."""
    if workers_given and execution.workers != execution.external_workers:
        raise UsageError("--workers starts workers here and --external-workers waits for others: give one")
    if not execution.bind.startswith("tcp://") or ":" not in execution.bind.removeprefix("tcp://"):
        raise UsageError(
            f"--external-workers: --bind {execution.bind!r} is no tcp://ADDRESS:PORT of this machine; "
            "port * lets the system choose"
        )
    return replace(execution, workers=execution.external_workers, transport="tcp")


def _pair(text: str) -> tuple[str, str]:
    field, equals, codec = text.partition("=")
    if not equals:
        raise UsageError(f"--codec {text!r}: give field=codec, such as --codec up.precision=bf16")
    return field, codec
