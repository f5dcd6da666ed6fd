"""What a person sees: a header, progress while it runs, the bill at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

LAYERS = ("values", "indices", "header", "framing")


class Display:
    """Progress on a terminal, one plain line per evaluated round elsewhere."""

    def __init__(self, rounds: int, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, highlight=False)
        self._rounds = rounds
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("starting", total=rounds, status="")
        self._live = self.console.is_terminal and not quiet
        self._status = ""

    def header(self, lines: list[str]) -> None:
        for line in lines:
            self.console.print(line, soft_wrap=True)
        if self._live:
            self._progress.start()
            self._progress.refresh()

    def started(self) -> None:
        self._show("training", 0)

    def uploads(self, done: int, participants: int) -> None:
        """Only where a round is long enough for people to wonder."""

    def committed(self, round: int) -> None:
        self._show("training", round)

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        self._status = (
            f"accuracy {metrics['test_accuracy']:.4f}  NLL {metrics['test_nll']:.4f}  "
            f"down {megabytes(metrics['bytes_down'])}  up {megabytes(metrics['bytes_up'])}  "
            f"{metrics['seconds']:.2f} s/round"
        )
        if not self._live:
            width = len(str(self._rounds))
            line = f"round {metrics['round']:>{width}}/{self._rounds}  {self._status}"
            if not self.console.quiet:
                print(line, flush=True)  # rich would take a fair part of a millisecond

    def _show(self, what: str, completed: int) -> None:
        if self._live:
            self._progress.update(
                self._task, description=what, completed=completed, status=self._status, refresh=True
            )

    def stop(self) -> None:
        if self._live:
            self._progress.stop()
            self._live = False

    def bill(self, summary: Mapping[str, Any], out: str) -> None:
        """The summary table: what the run cost on the wire, by meaning."""
        self.stop()
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
        self.console.print()
        self.console.print(table)
        other = ", ".join(
            f"{kind} {grouped(sum(_total(sides) for sides in directions.values()))}"
            for kind, directions in summary["bytes"].items()
            if kind != "algorithm"
        )
        self.console.print(
            f"P = {grouped(summary['params'])} parameters; other traffic, in bytes: {other}", soft_wrap=True
        )
        if summary["test_accuracy"] is not None:
            self.console.print(
                f"[bold]{summary['status']}[/] after {summary['rounds']} rounds: test accuracy "
                f"[bold]{summary['test_accuracy']:.4f}[/], NLL {summary['test_nll']:.4f}"
            )
        if summary["seconds_round_median"] is not None:
            self.console.print(
                f"first round {summary['seconds_to_first_round']:.1f} s after the start, "
                f"then {summary['seconds_round_median']:.3f} s a round"
            )
        self.console.print(f"run folder: {out}", soft_wrap=True)


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


def megabytes(n: int) -> str:
    return f"{n / 1e6:.2f} MB" if n >= 1e5 else f"{n / 1e3:.1f} kB"
