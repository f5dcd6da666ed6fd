"""fedsim runs: one line per run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from launch.configuration.target_accuracy import percent
from launch.runs.listing import DAMAGED, ListedRun, listed
from launch.terminal import console, megabytes, percentage, print_json, print_table, say

DEFAULT = Path("runs")
NONE = "-"


def show(folders: Sequence[Path], as_json: bool) -> None:
    """Print the runs in these folders; by default those in runs/.

    Raises:
        UsageError: if there is no such folder.
    """
    runs = listed(folders or ([DEFAULT] if DEFAULT.is_dir() else []))
    if as_json:
        return print_json(runs)
    if not runs:
        say(f"no runs in {', '.join(map(str, folders or [DEFAULT]))}")
        return None
    out = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "algorithm", "data", "seed", "state", "rounds", "accuracy", "bytes", "started"):
        numeric = name in ("seed", "rounds", "accuracy", "bytes")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    for run in runs:
        if run.state != DAMAGED:
            table.add_row(*map(escape, _cells(run)))
    if table.rows:
        print_table(out, table)
    for run in runs:
        if run.error is not None:
            out.print(escape(f"{run.state}: {_one_line(run)}"), soft_wrap=True)
    return None


def _cells(run: ListedRun) -> tuple[str, ...]:
    rounds = f"{run.rounds_done}/{run.rounds}"
    return (
        str(run.run),
        run.algo or NONE,
        run.dataset or NONE,
        str(run.seed),
        run.state,
        f"{rounds} to {percent(run.until)}" if run.until else rounds,
        NONE if run.test_accuracy is None else percentage(run.test_accuracy),
        megabytes((run.bytes_down or 0) + (run.bytes_up or 0)),
        f"{datetime.fromisoformat(run.started):%Y-%m-%d %H:%M}",
    )


def _one_line(run: ListedRun) -> str:
    """What is wrong, behind the folder if it does not name it."""
    text = (run.error or "").splitlines()[0] if run.error else ""
    return text if str(run.run) in text else f"{run.run}: {text}"
