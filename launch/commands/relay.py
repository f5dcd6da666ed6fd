"""fedsim relay: count the bytes of any tool that uses TCP, with a relay in front of its server."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedsim.errors import FedsimError, Interrupted, TaskError, UsageError, WireError
from fedsim.wire.ledger_rows import COLUMNS, Entry
from launch import terminal
from launch.commands.errors import Command
from launch.commands.shared import FOLDER, json_option
from launch.terminal import counted, megabytes, output_file, print_json, print_table
from workers.storage.atomic_files import disk_errors
from workers.storage.growing_file import LEDGER

if TYPE_CHECKING:
    from launch.processes.relay import Relay

_Document = dict[str, Any]
DOCUMENT, PAGE = "relay.json", "report.html"
SHOWN = 20
"""The maximum number of rows of a table on the terminal; the files have all rows."""
SIDES = ("down", "up")
UNIT = 4
"""Bytes per parameter (float32); --params P shows bytes in units of UNIT * P."""


@click.command(cls=Command, context_settings={"allow_interspersed_args": False})
@click.option(
    "--listen",
    metavar="ADDRESS:PORT",
    default="127.0.0.1:*",
    help="Where clients connect; port *: any free one.  [127.0.0.1:*]",
)
@click.option("--to", "target", metavar="ADDRESS:PORT", required=True, help="The server's address.")
@click.option(
    *("--round", "marker"),
    metavar="REGEX",
    help="A round begins with a line of COMMAND's output that matches; its group is the number.",
)
@click.option(
    "--params",
    type=click.IntRange(min=1),
    metavar="P",
    help="Number of the model's parameters: show bytes in units of 4 P, too.",
)
@click.option("--out", **FOLDER, help="Write ledger.csv, relay.json and report.html there.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def relay(
    listen: str,
    target: str,
    marker: str | None,
    params: int | None,
    out: Path | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Count the bytes of any tool: relay TCP to its server while COMMAND runs, or until Ctrl-C.

    Clients connect to the relay, whose address COMMAND gets as FEDSIM_RELAY. Bytes are counted by round,
    connection and direction and compared with the kernel's counters. Exit code: COMMAND's; 1 if the counts
    differ or nothing reached the server; 130 if a signal ended COMMAND.
    """
    from launch.processes.relay import Relay, run_relay
    from workers.transport.tcp_address import TcpAddress

    pattern = None if marker is None else _pattern(marker, command)
    if out is not None:
        _make(out)
    relay = Relay(TcpAddress.to_listen(_url(listen), "--listen"), TcpAddress.to_connect(_url(target), "--to"))
    terminal.say(f"relay: {relay.address} to {target}", err=True)

    def line(text: str) -> None:
        match = pattern.search(text) if pattern else None
        if match is not None:
            number = (match[1] if match.re.groups else None) or ""
            relay.rounds.begin(relay.seconds(), int(number) if re.fullmatch(r"\d{1,9}", number) else None)

    code, interrupted = asyncio.run(
        run_relay(relay, command, line if pattern else None, stdout=2 if as_json else 1)
    )
    counts = _document(relay, target, command, code, marker, params)
    if as_json:
        print_json(counts)
    else:
        _print(counts)
    if out is not None:
        _write(out, counts, relay.rounds.entries())
    if error := _error(counts, interrupted):
        raise error
    sys.exit(code or 0)


def _url(address: str) -> str:
    return address if "://" in address else f"tcp://{address}"


def _pattern(marker: str, command: tuple[str, ...]) -> re.Pattern[str]:
    """Return the compiled pattern of --round."""
    if not command:
        raise UsageError("--round reads the output of COMMAND; write it behind --")
    try:
        return re.compile(marker)
    except re.error as e:
        raise UsageError(f"--round {marker!r} is no regular expression: {e}") from None


