"""fedsim trace: write a run's timeline as a file for ui.perfetto.dev."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from launch.commands.errors import Command
from launch.commands.shared import FILE, run_argument


@click.command(cls=Command)
@run_argument
@click.option("--out", **FILE, help="Write the trace there; - is standard output.  [RUN/trace.json]")
def trace(run: Path, out: Path | None) -> None:
    """Write the timeline of RUN, which may be running, as a trace that ui.perfetto.dev opens.

    It has a lane per worker, two of the coordinator, and arrows from broadcast to task to fold.
    """
    from launch.results.trace import trace_lines, write_trace
    from launch.runs.folder import RunFolder

    opened = RunFolder.open(run)
    if out == Path("-"):
        sys.stdout.writelines(trace_lines(opened))
    else:
        click.echo(write_trace(opened, out or run / "trace.json"))
