"""fedsim verify: compute a run's last rounds again and compare the bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from launch.commands.errors import Command
from launch.commands.shared import data_dir_option, json_option, numerics_of, prepare_torch, run_argument


@click.command(cls=Command)
@run_argument
@click.option("--rounds", type=click.IntRange(min=1), metavar="N", help="The last N that can be.  [all]")
@click.option("--clients", metavar="IDS", help="Of these clients, such as 0,4.  [all]")
@click.option("--twice", is_flag=True, help="Compute every task twice, and compare these, too.")
@data_dir_option
@json_option
def verify(run: Path, **options: Any) -> None:
    """Compute tasks of RUN again, in this process, and compare their digests with the run's.

    This finds and names client code that is not deterministic. The first round can be computed again, and so
    can rounds whose previous round still has its checkpoint (the last ones). The digests in the summary are
    compared with the files, too. The exit code is 1 if a result differs, and 2 if only a file was changed.
    Nothing in the folder is changed.
    """
    prepare_torch(numerics_of(run))
    from launch.results.verify import verify

    verify(run, **options)
