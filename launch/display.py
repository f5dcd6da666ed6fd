"""What a run prints: a header, progress while it runs, and its traffic at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from fedsim import plugins
from fedsim.learning.likelihoods import EXTRA
from fedsim.problem import Problem
from launch.config import Execution
from launch.target_accuracy import TargetAccuracy, percent
from workers.devices import Placement


class Display:
    """Progress on a terminal, one plain line per evaluated round elsewhere."""

    def __init__(self, rounds: int, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, highlight=False, emoji=False)
        self._rounds = rounds
        self._progress = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[status]}"),
            console=self.console,
            transient=True,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=rounds, status="starting")
        self._live = self.console.is_terminal and not quiet

    def header(self, lines: list[str]) -> None:
        for line in lines:
            self.console.print(line, soft_wrap=True)
        if self._live:
            self._progress.start()
            self._progress.refresh()

    def committed(self, round: int) -> None:
        if self._live:
            self._progress.update(self._task, completed=round, refresh=True)

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        """Fits 80 columns beside the bar."""
        accuracy = metrics["test_accuracy"]
        status = (
            f"{'' if accuracy is None else f'accuracy {accuracy:.4f}  '}NLL {_number(metrics['test_nll'])}  "
            f"MB {metrics['bytes_down'] / 1e6:.2f} down {metrics['bytes_up'] / 1e6:.2f} up  "
            f"{metrics['seconds']:.2f} s"
        )
        if self._live:
            self._progress.update(self._task, status=status, refresh=True)
        elif not self.console.quiet:
            width = len(str(self._rounds))
            # rich would take a fair part of a millisecond
            print(f"round {metrics['round']:>{width}}/{self._rounds}  {status}", flush=True)

    def note(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def stop(self) -> None:
        if self._live:
            self._progress.stop()
            self._live = False

    def traffic(self, summary: Mapping[str, Any]) -> None:
        """What the algorithm cost on the wire, by meaning: a table."""
        table = Table(title=None, pad_edge=False, box=None, header_style="bold")
        table.add_column("algorithm traffic")
        for direction in ("down", "up"):
            table.add_column(direction, justify="right")
            table.add_column("share", justify="right", style="dim")
        traffic = summary["bytes"].get("algorithm", {})
        rows = _rows_of(traffic)
        totals = {d: summary[f"bytes_{d}"] for d in ("down", "up")}
        for name in rows:
            cells = [name]
            for direction in ("down", "up"):
                n = rows[name].get(direction, 0)
                cells += [grouped(n), f"{n / totals[direction]:.1%}" if n and totals[direction] else ""]
            table.add_row(*cells)
        table.add_section()
        table.add_row("total bytes", grouped(totals["down"]), "", grouped(totals["up"]), "", style="bold")
        table.add_row(
            "per client and round",
            f"{summary['units_of_p_down']:.3f} P",
            "",
            f"{summary['units_of_p_up']:.3f} P",
            "",
        )
        once = [summary[f"units_of_p_once_{direction}"] for direction in ("down", "up")]
        if any(once):
            table.add_row("once per client", f"{once[0]:.3f} P", "", f"{once[1]:.3f} P", "")
        self.console.print()
        self.console.print(table)

    def traffic_summary(self, summary: Mapping[str, Any], out: str, target: TargetAccuracy) -> None:
        """The end of a run: its traffic, what came of it, and when the target accuracy was reached."""
        self.stop()
        self.traffic(summary)
        other = ", ".join(
            f"{kind} {grouped(sum(_total(sides) for sides in directions.values()))}"
            for kind, directions in summary["bytes"].items()
            if kind != "algorithm"
        )
        self.console.print(
            f"P = {grouped(summary['params'])} parameters; other bytes: {other}", soft_wrap=True
        )
        accuracy = summary["test_accuracy"]  # there is none of regression
        if accuracy is not None or summary["test_nll"] is not None:
            message = [f"test accuracy [bold]{accuracy:.4f}[/]"] if accuracy is not None else []
            message += [f"NLL {_number(summary['test_nll'])}"]
            self.console.print(
                f"[bold]{summary['status']}[/] after {summary['rounds']} rounds: {', '.join(message)}"
            )
            if more := [f"{key} {_number(summary[key])}" for key in EXTRA if key in summary]:
                self.console.print(", ".join(more), soft_wrap=True)
        if summary.get("ensemble_accuracy") is not None:
            self.console.print(
                f"average over posterior samples: accuracy [bold]{summary['ensemble_accuracy']:.4f}[/], "
                f"NLL {_number(summary['ensemble_nll'])}"
            )
        if summary["seconds_round_median"] is not None:
            self.console.print(
                f"first round {summary['seconds_to_first_round']:.1f} s after the start, "
                f"{summary['seconds_imports']:.1f} s of it imports; "
                f"then {summary['seconds_round_median']:.3f} s a round"
            )
        self.console.print(f"run folder: {out}", soft_wrap=True)
        if target.until:
            spent = summary["bytes_to_until"]
            self.console.print(target.outcome(sum(spent.values()) / 1e6 if spent else None), soft_wrap=True)


def header(problem: Problem, execution: Execution, placements: Sequence[Placement]) -> list[str]:
    """Describe a run in three lines: what is learned, by which model and clients, and where."""
    e, workers = problem.experiment, execution.workers
    where = f"{workers} workers over {execution.transport}" if workers else "in process"
    if execution.remote_workers:
        where = f"{workers} remote workers"
    until = f" or until {percent(e.until)}" if e.until else ""
    devices = ", ".join(dict.fromkeys(str(placed) for placed in placements))
    # commas, because rich takes a word between two colons for an emoji
    algo, dataset, model = (escape(plugins.short(choice)) for choice in (e.algo, e.dataset, e.model))
    data, sizes = problem.dataset, problem.sizes
    return [
        f"[bold]{algo}[/] on {dataset}, {sum(sizes):,} of {len(data.train_targets):,} "
        f"training examples, {len(data.test_targets):,} test",
        f"model {model}, P = {problem.net.layout.size:,}; {len(problem.clients)} clients ({e.partition}, "
        f"{min(sizes)} to {max(sizes)} examples)",
        f"{e.rounds} rounds{until}, participation {e.participation}, seed {e.seed}; {where} ({devices})",
    ]


def _total(fields: Mapping[str, Mapping[str, int]]) -> int:
    return sum(sum(layers.values()) for layers in fields.values())


def _rows_of(traffic: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Rows by what people ask for: each field's values (and indices), then header and framing."""
    rows: dict[str, dict[str, int]] = {}
    for direction in ("down", "up"):
        for field, layers in traffic.get(direction, {}).items():
            for layer, n in layers.items():
                name = layer if not field else field if layer == "values" else f"{field} {layer}"
                row = rows.setdefault(name, {})
                row[direction] = row.get(direction, 0) + n
    last = [name for name in ("header", "framing") if name in rows]
    return {name: rows[name] for name in [n for n in rows if n not in last] + last}


def grouped(n: int) -> str:
    return f"{n:,}"


def _number(x: float | None) -> str:
    """null in JSON is NaN to people."""
    return "nan" if x is None else f"{x:.4f}"
