"""The commands that look at a run while it goes on: watch, trace. Heavy imports happen inside them."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from launch.commands.errors import Command
from launch.commands.worker_commands import FILE, run_argument


@click.command(cls=Command, short_help="Follow a run, or the runs of a sweep, from another terminal.")
@run_argument
@click.option(
    "--interval",
    type=click.FloatRange(min=0.05),
    metavar="SECONDS",
    default=1.0,
    help="Between two looks.  [1]",
)
def watch(run: Path, interval: float) -> None:
    """Print RUN's evaluated rounds until it ends, wherever it is carried out; of a folder of runs, a line
    for each that ends.

    Reads files and takes no lock. Ctrl-C ends the watch, not the run. Exit code: 0 if it is done, 1 failed,
    130 interrupted, 137 killed; of several runs, the first that is not 0.
    """
    from launch.commands.watch import watch

    sys.exit(watch(run, interval))


@click.command(cls=Command, short_help="Write a run's timeline for ui.perfetto.dev, RUN/trace.json.")
@run_argument
@click.option("--out", **FILE, help="Write the trace there; - is standard output.  [RUN/trace.json]")
def trace(run: Path, out: Path | None) -> None:
    """Write the timeline of RUN, which may be running, as a trace that ui.perfetto.dev opens.

    A lane a worker and two of the coordinator, arrows from broadcast to task to fold, bytes over time.
    """
    from launch.commands.trace import trace

    path = trace(run, out)
    if path is not None:
        click.echo(path)
