"""fedsim list: print launch.configuration.names, which is faster than importing the named objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from launch.commands.errors import Command
from launch.commands.shared import json_option
from launch.configuration import names, presets
from launch.table import Table
from launch.terminal import console, print_json


@click.command("list", cls=Command)
@click.argument(
    "what",
    type=click.Choice([*names.KINDS, "presets"]),
)
@json_option
def list_(what: str, as_json: bool) -> None:
    """List algorithms, datasets, models, partitions, codecs, words of --compress, schedules or presets."""
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
        rows = [(name.usage, *name.cells) for name in known if name.group == group]
        shown = heads or ("",) * (columns + 1)
        table = Table(shown, rows, columns + 1, names.GROUPS.get(group, ""), _names(rows))
        table.print(console(), apart=number > 0)


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
    rows = [
        (p.name, "\n".join((p.title, ", ".join(p.algorithm), p.results)))
        for p in map(presets.Preset.read, presets.names())
    ]
    Table(("", ""), rows, 2, best=_names(rows)).print(console())


def _names(rows: Sequence[Sequence[str]]) -> set[tuple[int, int]]:
    """Return the places of the names, which are bold."""
    return {(at, 0) for at in range(len(rows))}
