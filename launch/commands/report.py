"""fedsim report: write a run's page."""

from __future__ import annotations

from pathlib import Path

import click

from launch.commands.errors import Command
from launch.commands.shared import FILE, run_argument


@click.command(cls=Command)
@run_argument
@click.option("--out", **FILE, help="Write the page there.  [RUN/report.html]")
def report(run: Path, out: Path | None) -> None:
    """Write one HTML file that loads nothing: curves, bytes, participation, configuration."""
    from launch.results.report import report as write_report

    click.echo(write_report(run, out))