def _make(folder: Path) -> None:
    """Make the folder of --out, before anything is counted."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--out {folder}: there is something already; name a new folder")
    with disk_errors(f"--out {folder}: cannot write there"):
        folder.mkdir(parents=True, exist_ok=True)


def _document(
    relay: Relay,
    target: str,
    command: tuple[str, ...],
    code: int | None,
    marker: str | None,
    params: int | None,
) -> _Document:
    """Return the document of --json and of relay.json."""
    connections = sorted(relay.ended, key=lambda connection: connection["number"])
    residuals = {side: [c["residual"][side] for c in connections] for side in SIDES}
    return {
        "listen": relay.address,
        "to": target,
        "command": command,
        "exit_code": code,
        "seconds": relay.seconds(),
        "round": marker,
        "params": params,
        "bytes": {side: sum(c["bytes"][side] for c in connections) for side in SIDES},
        "residual": {side: max(values, key=abs, default=0) for side, values in residuals.items()},
        "refused": relay.refused,
        "refusal": relay.refusal,
        "rounds": relay.rounds.rounds(),
        "connections": connections,
    }


def _error(counts: _Document, interrupted: bool) -> FedsimError | None:
    """Return an error if the counts are wrong, nothing was counted, or a command was interrupted."""
    for c in counts["connections"]:
        if any(c["residual"].values()):
            return WireError(
                f"connection {c['number']} from {c['peer']}: kernel minus relay is "
                f"{c['residual']['down']:+,} bytes down and {c['residual']['up']:+,} up, so do not use these "
                f"counts"
            )
    if interrupted:
        return Interrupted("interrupted") if counts["command"] else None
    if counts["connections"] or not counts["command"] or counts["exit_code"]:
        return None
    if counts["refused"]:
        return TaskError(
            f"{counts['to']} did not accept any of {counted(counts['refused'], 'connection')}: "
            f"{counts['refusal']}; start the server there, or correct --to"
        )
    listen = counts["listen"]
    return TaskError(f"nothing connected to {listen}; let the clients connect to the address in FEDSIM_RELAY")


def _heading(counts: _Document) -> str:
    """Return one line with the addresses and the traffic between them."""
    down, up = map(megabytes, counts["bytes"].values())
    code = counts["exit_code"]
    return (
        f"{counts['listen']} to {counts['to']}: {counted(len(counts['connections']), 'connection')}, "
        f"{down} down, {up} up in {terminal.duration(counts['seconds'])}"
        + ("" if code is None else f"; the command ended with exit code {code}")
    )


def _verdict(counts: _Document) -> str:
    """Return one or two lines: whether the kernel agrees, and how many connections were refused."""
    down, up = counts["bytes"].values()
    text = f"kernel and relay agree: {down:,} bytes down and {up:,} up, residual 0"
    if any(counts["residual"].values()):
        down, up = counts["residual"].values()
        text = f"kernel and relay differ: {down:+,} bytes down, {up:+,} up"
    if counts["refused"]:
        refused = counted(counts["refused"], "connection")
        text += f"\n{refused} refused by {counts['to']}: {counts['refusal']}"
    return text


def _tables(counts: _Document) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Return the headings and rows of the tables as text, by title."""
    unit = UNIT * (counts["params"] or 0)
    rounds = [
        {**row, **({f"{side} / {UNIT} P": row[side] / unit for side in SIDES} if unit else {})}
        for row in counts["rounds"]
    ]
    tables = {"by round": rounds, "by connection": counts["connections"]}
    return {
        title: ([*rows[0]], [[_cell(value) for value in row.values()] for row in rows])
        for title, rows in tables.items()
        if rows
    }


def _cell(value: object) -> str:
    """Return a value of a row as text; two directions as DOWN / UP."""
    if isinstance(value, dict):
        return " / ".join(map(_cell, value.values()))
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:.4f}" if isinstance(value, float) else str(value)
    )


def _print(counts: _Document) -> None:
    from rich.table import Table

    console = terminal.console()
    console.print(_heading(counts), soft_wrap=True)
    for title, (heads, rows) in _tables(counts).items():
        table = Table(header_style="bold", title=title)
        for n, head in enumerate(heads):
            table.add_column(head, justify="right" if n else "left")
        for row in rows[:SHOWN]:
            table.add_row(*row)
        if len(rows) > SHOWN:
            table.add_row(f"... {len(rows) - SHOWN:,} more", *[""] * (len(heads) - 1))
        console.print()
        print_table(console, table)
    console.print(f"\n{_verdict(counts)}", soft_wrap=True)


def _write(folder: Path, counts: _Document, entries: Sequence[Entry]) -> None:
    """Write ledger.csv, relay.json and the page."""
    from launch.results import html

    ledger = io.StringIO()
    writer = csv.writer(ledger, lineterminator="\n")
    writer.writerows([COLUMNS, *(entry[: len(COLUMNS)] for entry in entries)])
    tables = {title: [html.Table(*table)] for title, table in _tables(counts).items()}
    page = html.page(_heading(counts), [html.Text(_verdict(counts))], tables.items())
    document = json.dumps(counts, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    for name, text in ((LEDGER, ledger.getvalue()), (DOCUMENT, document), (PAGE, page)):
        with output_file(folder / name) as file:
            file.write(text.encode())
