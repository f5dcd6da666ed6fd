"""fedsim runs: one line per run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import click

from fedsim import plugins
from fedsim.errors import FedsimError
from fedsim.foreign_files import checked
from launch.commands.errors import Command
from launch.commands.shared import PATH, json_option
from launch.numbers import percentage, size, target
from launch.runs.documents import Finished
from launch.runs.folder import DAMAGED, DONE, FAILED, SUMMARY, RunFolder, damage, is_run, run_folders
from launch.table import Table
from launch.terminal import console, print_json, say
from workers.storage.growing_file import METRICS
from workers.storage.metrics_file import metrics_lines

DEFAULT = Path("runs")
NONE = "-"
HEADS = ("run", "algorithm", "data", "seed", "state", "rounds", "accuracy", "bytes", "started")


@click.command(cls=Command)
@click.argument("folders", nargs=-1, metavar="[DIR]...", type=PATH)
@json_option
def runs(folders: tuple[Path, ...], as_json: bool) -> None:
    """List the runs in DIR, or in runs/, in the order in which they were begun.

    A run is running, done, interrupted (by a signal), failed (with an error), or killed (its
    coordinator has ended without a summary). `fedsim resume` continues the last three.
    """
    runs = listed(folders or ([DEFAULT] if DEFAULT.is_dir() else []))
    if as_json:
        return print_json(runs)
    if not runs:
        return say(f"no runs in {', '.join(map(str, folders or [DEFAULT]))}")
    out = console()
    if rows := [_cells(run) for run in runs if run.state != DAMAGED]:
        Table(HEADS, rows, 5).print(out)
    for run in runs:
        if run.error is not None:
            out.print(f"{run.state}: {_one_line(run)}", soft_wrap=True)
    return None


@dataclass(frozen=True)
class ListedRun:
    """One line of the list. state: RunFolder.status. rounds_done: the last committed round. rounds: the
    number of rounds, or its maximum if there is `until`. bytes_down, bytes_up: the algorithm's bytes in
    committed rounds. started: the time in ISO 8601. error: the damage, or the reason for a failure."""

    run: Path
    state: str
    started: str = ""
    algo: str | None = None
    dataset: str | None = None
    seed: int | None = None
    rounds_done: int | None = None
    rounds: int | None = None
    until: float | None = None
    test_accuracy: float | None = None
    bytes_down: int | None = None
    bytes_up: int | None = None
    error: str | None = None


def listed(folders: Sequence[Path]) -> list[ListedRun]:
    """Return the runs of run folders, and of folders that contain run folders, in order of start time."""
    runs: dict[Path, None] = {}
    for folder in folders:
        runs |= dict.fromkeys([folder] if is_run(folder) else run_folders(folder))
    return sorted(map(_listed, runs), key=lambda r: (r.started, str(r.run)))


def _listed(folder: Path) -> ListedRun:
    try:
        return _described(RunFolder.open(folder, begun=False))
    except FedsimError as e:
        return ListedRun(folder, DAMAGED, error=str(e))


def _described(run: RunFolder) -> ListedRun:
    experiment, summary, status = run.experiment, run.summary, run.status
    lines = [line for line, _ in metrics_lines(run.path / METRICS)]
    commits = {} if status == DONE else run.commits
    if status == DONE:
        with damage(run.path / SUMMARY):
            checked(summary, Finished)
    sent = [summary] if status == DONE else [*commits.values()]
    down, up = (sum(of[f"bytes_{side}"] for of in sent) for side in ("down", "up"))
    return ListedRun(
        run=run.path,
        state=status,
        started=run.manifest.get("started", ""),
        algo=plugins.short(experiment["algo"]),
        dataset=plugins.short(experiment["dataset"]),
        seed=experiment["seed"],
        rounds_done=summary["rounds"] if status == DONE else max(commits, default=0),
        rounds=experiment["rounds"],
        until=experiment.get("until") or None,
        test_accuracy=lines[-1].get("test_accuracy") if lines else None,
        bytes_down=down,
        bytes_up=up,
        error=summary.get("error") if status == FAILED else None,
    )


def _cells(run: ListedRun) -> tuple[str, ...]:
    rounds = f"{run.rounds_done}/{run.rounds if (run.rounds or 0) >= 0 else '?'}"
    return (
        str(run.run),
        run.algo or NONE,
        run.dataset or NONE,
        str(run.seed),
        run.state,
        f"{rounds} to {target(run.until)}" if run.until else rounds,
        NONE if run.test_accuracy is None else percentage(run.test_accuracy),
        size((run.bytes_down or 0) + (run.bytes_up or 0)),
        f"{datetime.fromisoformat(run.started):%Y-%m-%d %H:%M}" if run.started else NONE,
    )


def _one_line(run: ListedRun) -> str:
    """Return the error as one line, after the folder's name if the line does not contain it."""
    text = " ".join((run.error or "").split())
    return text if str(run.run) in text else f"{run.run}: {text}"
