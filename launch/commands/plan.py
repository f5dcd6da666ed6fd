"""fedsim plan: compute what an experiment would send, without running it."""

from __future__ import annotations

from typing import Any

import click

from launch.commands.shared import json_option
from launch.configuration.options import Configured, configuration_of


@click.command(cls=Configured)
@json_option
@configuration_of("plan")
def plan(as_json: bool, **options: Any) -> None:
    """Compute what the same launch would send, from the schedule and the messages' sizes, without training.

    It equals the run's ledger to the byte, or is an upper bound if a codec's size depends on the values. A
    million clients are possible: fedsim plan --clients 1000000 --rounds 1000 --participation 0.001
    """
    from launch.configuration.config import Overrides

    overrides = Overrides.of(options)
    experiment, execution = overrides.resolve()
    from launch.results.plan import print_bill

    print_bill(experiment, execution, as_json)
