"""Options of the command line, generated from the fields of Experiment and Execution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import click
from msgspec import Meta

from fedsim.experiment import Experiment
from launch.config import Execution

Command = Callable[..., None]


_FILES: tuple[Callable[[Command], Command], ...] = (
    click.option(
        "--preset", metavar="NAME", help="Data, and hyperparameters that fit it (fedsim list presets)."
    ),
    click.option(
        "--config",
        metavar="FILE",
        help="A TOML file, a recipe's variant (FILE.toml:LABEL), or a run (RUN/manifest.json).",
    ),
)


def configuration(command: Command) -> Command:
    """Give a command all options of an experiment and of its execution, and --config."""
    for generated in reversed([*_options(Experiment), *_options(Execution), *_FILES]):
        command = generated(command)
    return command


def sweep_configuration(command: Command) -> Command:
    """Give a command the options of an experiment but the seed, --config and --preset."""
    for generated in reversed([*_options(Experiment, without=("seed",)), *_FILES]):
        command = generated(command)
    return command


def _options(kind: type, without: Sequence[str] = ()) -> Iterator[Callable[[Command], Command]]:
    """One per field, in the fields' order; an option that is not given is None, or an empty tuple."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint, meta = _annotation(hints[field.name])
        extra = meta.extra or {}
        if extra["name"] == "" or field.name in without:
            continue
        name = extra["name"] or "--" + field.name.replace("_", "-")
        yield click.option(
            name, field.name, help=_help(field, meta), metavar=extra["metavar"] or None, **_values(hint)
        )


def _annotation(hint: Any) -> tuple[Any, Meta]:
    """The type of a field, and its description."""
    if get_origin(hint) is not Annotated:
        raise TypeError(f"{hint} has no description: write Annotated[..., option(...)]")
    kind, *metas = get_args(hint)
    return kind, next(meta for meta in metas if isinstance(meta, Meta))


def _help(field: Field[Any], meta: Meta) -> str:
    """The description, with the default in brackets; a switch has none."""
    shown = (meta.extra or {})["default"]
    if shown is None and isinstance(field.default, bool):
        shown = ""
    default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
    text = default if shown is None else shown
    return f"{meta.description}  [{text}]" if text else str(meta.description)


def _values(hint: Any) -> dict[str, Any]:
    """What click needs to know of a type. Limits are checked with the rest of the configuration."""
    if hint is bool:
        return {"is_flag": True, "default": None}
    if get_origin(hint) is Literal:
        return {"type": click.Choice([value for value in get_args(hint) if value])}
    if hint in (int, float):
        return {"type": hint}
    return {"multiple": True} if get_origin(hint) is Mapping else {}
