"""fedsim codecs: compare all codecs on the messages that a run would send next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from launch.commands.errors import Command
from launch.commands.shared import FILE, PATH, data_dir_option, json_option, numerics_of, prepare_torch

ROUNDS = 3
"""The number of rounds of the run that is trained if no run is given."""


@click.command(cls=Command)
@click.argument("run", required=False, type=PATH)
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
@click.option("--csv", "file", **FILE, help="Write the figures there, too.")
@json_option
def codecs(run: Path | None, fractions: tuple[float, ...], **options: Any) -> None:
    """Show bytes, speed and error of every codec on the messages that RUN would send next.

    The participant of the next round with the most examples computes its next task here, from its committed
    state. Nothing in the folder is changed. Without RUN, the main job is trained for 3 rounds first.
    """
    prepare_torch(numerics_of(run))
    from launch.results.codecs import codecs

    if run is not None:
        return codecs(run, fractions=fractions, **options)
    with _trained() as run:
        codecs(run, fractions=fractions, **options)


@contextmanager
def _trained() -> Iterator[Path]:
    """Run the default experiment for ROUNDS rounds; yield the run folder, and remove it after the block."""
    from fedsim.experiment import Experiment
    from launch.configuration.execution import Execution
    from launch.session.run import launch
    from workers.scratch import Scratch

    with Scratch("fedsim-codecs-") as temporary:
        execution = Execution(workers=0, devices="cpu", out=f"{temporary}/run")
        yield launch(Experiment(rounds=ROUNDS), execution, quiet=True)
