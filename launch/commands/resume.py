"""fedsim resume: continue a run after its last committed round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from launch import PROGRAM_START
from launch.commands.shared import print_path, quiet_option
from launch.configuration.options import Configured, configuration_of


@click.command(cls=Configured)
@click.argument("run", type=click.Path(file_okay=False, path_type=Path))
@quiet_option
@configuration_of("resume", default="the run's")
def resume(run: Path, quiet: bool, **options: Any) -> None:
    """Resume after the last committed round; the results are bit-identical to an uninterrupted run.

    Options may change the execution, increase --rounds or set another --until. Settings on which the
    results depend cannot change. A complete run is left as it is.
    """
    from launch.session.run import resume

    print_path(resume(run, options, quiet=quiet, started=PROGRAM_START), quiet)
