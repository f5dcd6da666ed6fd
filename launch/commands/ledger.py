"""fedsim ledger: show where a run's bytes went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from launch.commands.errors import Command
from launch.commands.shared import FILE, json_option, run_argument


@click.command(cls=Command)
@run_argument
@click.option(
    "--by",
    type=click.Choice(["kind", "field", "round", "client", "hop"]),
    help="One table, in full; hop: between edge servers and the root.  [all, cut]",
)
@click.option("--all", "everything", is_flag=True, help="Control and simulation traffic too.  [algorithm]")
@click.option("--cumulative", is_flag=True, help="Sums so far, by round.")
@click.option("--csv", "export", **FILE, help="Write round,sender,receiver,bytes; no tables without --by.")
@click.option("--parquet", is_flag=True, help="Write all rows to RUN/ledger.parquet; needs pyarrow.")
@json_option
def ledger(run: Path, by: str | None, **options: Any) -> None:
    """Show a run's ledger: by kind, field, round, client and hop; broadcasts per recipient and once."""
    from launch.results.ledger import print_ledger

    print_ledger(run, by=by or "", **options)
