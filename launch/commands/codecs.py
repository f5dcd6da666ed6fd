"""fedsim codecs: compare all codecs on the messages that a run would send next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from launch.commands.errors import Command
from launch.commands.shared import data_dir_option, json_option, numerics_of, prepare_torch, run_argument


@click.command(cls=Command)
@run_argument
@data_dir_option
@click.option(
    *("--keep", "fractions"),
    type=click.FloatRange(min=0, min_open=True, max=1),
    multiple=True,
    default=(0.1,),
    show_default=True,
    metavar="P",
    help="Fraction that csr, bitmap, best and topk keep; repeatable.",
)
@json_option
def codecs(run: Path, **options: Any) -> None:
    """Show bytes, speed and error of every codec on the messages that RUN would send next.

    The participant of the next round with the most examples computes its next task here, from its committed
    state. Nothing in the folder is changed.
    """
    prepare_torch(numerics_of(run))
    from launch.results.codecs import codecs

    codecs(run, **options)
