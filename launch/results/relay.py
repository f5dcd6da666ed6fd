"""The counts of fedsim relay as tables, one JSON document, ledger.csv and a page."""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.errors import FedsimError, Interrupted, TaskError, UsageError, WireError
from fedsim.wire.ledger_rows import COLUMNS, Entry
from fedsim.wire.relayed_rounds import RelayedRound, RelayedRounds, Silence
from launch import terminal
from launch.terminal import counted, megabytes, output_file, print_json, print_table
from workers.storage.atomic_files import disk_errors
from workers.storage.growing_file import LEDGER
from workers.transport.relay import DIRECTIONS, Relay, RelayedConnection

DOCUMENT, PAGE = "relay.json", "report.html"
SHOWN = 20
"""The maximum number of rows of a table on the terminal; the files have all rows."""
WIDTH = 4
"""Bytes per parameter (float32); a unit of P is WIDTH * P bytes."""
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


@dataclass(frozen=True)
class RelayReport:
    """The counts of a relay.

    Attributes:
        listen, target: ADDRESS:PORT of the relay and of the server.
        command: The words of the command; empty without a command.
        code: The exit code of the command; None without a command.
        seconds: Seconds from the relay's start to its end.
        rule: The rule that begins rounds: after a silence, or with a line that matches a regular expression.
        params: P, if it is known.
        rounds: The rounds, in ascending order.
        connections: The connections, in the order of acceptance.
        entries: The rows of ledger.csv.
        refused, refusal: How many connections were reset because the target did not accept, and its reason.
    """

    listen: str
    target: str
    command: tuple[str, ...]
    code: int | None
    seconds: float
    rule: Silence | str
    params: int | None
    rounds: list[RelayedRound]
    connections: list[RelayedConnection]
    entries: list[Entry]
    refused: int
    refusal: str

    @classmethod
    def of(
        cls,
        relay: Relay,
        rounds: RelayedRounds,
        target: str,
        command: tuple[str, ...],
        code: int | None,
        rule: Silence | str,
        params: int | None,
    ) -> RelayReport:
        """Collect the counts of a closed relay."""
        return cls(
            relay.address,
            target,
            command,
            code,
            relay.seconds(),
            rule,
            params,
            rounds.rounds(),
            sorted(relay.ended, key=lambda connection: connection.number),
            rounds.entries(),
            relay.refused,
            relay.refusal,
        )

    def total(self, direction: str) -> int:
        """Return the bytes of all rows of a direction."""
        return sum(entry.bytes for entry in self.entries if entry.direction == direction)

    def residual(self, direction: str) -> int:
        """Return the kernel's bytes minus the relay's, for the connection with the largest difference."""
        return max((connection.residual[direction] for connection in self.connections), key=abs, default=0)

    def error(self, interrupted: bool) -> FedsimError | None:
        """Return an error if the counts are wrong, nothing was counted, or a command was interrupted."""
        for c in self.connections:
            if any(c.residual.values()):
                return WireError(
                    f"connection {c.number} from {c.peer}: kernel minus relay is {c.residual['down']:+,} "
                    f"bytes down and {c.residual['up']:+,} up, so do not use these counts"
                )
        if interrupted:
            return Interrupted("interrupted") if self.command else None
        if self.connections or not self.command or self.code:
            return None
        if self.refused:
            return TaskError(
                f"{self.target} did not accept any of {counted(self.refused, 'connection')}: {self.refusal}; "
                f"start the server there, or correct --to"
            )
        return TaskError(
            f"nothing connected to {self.listen}; let the clients connect to the address in FEDSIM_RELAY"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the document of --json and of relay.json."""
        silence = self.rule if isinstance(self.rule, Silence) else None
        return {
            "listen": self.listen,
            "to": self.target,
            "command": self.command,
            "exit_code": self.code,
            "seconds": self.seconds,
            "silence": silence.seconds if silence else None,
            "smallest": silence.smallest if silence else None,
            "round": None if silence else self.rule,
            "params": self.params,
            "bytes": {side: self.total(side) for side in DIRECTIONS},
            "residual": {side: self.residual(side) for side in DIRECTIONS},
            "refused": self.refused,
            "refusal": self.refusal,
            "rounds": self.rounds,
            "connections": self.connections,
        }

    def show(self, folder: Path | None, as_json: bool) -> None:
        """Print the tables or the document; first write the files if there is a folder.

        Raises:
            FedsimError: If a file cannot be written.
        """
        failure = None
        try:
            if folder is not None:
                self._write(folder)
        except FedsimError as e:
            failure = e
        if as_json:
            print_json(self.to_json())
        else:
            self._print()
        if warning := self.warning():
            terminal.say(f"warning: {warning}", err=True)
        if failure is not None:
            raise failure
        if folder is not None and not as_json:
            terminal.console().print(f"{folder}/{PAGE}, {LEDGER}, {DOCUMENT}", soft_wrap=True, markup=False)

    def _print(self) -> None:
        from rich.table import Table as Shown

        console = terminal.console()
        console.print(self.heading(), soft_wrap=True, markup=False)
        for title, (heads, rows) in self.tables().items():
            shown = Shown(header_style="bold", title=title)
            for n, head in enumerate(heads):
                shown.add_column(head, justify="right" if n else "left")
            for row in rows[:SHOWN]:
                shown.add_row(*row)
            if len(rows) > SHOWN:
                shown.add_row(f"... {len(rows) - SHOWN:,} more", *[""] * (len(heads) - 1))
            console.print()
            print_table(console, shown)
        console.print()
        console.print(self.verdict(), soft_wrap=True, markup=False)

    def warning(self) -> str:
        """Return the reason why the rounds are probably wrong; '' if nothing suggests that."""
        sizes = {r.number: r.down + r.up for r in self.rounds}
        early = sizes.get(0, 0)
        empty = [number for number, size in sizes.items() if not size]
        if isinstance(self.rule, Silence) or not empty or early <= sum(sizes.values()) / 2:
            return ""
        return (
            f"{early:,} bytes came before the first line that matches --round, none in round {empty[0]}: "
            f"COMMAND seems to write its lines late; let it flush them, e.g. with stdbuf -oL"
        )

    def heading(self) -> str:
        """Return one line with the addresses and the traffic between them."""
        down, up = (megabytes(self.total(side)) for side in DIRECTIONS)
        ended = "" if self.code is None else f"; the command ended with exit code {self.code}"
        return (
            f"{self.listen} to {self.target}: {counted(len(self.connections), 'connection')}, {down} down, "
            f"{up} up in {terminal.duration(self.seconds)}{ended}"
        )

    def verdict(self) -> str:
        """Return one or two lines: whether the kernel agrees, and how many connections were refused."""
        down, up = (f"{self.total(side):,}" for side in DIRECTIONS)
        differences = [self.residual(side) for side in DIRECTIONS]
        agree = f"kernel and relay agree: {down} bytes down and {up} up, residual 0"
        differ = f"kernel and relay differ: {differences[0]:+,} bytes down, {differences[1]:+,} up"
        text = differ if any(differences) else agree
        if self.refused:
            text += f"\n{counted(self.refused, 'connection')} refused by {self.target}: {self.refusal}"
        return text

    def tables(self) -> dict[str, Table]:
        """Return the headings and rows of the tables as text, by title."""
        unit = self.params and WIDTH * self.params
        heads = ("round", "began", "ended", "connections", "down", "up")
        rows = [
            (
                *(str(r.number), f"{r.began:.2f} s", f"{r.ended:.2f} s", str(r.connections)),
                *(f"{r.down:,}", f"{r.up:,}"),
                *((f"{r.down / unit:.4f}", f"{r.up / unit:.4f}") if unit else ()),
            )
            for r in self.rounds
        ]
        units = ("down / 4 P", "up / 4 P") if unit else ()
        return {
            "by round": ((*heads, *units), rows),
            "by connection": (
                ("connection", "from", "down", "up", "end", "undelivered", "retransmitted", "residual"),
                list(self._connections()),
            ),
        }

    def _connections(self) -> Iterator[tuple[str, ...]]:
        for c in self.connections:
            sums = (f"{sum(v.values()):,}" for v in (c.undelivered, c.retransmitted, c.residual))
            yield (str(c.number), c.peer, f"{c.bytes['down']:,}", f"{c.bytes['up']:,}", c.end, *sums)

    def _write(self, folder: Path) -> None:
        """Write ledger.csv, relay.json and the page."""
        for name, text in ((LEDGER, _csv(self.entries)), (DOCUMENT, _json(self)), (PAGE, self._page())):
            with output_file(folder / name) as file:
                file.write(text.encode())

    def _page(self) -> str:
        import numpy as np

        from launch.results import html
        from launch.results.figures import Bars, bar_chart

        numbers = np.array([r.number for r in self.rounds], float)
        drawn = [
            bar_chart(
                f"bytes {side} by round",
                ("round", "MB"),
                numbers - 0.4,
                numbers + 0.4,
                [Bars(side, np.array([getattr(r, side) for r in self.rounds]) / 1e6, slot)],
                said=lambda n: f"round {self.rounds[n].number}",
            )
            for slot, side in enumerate(DIRECTIONS)
        ]
        sizes = {f"bytes {side}": f"{self.total(side):,}" for side in DIRECTIONS}
        tiles = {
            **sizes,
            "rounds": str(sum(r.number > 0 for r in self.rounds)),
            "connections": str(len(self.connections)),
            "residual": f"{max((self.residual(side) for side in DIRECTIONS), key=abs):+,}".replace("+0", "0"),
        }
        parts = [html.tiles(tiles), html.soft(self.verdict()), html.charts(*drawn, across=2)]
        if warning := self.warning():
            parts.insert(1, html.soft(f"warning: {warning}"))
        parts += [html.section(title, html.table(*table)) for title, table in self.tables().items()]
        settings = {key: value for key, value in self.to_json().items() if not isinstance(value, list | dict)}
        parts.append(html.section("settings", html.pairs({**settings, "command": " ".join(self.command)})))
        return html.page(f"{self.listen} to {self.target}", parts)


def new_folder(folder: Path) -> None:
    """Make the folder of --out, before anything is counted.

    Raises:
        UsageError: If the folder exists and is not empty, or is a file.
        DiskError: If the folder or a file in it cannot be created.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--out {folder}: there is something already; name a new folder")
    with disk_errors(f"--out {folder}: cannot write there"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def _csv(entries: Sequence[Entry]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(entry[: len(COLUMNS)] for entry in entries)
    return text.getvalue()


def _json(report: RelayReport) -> str:
    import json

    return json.dumps(terminal.plain(report.to_json()), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
