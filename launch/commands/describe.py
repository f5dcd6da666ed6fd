"""fedsim describe: show an algorithm's messages, cost and hyperparameters, or a model's parameters."""

from __future__ import annotations

from pathlib import Path

import click

from launch.commands.errors import Command
from launch.commands.shared import data_dir_option, json_option, prepare_torch
from launch.configuration import names


@click.command(cls=Command)
@click.argument("algo", required=False)
@click.option("--model", metavar="NAME", help="Describe this model instead, or path/to/file.py:NAME.")
@click.option("--dataset", metavar="NAME", default="digits", help="The data it is for.  [digits]")
@click.option("--train", metavar="PATTERNS", default="", help="As in launch.")
@click.option("--freeze", metavar="PATTERNS", default="", help="As in launch.")
@click.option("--statistics", type=click.Choice(["frozen", "local", "average"]), help="As in launch.")
@data_dir_option
@json_option
def describe(
    algo: str | None, model: str | None, data_dir: Path | None, as_json: bool, **choices: str | None
) -> None:
    """Describe an algorithm: its box, its messages and their cost in P, its hyperparameters.

    With --model, list the parameters of a model: those that are trained and sent, and those that are frozen.
    """
    if (algo is None) == (model is None):
        raise click.UsageError("name an algorithm (fedsim describe fedlap_cov), or a model with --model")
    if algo is None:
        from fedsim.experiment import Experiment
        from launch.configuration.config import absolute_paths

        named = {name: value for name, value in choices.items() if value}
        selected = absolute_paths({"algo": "fedavg", "clients": 1, "model": model, **named})
        experiment = Experiment(**selected)
        names.check(experiment)
        prepare_torch()
        from launch.results.describe import describe_model

        return describe_model(experiment, data_dir, as_json)
    names.check_name("algorithms", algo)
    from launch.results.describe import describe

    return describe(algo, as_json)
