"""The options of all commands and the keys of the configuration file, for the site's docs/reference.md.

docs/hooks.py calls `filled` when it builds the site; no option is committed. Everything is read from the
command line's own definition. The rest of the page is written by hand; tests/docs/test_reference.py compares
it with the files of a run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import get_type_hints

import click
from msgspec import Meta

from fedsim.experiment import Experiment
from launch.cli import main as fedsim
from launch.configuration.execution import Execution
from launch.configuration.options import SECTIONS, Configured, section

PAGE = "reference.md"
FULL = "launch"
"""The command whose options others share; those that are the same there are listed by name."""


def commands() -> str:
    """Return one section per command, in the order of their definition."""
    return "\n\n".join(_command(name, command) for name, command in fedsim.commands.items())


def _command(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"fedsim {name}", **command.context_settings)
    usage = " ".join(command.get_usage(context).removeprefix("Usage:").split())
    text = inspect.cleandoc(command.help or "").replace("\b\n", "").split("\f")[0]
    first = " ".join(text.split("\n\n")[0].split())
    parts = [f"### fedsim {name}", f"`{usage}`", _escaped(first)]
    shared = _records(fedsim.commands[FULL]) if name != FULL else {}
    records = _records(command)
    same = [option for option, text in records.items() if shared.get(option) == text]
    if len(same) < 4:
        same = []
    own = {option: text for option, text in records.items() if option not in same}
    if own:
        parts.append(_table(("option", "meaning"), _rows(command, own)))
    if same:
        names = ", ".join(f"`--{option.partition('--')[2].split()[0]}`" for option in same)
        parts.append(f"As of [launch](#fedsim-{FULL}): {names}.")
    return "\n\n".join(parts)


def _records(command: click.Command) -> dict[str, str]:
    """Return name and help of every option that the help shows, without --help."""
    context = click.Context(command, info_name=command.name, **command.context_settings)
    records = (p.get_help_record(context) for p in command.params if isinstance(p, click.Option))
    return {record[0]: record[1] for record in records if record is not None}


def _rows(command: click.Command, own: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the options in the order of the help, with the titles of its sections."""
    context = click.Context(command, info_name=command.name, **command.context_settings)
    options = {p.name: p.get_help_record(context) for p in command.params if isinstance(p, click.Option)}
    left = {name: record for name, record in options.items() if record is not None and record[0] in own}
    if isinstance(command, Configured):
        for key, title in SECTIONS.items():
            rows = [left.pop(name) for name in list(left) if name and section(name) == key]
            if rows:
                yield f"**{title}**", ""
                yield from ((f"`{option}`", text) for option, text in rows)
    if left and isinstance(command, Configured):
        yield "**Other options**", ""
    yield from ((f"`{option}`", text) for option, text in left.values())


def configuration() -> str:
    """Return the keys of the configuration file's tables."""
    lines = []
    for table, kind in (("experiment", Experiment), ("execution", Execution)):
        hints = get_type_hints(kind, include_extras=True)
        keys = [
            f.name
            for f in fields(kind)
            if f.name not in ("hyperparameters", "codecs")
            and (next(m for m in hints[f.name].__metadata__ if isinstance(m, Meta)).extra or {})["name"] != ""
        ]
        lines.append(f"| `[{table}]` | {', '.join(f'`{key}`' for key in keys)} |")
    return "\n".join(["| table | keys |", "| --- | --- |", *lines])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if text.startswith(("`", "**")) else _escaped(text)


def _escaped(text: str) -> str:
    """Return text in which Markdown sees no tag, no emphasis and no link."""
    for sign in "<*[":
        text = text.replace(sign, f"\\{sign}")
    return text


def filled(text: str) -> str:
    """Return the page with the options and keys in place of their comments."""
    for part, write in {"commands": commands, "configuration": configuration}.items():
        comment = f"<!-- {part}: made when the site is built -->"
        if comment not in text:
            raise ValueError(f"docs/{PAGE} has no comment {comment}")
        text = text.replace(comment, write())
    return text
