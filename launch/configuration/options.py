"""Options of the command line, generated from the fields of Experiment and Execution."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import click
from msgspec import Meta

from fedsim.errors import UsageError, nearest
from fedsim.experiment import Experiment
from fedsim.removed import removed
from launch.commands.errors import Command
from launch.configuration import names
from launch.configuration.execution import Execution
from launch.configuration.target_accuracy import parsed_until

Function = Callable[..., None]

SECTIONS = {
    "data": "What is learned",
    "algorithm": "The algorithm",
    "wire": "On the wire",
    "schedule": "Participation and the virtual clock",
    "evaluation": "Evaluation",
    "execution": "Execution",
    "engine": "On an engine",
    "output": "Output",
}
"""The sections of --help-all, in order. Options without a section are under "Other options"."""
NOT_FIELDS = {
    **dict.fromkeys(("preset", "config"), "algorithm"),
    **dict.fromkeys(("on", "nodes", "gpus_per_worker", "image", "engine_options", "dry_run"), "engine"),
    **dict.fromkeys(("quiet", "as_json"), "output"),
}
"""The sections of options that are no fields of an experiment or an execution."""
USUAL = ("preset", "quiet")
"""Options of NOT_FIELDS that --help shows."""
_EVERY = "fedsim.every_option"

_FILES: tuple[Callable[[Function], Function], ...] = (
    click.option(
        "--preset",
        metavar="NAME",
        help="Data, and hyperparameters that fit it (fedsim list presets).",
    ),
    click.option(
        "--config",
        metavar="FILE",
        help="A TOML file, a recipe's variant (FILE.toml:LABEL), or a run (RUN/manifest.json).",
    ),
)


class Configured(Command):
    """A command with configuration options. Its help has sections; an error about --lr suggests --set lr."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, including --help and --help-all."""
        return [*super().get_params(ctx), _HELP_ALL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the usual options, or all of them by section."""
        left = {str(p.name): p for p in self.get_params(ctx) if isinstance(p, click.Option)}
        if not ctx.meta.get(_EVERY):
            titles = {"Usual options": [name for name in left if _is_usual(name)]}
        else:
            titles = {title: [n for n in left if section(n) == key] for key, title in SECTIONS.items()}
            titles["Other options"] = [name for name in left if not section(name)]
        for title, members in titles.items():
            records = [record for name in members if (record := left[name].get_help_record(ctx)) is not None]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. If an unknown option names a hyperparameter, the error suggests --set."""
        texts = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as e:
            written, known = e.option_name.lstrip("-").replace("-", "_"), set(names.hyperparameters())
            options = {option.lstrip("-") for p in self.get_params(ctx) for option in p.opts}
            near = nearest(written, options) if written not in known else None
            name = nearest(written, known, 0.9) if near is None else None
            if name is None or removed("option", e.option_name):
                raise
            behind = [v for o, v in itertools.pairwise(texts) if o == e.option_name]
            behind += [text.partition("=")[2] for text in texts if text.startswith(f"{e.option_name}=")]
            value = next(iter(behind), "VALUE")
            raise click.UsageError(
                f"{e.option_name} is no option. A hyperparameter is set by --set {name}={value} "
                "(fedsim describe ALGO lists them)",
                ctx,
            ) from None


def _show_every_option(ctx: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[_EVERY] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_every_option,
    help="Show every option, and exit.",
)


@cache
def _described() -> Mapping[str, Mapping[str, Any]]:
    """Return the annotations of all fields of an experiment and its execution."""
    hints = (get_type_hints(kind, include_extras=True) for kind in (Experiment, Execution))
    return {name: _annotation(hint)[1].extra or {} for of_kind in hints for name, hint in of_kind.items()}


def section(name: str) -> str:
    """Return the section of an option; '' for an option that only this command has."""
    return str(_described().get(name, {}).get("section") or NOT_FIELDS.get(name, ""))


def _is_usual(name: str) -> bool:
    return name in USUAL or not section(name) or "usual" in _described().get(name, {}).get("shown", ())


def configuration_of(verb: str = "", default: str | None = None) -> Callable[[Function], Function]:
    """Give a command the options of an experiment and of its execution, --config and --preset.

    A command accepts all options, so that an error can name an unsuitable one. The help of the verbs "plan"
    and "resume" shows only the fields that list the verb (fedsim.experiment.option). "sweep" has only the
    experiment's options, except the seed. `default`, if given, replaces all defaults in the help.
    """
    kinds = (Experiment,) if verb == "sweep" else (Experiment, Execution)
    shown = verb if verb in ("plan", "resume") else ""
    options = [option for kind in kinds for option in _options(kind, shown, default, verb == "sweep")]

    def decorated(command: Function) -> Function:
        for generated in reversed([*options, *_FILES]):
            command = generated(command)
        return command

    return decorated


def _options(
    kind: type, shown: str, default: str | None, sweep: bool
) -> Iterator[Callable[[Function], Function]]:
    """Yield one option per field, in order. A missing option is None, or an empty tuple."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint, meta = _annotation(hints[field.name])
        extra = meta.extra or {}
        if extra["name"] == "" or (sweep and field.name == "seed"):
            continue
        name = extra["name"] or "--" + field.name.replace("_", "-")
        values = {"type": PARSED[field.name]} if field.name in PARSED else _values(hint)
        yield click.option(
            name,
            field.name,
            help=_help(field, meta, default),
            metavar=extra["metavar"] or None,
            hidden=bool(shown) and shown not in extra["shown"],
            **values,
        )


def _number_or_auto(option: str, least: int) -> Callable[[str], int | str]:
    """Return a parser of numbers of at least `least`, and of auto."""

    def parse(text: str) -> int | str:
        if text == "auto":
            return text
        if not text.isdigit() or int(text) < least:
            raise UsageError(f"{option} {text}: give a number of at least {least}, or auto")
        return int(text)

    return parse


PARSED: Mapping[str, Callable[[str], Any]] = {
    "until": parsed_until,
    "workers": _number_or_auto("--workers", 0),
    "lanes": _number_or_auto("--lanes", 1),
}
"""Parsers of fields whose text, such as auto, is not a value of the field's type."""


def _annotation(hint: Any) -> tuple[Any, Meta]:
    """Return the type and the description of a field."""
    if get_origin(hint) is not Annotated:
        raise TypeError(f"{hint} has no description: write Annotated[..., option(...)]")
    kind, *metas = get_args(hint)
    return kind, next(meta for meta in metas if isinstance(meta, Meta))


def _help(field: Field[Any], meta: Meta, general: str | None) -> str:
    """Return the help of an option, with its default in brackets unless it is a switch."""
    shown = (meta.extra or {})["default"]
    if shown is None and isinstance(field.default, bool):
        shown = ""
    default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
    text = default if shown is None else shown
    if general is not None and not isinstance(field.default, bool):
        text = general
    return f"{meta.description}  [{text}]" if text else str(meta.description)


def _values(hint: Any) -> dict[str, Any]:
    """Return click's arguments for a type. Limits are checked later, with the whole configuration."""
    if hint is bool:
        return {"is_flag": True, "default": None}
    if get_origin(hint) is Literal:
        return {"type": click.Choice([value for value in get_args(hint) if value])}
    if hint in (int, float):
        return {"type": hint}
    return {"multiple": True} if get_origin(hint) is Mapping else {}
