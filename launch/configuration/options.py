"""Options of the command line, generated from the fields of Experiment and Execution."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import click
from msgspec import Meta

from fedsim.errors import UsageError, nearest
from fedsim.experiment import Experiment
from launch.commands.errors import Command
from launch.configuration import completion, names
from launch.configuration.execution import Execution
from launch.configuration.target_accuracy import parsed_until

Function = Callable[..., None]

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "What is learned": (
        "dataset",
        "data_dir",
        "fraction",
        "inputs",
        "partition",
        "clients",
        "model",
        "train",
        "freeze",
        "seed",
    ),
    "The algorithm": ("algo", "hyperparameters", "rounds", "threads", "numerics", "preset", "config"),
    "On the wire": ("codecs", "error_feedback", "bad_uploads", "max_norm", "transport", "verify_bytes"),
    "Participation and the virtual clock": (
        *("participation", "link", "compute", "deadline", "asynchronous", "tree"),
    ),
    "Evaluation": ("eval_every", "eval_samples", "evaluate_on", "until"),
    "How it is carried out": (
        *("workers", "devices", "remote_workers", "bind", "keys", "join_within", "lease", "patience"),
        *("allow_drift", "durability", "edge_processes"),
    ),
    "On an engine": ("on", "nodes", "gpus_per_worker", "image", "engine_options", "dry_run"),
    "Output": ("out", "keep_uploads", "track", "quiet", "json", "as_json"),
}
"""The options of launch, plan and resume in the order of the help. Others stand under "Other options"."""

USUAL = frozenset(
    {"algo", "hyperparameters", "preset", "dataset", "data_dir", "model", "clients", "rounds", "seed"}
    | {"participation", "codecs", "until", "workers", "out", "quiet"}
)
"""The options of an experiment that --help shows; --help-all shows the others, too."""
_EVERY = "fedsim.every_option"

_FILES: tuple[Callable[[Function], Function], ...] = (
    click.option(
        "--preset",
        metavar="NAME",
        help="Data, and hyperparameters that fit it (fedsim list presets).",
        shell_complete=completion.preset_names,
    ),
    click.option(
        "--config",
        metavar="FILE",
        help="A TOML file, a recipe's variant (FILE.toml:LABEL), or a run (RUN/manifest.json).",
    ),
)


PLANNED = frozenset(
    {
        "algo",
        "dataset",
        "fraction",
        "partition",
        "model",
        "train",
        "freeze",
        "clients",
        "rounds",
        "participation",
        "seed",
    }
    | {"hyperparameters", "codecs", "data_dir", "config", "until", "tree"}
)
"""What the bytes of a plan depend on. plan takes the others, too: any `launch` can be planned."""

RESUMED = frozenset(
    {
        "rounds",
        "until",
        "data_dir",
        "config",
        "allow_drift",
        "keep_uploads",
        "track",
        "verify_bytes",
        "transport",
        "workers",
        "devices",
    }
    | {"remote_workers", "bind", "keys", "join_within", "lease", "patience", "durability"}
    | {"edge_processes"}
)
"""What may change when a run goes on. resume takes the others, too, to say that they may not."""


class Configured(Command):
    """A command with the options of a configuration: its help has sections, and --lr is told --set lr."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The parameters, with --help and --help-all."""
        return [*super().get_params(ctx), _HELP_ALL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the usual options, or all of them by section."""
        left = {p.name: p for p in self.get_params(ctx) if isinstance(p, click.Option)}
        if not ctx.meta.get(_EVERY):
            unusual = {name for members in SECTIONS.values() for name in members} - USUAL
            usual = [p.get_help_record(ctx) for name, p in left.items() if name not in unusual]
            with formatter.section("Usual options"):
                formatter.write_dl([record for record in usual if record is not None])
            return
        sections = [
            (title, [left.pop(name) for name in members if name in left])
            for title, members in SECTIONS.items()
        ]
        for title, parameters in (*sections, ("Other options", list(left.values()))):
            records = [record for p in parameters if (record := p.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and say of an option that is the name of a hyperparameter how that is written."""
        texts = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as e:
            written, known = e.option_name.lstrip("-").replace("-", "_"), set(names.hyperparameters())
            options = {option.lstrip("-") for p in self.get_params(ctx) for option in p.opts}
            near = nearest(written, options) if written not in known else None
            name = nearest(written, known, 0.9) if near is None else None
            if name is None:
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


def configuration(command: Function) -> Function:
    """Give a command all options of an experiment and of its execution, and --config."""
    return configuration_of()(command)


def configuration_of(
    shown: frozenset[str] | None = None, default: str | None = None
) -> Callable[[Function], Function]:
    """Give a command these options, some of which its help may leave out.

    Args:
        shown: The fields whose options the help shows; all by default.
        default: What the help says of every default; by default, the default itself.
    """
    options: list[Callable[[Function], Function]] = [
        *_options(Experiment, shown, default),
        *_options(Execution, shown, default),
        *_FILES,
    ]

    def decorated(command: Function) -> Function:
        for generated in reversed(options):
            command = generated(command)
        return command

    return decorated


def sweep_configuration(command: Function) -> Function:
    """Give a command the options of an experiment but the seed, --config and --preset."""
    for generated in reversed([*_options(Experiment, without=("seed",)), *_FILES]):
        command = generated(command)
    return command


def _options(
    kind: type, shown: frozenset[str] | None = None, default: str | None = None, without: Sequence[str] = ()
) -> Iterator[Callable[[Function], Function]]:
    """One per field, in the fields' order; an option that is not given is None, or an empty tuple."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint, meta = _annotation(hints[field.name])
        extra = meta.extra or {}
        if extra["name"] == "" or field.name in without:
            continue
        name = extra["name"] or "--" + field.name.replace("_", "-")
        values = {"type": PARSED[field.name]} if field.name in PARSED else _values(hint)
        yield click.option(
            name,
            field.name,
            help=_help(field, meta, default),
            metavar=extra["metavar"] or None,
            hidden=shown is not None and field.name not in shown,
            shell_complete=completion.OF_FIELDS.get(field.name),
            **values,
        )


def _workers(text: str) -> int | str:
    """Read a number of workers, or auto.

    Raises:
        UsageError: for another text.
    """
    if text == "auto":
        return text
    if not text.isdigit():
        raise UsageError(f"--workers {text}: give a number of at least 0, or auto")
    return int(text)


PARSED: Mapping[str, Callable[[str], Any]] = {"until": parsed_until, "workers": _workers}
"""Fields whose texts are not those of their type."""


def _annotation(hint: Any) -> tuple[Any, Meta]:
    """The type of a field, and its description."""
    if get_origin(hint) is not Annotated:
        raise TypeError(f"{hint} has no description: write Annotated[..., option(...)]")
    kind, *metas = get_args(hint)
    return kind, next(meta for meta in metas if isinstance(meta, Meta))


def _help(field: Field[Any], meta: Meta, general: str | None) -> str:
    """The description, with the default in brackets; a switch has none."""
    shown = (meta.extra or {})["default"]
    if shown is None and isinstance(field.default, bool):
        shown = ""
    default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
    text = default if shown is None else shown
    if general is not None and not isinstance(field.default, bool):
        text = general
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
