"""The options of all commands and the keys of the configuration file, in docs/reference.md.

    python docs/recipes/reference_page.py      2 seconds; writes what stands between its marker comments

Everything is read off the command line's own definition. The rest of the page is written by hand;
tests/docs/test_reference.py compares it with the files of a run.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import click
from msgspec import Meta

from fedsim.experiment import Experiment
from launch.cli import main as fedsim
from launch.configuration.execution import Execution
from launch.configuration.options import SECTIONS, Configured, section

DOCS = Path(__file__).resolve().parents[1]
PAGE = "reference.md"
PARTS = ("commands", "configuration")
FULL = "launch"
"""The command whose options others share; those that are the same there are listed by name."""


def marked(part: str) -> tuple[str, str]:
    """The comments around a part."""
    return f"<!-- {part}: written by python docs/recipes/reference_page.py -->", f"<!-- end of {part} -->"


def commands() -> str:
    """One section per command, in the order of their definition."""
    return "\n\n".join(_command(name, command) for name, command in _all(fedsim))


def _all(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command with its name; those of a group behind it."""
    for name, command in group.commands.items():
        yield f"{prefix}{name}", command
        if isinstance(command, click.Group):
            yield from _all(command, f"{prefix}{name} ")


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
    """Name and help of every option that the help shows, without --help."""
    context = click.Context(command, info_name=command.name, **command.context_settings)
    records = (p.get_help_record(context) for p in command.params if isinstance(p, click.Option))
    return {record[0]: record[1] for record in records if record is not None}


def _rows(command: click.Command, own: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The options in the order of the help, with the titles of its sections."""
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
    """The keys of the configuration file's tables."""
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
    """Text in which Markdown sees no tag, no emphasis and no link."""
    for sign in "<*[":
        text = text.replace(sign, f"\\{sign}")
    return text


def files() -> dict[str, str]:
    """The text of the page, by its path in docs/."""
    text = (DOCS / PAGE).read_text(encoding="utf-8")
    for part, write in zip(PARTS, (commands, configuration), strict=True):
        opening, closing = marked(part)
        before, rest = text.split(opening)
        _, after = rest.split(closing)
        text = f"{before}{opening}\n\n{write()}\n\n{closing}{after}"
    return {PAGE: text}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the page")
    out = parser.parse_args(argv).out
    for name, text in files().items():
        (out / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
