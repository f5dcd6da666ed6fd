"""fedsim launch: run an experiment with real worker processes."""

from __future__ import annotations

from typing import Any

import click

from launch import PROGRAM_START
from launch.commands.shared import print_path, quiet_option
from launch.configuration.options import Configured, configuration_of
from launch.engines import options as engine_options


@click.command(cls=Configured)
@quiet_option
@configuration_of()
@engine_options.of_launch
def launch(quiet: bool, **options: Any) -> None:
    """Run an experiment and leave a run folder.

    \b
    The main job, on data that ships with a dependency:
        fedsim launch --workers 10 --algo fedlap_cov

    Precedence: this command line, then --config, then the defaults in brackets. The result is the
    same, bit for bit, for any number of workers and either transport.
    """
    from launch.configuration.config import Overrides

    engine = engine_options.EngineOptions.taken(options)
    overrides = Overrides.of(options)
    if engine is not None:
        from launch.engines.submit import submit

        return click.echo(submit(overrides, engine).rstrip("\n"))
    experiment, execution = overrides.resolve()
    from launch.session import run

    remarks = overrides.remarks(experiment)
    path = run.launch(experiment, execution, quiet=quiet, started=PROGRAM_START, remarks=remarks)
    print_path(path, quiet)
