"""The options of `fedsim launch` and `fedsim sweep` that select an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

ENGINES = ("slurm", "ray", "kubernetes")
Command = Callable[..., None]


@dataclass(frozen=True)
class EngineOptions:
    """The engine options of a command. options: the engine's own options, each KEY=VALUE or KEY."""

    on: str
    nodes: int = 1
    gpus_per_worker: float = 0.0
    options: Sequence[str] = ()
    dry_run: bool = False

    @property
    def pairs(self) -> dict[str, str]:
        """The engine's own options by name; the value of KEY is ''."""
        return dict(text.partition("=")[::2] for text in self.options)

    @staticmethod
    def taken(options: dict[str, Any]) -> EngineOptions | None:
        """Remove the engine's options from a command's options and return them; None without an engine."""
        on, image = options.pop("on"), options.pop("image", None)
        names = ("nodes", "gpus_per_worker", "engine_options", "dry_run")
        nodes, gpus, own, dry = (options.pop(name, None) for name in names)
        if on is None and (nodes or gpus or own or dry or image):
            raise click.UsageError(
                "--nodes, --gpus-per-worker, --image, --engine-option and --dry-run go with --on ENGINE"
            )
        if image and on != "kubernetes":
            raise click.UsageError("--image goes with --on kubernetes")
        own = (*(own or ()), *([f"image={image}"] if image else []))
        return EngineOptions(on, nodes or 1, gpus or 0.0, own, bool(dry)) if on else None


_OF_BOTH = (
    click.option(
        "--gpus-per-worker", type=click.FloatRange(min=0), metavar="X", help="GPUs, or a share of one.  [0]"
    ),
    click.option("--engine-option", "engine_options", multiple=True, metavar="K=V", help="Repeatable."),
)
_OF_LAUNCH = (
    click.option("--on", type=click.Choice(ENGINES), help="Run as a job on this engine.  [this machine]"),
    click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Machines of the job.  [1]"),
    click.option("--image", metavar="IMAGE", help="A container image with fedsim (kubernetes)."),
    *_OF_BOTH,
    click.option("--dry-run", is_flag=True, help="Print the job and submit nothing."),
)
_OF_SWEEP = (
    click.option("--on", type=click.Choice(["slurm"]), help="Run on this engine.  [this machine]"),
    *_OF_BOTH,
)


def of_launch(command: Command) -> Command:
    """Add the engine options of `fedsim launch`."""
    return functools.reduce(lambda extended, option: option(extended), reversed(_OF_LAUNCH), command)


def of_sweep(command: Command) -> Command:
    """Add the engine options of `fedsim sweep`."""
    return functools.reduce(lambda extended, option: option(extended), reversed(_OF_SWEEP), command)
