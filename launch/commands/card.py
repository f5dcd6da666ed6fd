"""fedsim card: write what a paper states about runs."""

from __future__ import annotations

from pathlib import Path

import click

from launch.commands.errors import Command
from launch.commands.shared import FILE, PATH


@click.command(cls=Command)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=PATH)
@click.option("--out", **FILE, help="Write the card there, as .md or .html.  [RUN/card.md and RUN/card.html]")
def card(runs: tuple[Path, ...], out: Path | None) -> None:
    """Write what a paper states about runs that differ only in their seed, for each configuration: task,
    algorithm and source, schedule, bytes, time, scores with n and interval, versions, digests, and what is
    missing for a claim."""
    from launch.results.card import write

    for path in write(runs, out):
        click.echo(path)
