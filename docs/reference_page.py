"""The page docs/reference.md of the site: options, configuration keys, files of a run, JSON, exit codes.

docs/hooks.py calls `page` when it builds the site; the page is not committed. Options, configuration keys and
the errors of exit codes are read from the code. The words for files, columns and keys are in reference.toml;
tests/docs/test_reference.py compares them with the files of a run.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import click
from msgspec import Meta

from fedsim import errors
from fedsim.experiment import Experiment
from launch.cli import main as fedsim
from launch.configuration.execution import Execution
from launch.configuration.options import SECTIONS, Configured, section

PAGE = "reference.md"
WORDS = Path(__file__).with_name("reference.toml")
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


def exits(meanings: Mapping[str, str]) -> str:
    """Return the table of exit codes; the errors of a code are the classes of fedsim.errors that have it."""
    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, errors.FedsimError)]
    rows = []
    for code, meaning in meanings.items():
        names = ", ".join(f"`{kind.__name__}`" for kind in kinds if str(kind.exit_code) == code)
        rows.append(f"| {code} | {meaning} | {names} |")
    return "\n".join(["| code | meaning | error |", "| --- | --- | --- |", *rows])


def words(head: Sequence[str], rows: Mapping[str, str]) -> str:
    """Return a table of names and what they mean; a key may have several names."""
    cells = [(", ".join(f"`{name}`" for name in names.split(", ")), text) for names, text in rows.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *cells])


def page() -> str:
    """Return the page as Markdown."""
    parts = []
    for part in tomllib.loads(WORDS.read_text(encoding="utf-8"))["section"]:
        if "title" in part:
            parts.append("#" * part["level"] + " " + part["title"])
        if "text" in part:
            parts.append(part["text"].strip())
        if "rows" in part:
            parts.append(words(part["head"], part["rows"]))
        if "exits" in part:
            parts.append(exits(part["exits"]))
    text = "\n\n".join(parts) + "\n"
    for name, write in {"commands": commands, "configuration": configuration}.items():
        text = text.replace(f"<!-- {name}: made when the site is built -->", write())
    return text
