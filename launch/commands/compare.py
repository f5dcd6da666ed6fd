"""fedsim compare: compare runs side by side, as a page, tables and CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from launch.commands.errors import Command
from launch.commands.shared import FILE, PATH, figures_option, json_option, latex_option


@click.command(cls=Command)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=PATH)
@click.option("--out", **FILE, help="Write the page there.  [comparisons/TIME.html, a new one each time]")
@click.option(
    "--to", multiple=True, metavar="ACCURACY", help="Show the bytes until it (0.75 or 75%); repeatable."
)
@click.option("--where", multiple=True, metavar="KEY=VALUE", help="Only runs with it; repeatable.")
@click.option(
    "--against",
    metavar="LABEL",
    help="The group, or a part of its label, from which differences are taken.  [the best]",
)
@click.option("--markdown", **FILE, help="Write the tables there, too.")
@click.option("--csv", **FILE, help="Write one line per group of runs there, too.")
@latex_option
@figures_option
@json_option
def compare(runs: tuple[Path, ...], **options: Any) -> None:
    """Compare runs, or folders of runs such as runs/sweep.

    Runs that differ only in their seed share one line. Differences are paired by seed
    and tested. Fewer than five seeds do not establish a ranking (docs/what-a-number-is-worth.md).
    """
    from launch.results.compare import compare

    compare(runs, **options)
