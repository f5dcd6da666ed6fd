"""fedsim list: print launch.configuration.names, which is faster than importing the named objects."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Column, Table

from launch.commands.errors import Command
from launch.commands.shared import json_option
from launch.configuration import names, presets
from launch.terminal import console, print_json, print_table


@click.command("list", cls=Command)
@click.argument(
    "what",
    type=click.Choice(["algorithms", "datasets", "models", "partitions", "codecs", "schedules", "presets"]),
)
@json_option
def list_(what: str, as_json: bool) -> None:
    """List algorithms, datasets, models, partitions, codecs, schedules or presets."""
    print_list(what, as_json)


def print_list(kind: str, as_json: bool = False) -> None:
    """Print all names of a kind (one of launch.configuration.names.KINDS), or the presets."""
    if as_json:
        return print_json(to_json(kind))
    if kind == "presets":
        return _show_presets()
    heads, known = names.heads(kind), names.names(kind).values()
    columns = len(next(iter(known)).cells)
    for number, group in enumerate(dict.fromkeys(name.group for name in known)):
        if number:
            console().print()
        table = Table(show_header=bool(heads), header_style="bold", title=names.GROUPS.get(group))
        for column in range(columns + 1):
            style, label = "" if column else "bold", heads[column] if heads else ""
            table.add_column(label, style=style, no_wrap=column < columns)
        for name in known:
            if name.group == group:
                table.add_row(name.usage, *name.cells)
        print_table(console(), table)


def to_json(kind: str) -> list[dict[str, Any]]:
    """Return the list for --json, with one object per name."""
    if kind == "presets":
        presets_ = map(presets.Preset.read, presets.names())
        return [
            {"name": p.name, "title": p.title, "algorithms": list(p.algorithm), "results": p.results}
            for p in presets_
        ]
    keys = names.heads(kind)[1:] or ("description",)
    return [
        {"name": name, "usage": known.usage, **dict(zip(keys, known.cells, strict=True))}
        | ({"group": known.group} if known.group else {})
        for name, known in names.names(kind).items()
    ]


def _show_presets() -> None:
    """Print the presets and, for each, the algorithms for which it has hyperparameters."""
    table = Table(Column(style="bold", no_wrap=True), Column(), show_header=False)
    for name in presets.names():
        preset = presets.Preset.read(name)
        table.add_row(name, "\n".join((preset.title, ", ".join(preset.algorithm), preset.results)))
    print_table(console(), table)
