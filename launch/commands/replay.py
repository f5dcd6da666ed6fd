"""fedsim replay: fold a run's kept uploads again, without clients."""

from __future__ import annotations

from pathlib import Path

import click

from launch.commands.errors import Command
from launch.commands.shared import data_dir_option, numerics_of, prepare_torch, run_argument


@click.command(cls=Command)
@run_argument
@data_dir_option
def replay(run: Path, data_dir: Path | None) -> None:
    """Fold the uploads of RUN again, from the start to the end, and compare the results.

    RUN must have been launched with --keep-uploads. Every broadcast is made again; no client computes. The
    exit code is 1 if a checkpoint or the final model differs. Nothing in the folder is changed.
    """
    prepare_torch(numerics_of(run))
    from launch.results.replay import replay

    replay(run, data_dir)
