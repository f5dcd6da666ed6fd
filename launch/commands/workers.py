"""The commands of workers on other machines: worker, node, revoke.

Heavy imports happen inside the commands.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedsim.errors import DataError, UsageError
from launch.commands.errors import Command
from launch.commands.shared import FILE, FOLDER, prepare_torch, run_argument

if TYPE_CHECKING:
    from workers.transport.join_credentials import JoinCredentials


def joined(file: Path) -> JoinCredentials:
    """Read the credentials of --join; prefix errors with the name of the option."""
    from workers.transport.join_credentials import JoinCredentials

    try:
        return JoinCredentials.read(file)
    except (UsageError, DataError) as e:
        raise type(e)(f"--join {e}") from None


Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def _joining(seat: str) -> Decorator:
    """Return a decorator that adds the options for joining a run from another machine.

    seat: the help of --seat.
    """
    options: tuple[Decorator, ...] = (
        click.option("--join", "file", **FILE, required=True, help="The run's join.json."),
        click.option("--seat", "--worker", "seat", metavar="I|auto", help=seat),
        click.option("--devices", metavar="LIST", default="auto", help="Devices here, as in launch.  [auto]"),
        click.option(
            "--connect",
            "url",
            metavar="URL",
            help="The coordinator's address as seen from this machine.  [the file's]",
        ),
        click.option("--data-dir", **FOLDER, help="Folder of the data files on this machine.  [FEDSIM_DATA]"),
        click.option(
            "--patience",
            type=click.FloatRange(min=0, min_open=True),
            metavar="SECONDS",
            default=60.0,
            help="How long to wait for the coordinator.  [60]",
        ),
        click.option("--algo", **FILE, help="A copy of the run's own algorithm file.  [the run's path]"),
        click.option("--model", **FILE, help="A copy of its model file.  [the run's path]"),
        click.option("--dataset", **FILE, help="A copy of its data set file.  [the run's path]"),
        click.option("--partition", **FILE, help="A copy of its partition file.  [the run's path]"),
        click.option("--codec", "codecs", multiple=True, **FILE, help="A copy of a codec file; repeatable."),
    )

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.command(cls=Command)
@_joining("The worker's number; auto: its rank (srun, mpirun, torchrun, Job).  [the first missing]")
def worker(file: Path, **options: Any) -> None:
    """Join a run that `fedsim launch --remote-workers K --bind tcp://ADDRESS:PORT` has opened.

    The file holds this run's keys: copy it over a channel that you trust, and keep it to yourself (0600).
    Files of your own (--algo FILE.py:NAME and the like) are not sent: copy them, too. They are compared by
    their digests.
    """
    prepare_torch(joined(file).numerics)
    from launch.processes.remote_workers import join

    join(file, **options)


@click.command(cls=Command)
@_joining("The first worker's number; auto: rank times K.  [the free ones]")
@click.option("--workers", type=click.IntRange(min=1), metavar="K", default=1, help="Number of workers.  [1]")
@click.option("--threads", type=click.IntRange(min=1), metavar="T", default=1, help="Cores per worker.  [1]")
@click.option("--logs", **FOLDER, help="Folder of their logs.  [none is kept]")
def node(file: Path, **options: Any) -> None:
    """Join a run as `fedsim worker` does, with K workers from one import of torch.

    Each worker is pinned to some of the cores and one of the GPUs that this process may use
    (CUDA_VISIBLE_DEVICES, affinity), and is restarted if it is killed. The workers end with this process,
    and it ends when the run is over.
    """
    joined(file)
    from launch.processes.node import serve

    serve(file, **options)


@click.command(cls=Command)
@run_argument
@click.argument("workers", nargs=-1, required=True, type=int, metavar="WORKER...")
def revoke(run: Path, workers: tuple[int, ...]) -> None:
    """Revoke the keys of RUN's remote workers while it runs: WORKER is 0, 1, ...

    An open connection with a revoked key is closed within a second. Other workers take over its tasks, and
    the results stay bit-for-bit the same. No worker can join with this key again. The keys of the other
    workers are not affected, but every machine that has the whole join.json has all keys.
    """
    from launch.processes.remote_workers import revoke

    revoke(run, workers)
