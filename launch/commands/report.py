"""fedsim report: write a run's page."""

from __future__ import annotations

from pathlib import Path

import click

from launch.commands.errors import Command
from launch.commands.shared import FILE, figures_option, run_argument


@click.command(cls=Command)
@run_argument
@click.option("--out", **FILE, help="Write the page there.  [RUN/report.html]")
@figures_option
def report(run: Path, out: Path | None, figures: Path | None) -> None:
    """Write one HTML file that loads nothing: curves, bytes, participation, configuration."""
    from launch.results.report import report as write_report

    click.echo(write_report(run, out, figures))
