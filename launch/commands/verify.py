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

    Finds client code that is not deterministic and names it. The rounds that can be computed again are those
    whose predecessor's checkpoint is kept, the last ones, and the first. Compares the digests of the summary
    with the files, too. Exit code 1 if anything differs; nothing in the folder is changed.
    """
    prepare_torch(numerics_of(run))
    from launch.results.verify import verify

    verify(run, **options)
