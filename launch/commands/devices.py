"""The commands devices generate, capacity and availability. Heavy imports happen inside the commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from launch.commands.errors import Group
from launch.commands.shared import FILE, PATH

_out = click.option("--out", **FILE, required=True, help="Write the file there.")
_export = click.argument("file", metavar="FILE.json", type=PATH)
_seed = click.option("--seed", type=int, metavar="S", default=0, show_default=True, help="Seed of the draws.")
_clients = click.option(
    "--clients",
    type=click.IntRange(min=1),
    metavar="N",
    help="Clients 0 to N-1; those after the last entry begin again with the first.  [one per entry]",
)

DRAWN = {
    "up": "Rate up, such as 6mbit,0.8.",
    "down": "Rate down.",
    "rtt": "Round trip, such as 70ms,0.5.",
    "jitter": "Jitter of the round trip.",
    "compute": "Time per example, such as 5ms,0.5.",
    "joules_up": "Joules per byte up, such as 2e-6.",
    "joules_down": "Joules per byte down.",
    "joules_example": "Joules per example.",
}
"""The columns that `generate` draws, with the help of their options."""


def _drawn(command: Callable[..., None]) -> Callable[..., None]:
    for name, text in reversed(DRAWN.items()):
        option = click.option(f"--{name.replace('_', '-')}", name, metavar="MEDIAN[,SIGMA]", help=text)
        command = option(command)
    return command


@click.group(cls=Group)
def devices() -> None:
    """Make files of devices and of availability: from distributions, or from FedScale's traces."""


@devices.command(short_help="Draw the devices of clients from distributions.")
@click.option("--clients", type=click.IntRange(min=1), metavar="N", required=True, help="How many.")
@_seed
@click.option("--from", "source", metavar="NAME", help="Published medians: lte (Huang et al. 2012).")
@click.option(
    "--spread",
    type=click.FloatRange(min=0),
    metavar="SIGMA",
    default=0.0,
    show_default=True,
    help="Where a column says none.",
)
@_drawn
@click.option("--noise", type=click.FloatRange(min=0), metavar="X", help="Noise of compute, of all clients.")
@_out
def generate(out: Path, **options: Any) -> None:
    """Draw every client's devices, and write them as --link FILE.csv takes them.

    A column is log-normal: MEDIAN exp(SIGMA z), z from N(0, 1). A client's value does not depend on N.
    Columns that are not named are left out. Energy and spread have no preset: published figures differ much.
    """
    from launch.commands.device_files import generate

    generate(out, **options)


@devices.command(short_help="Read FedScale's device capacities.")
@_export
@_clients
@click.option(
    "--passes",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    default=3.0,
    show_default=True,
    help="Training costs X inferences an example: 3 for one epoch.",
)
@_out
def capacity(file: Path, out: Path, **options: Any) -> None:
    """Write the devices of a JSON export of FedScale's client_device_capacity as --link FILE.csv takes them.

    An entry is {"computation": milliseconds per inference, "communication": kbit/s in both directions}.
    """
    from launch.commands.device_files import capacity

    capacity(file, out, **options)


@devices.command(short_help="Read FedScale's availability trace.")
@_export
@_clients
@click.option("--rounds", type=click.IntRange(min=1), metavar="R", required=True, help="Rounds 1 to R.")
@click.option("--every", metavar="T", required=True, help="Time from round to round, such as 600s.")
@click.option(
    "--per-round",
    type=click.IntRange(min=1),
    metavar="M",
    help="Ask M of the available clients, drawn uniformly.  [all]",
)
@_seed
@_out
def availability(file: Path, out: Path, **options: Any) -> None:
    """Write which clients are available in each round, by a JSON export of FedScale's client_behave_trace.

    The file is for --participation trace:FILE. A client is available from active[i] to inactive[i] (seconds);
    these intervals repeat after finish_time.
    """
    from launch.commands.device_files import availability

    availability(file, out, **options)
