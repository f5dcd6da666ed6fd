"""fedsim relay: count the bytes of any tool that uses TCP, with a relay in front of its server."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from fedsim.errors import UsageError
from fedsim.wire.relayed_rounds import SILENCE, SMALLEST, RelayedRounds, Silence
from launch import terminal
from launch.commands.errors import Command
from launch.commands.shared import FOLDER, json_option


@click.command(cls=Command, context_settings={"allow_interspersed_args": False})
@click.option(
    "--listen",
    metavar="ADDRESS:PORT",
    default="127.0.0.1:*",
    help="Where clients connect; port *: any free one.  [127.0.0.1:*]",
)
@click.option("--to", "target", metavar="ADDRESS:PORT", required=True, help="The server's address.")
@click.option(
    "--silence",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help=f"A round begins when the server sends --smallest bytes after a pause of so long.  [{SILENCE:g}]",
)
@click.option(
    "--smallest",
    type=click.IntRange(min=1),
    metavar="BYTES",
    help=f"A burst of fewer bytes, such as a heartbeat, ends no silence.  [{SMALLEST}]",
)
@click.option(
    *("--round", "marker"),
    metavar="REGEX",
    help="Instead: a round begins with a line of COMMAND's output that matches; its group is the number.",
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
    silence: float | None,
    smallest: int | None,
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
    from launch.processes.relayed_command import run_relay
    from launch.results.relay import RelayReport, new_folder
    from workers.transport.relay import Relay
    from workers.transport.tcp_address import TcpAddress

    pattern = _pattern(marker, silence, smallest, command)
    if out is not None:
        new_folder(out)
    rule = Silence(silence or SILENCE, smallest or SMALLEST) if pattern is None else None
    rounds = RelayedRounds(rule)
    relay = Relay(
        TcpAddress.to_listen(_url(listen), "--listen"),
        TcpAddress.to_connect(_url(target), "--to"),
        rounds.add,
    )
    terminal.say(f"relay: {relay.address} to {target}", err=True)

    def line(text: str) -> None:
        match = pattern.search(text) if pattern else None
        if match is not None:
            number = (match[1] if match.re.groups else None) or ""
            rounds.begin(relay.seconds(), int(number) if re.fullmatch(r"\d{1,9}", number) else None)

    outcome = run_relay(relay, command, line if pattern else None, as_json)
    report = RelayReport.of(relay, rounds, target, command, outcome.code, rule or str(marker), params)
    report.show(out, as_json)
    if error := report.error(outcome.interrupted):
        raise error
    sys.exit(outcome.code or 0)


def _url(address: str) -> str:
    return address if "://" in address else f"tcp://{address}"


def _pattern(
    marker: str | None, silence: float | None, smallest: int | None, command: tuple[str, ...]
) -> re.Pattern[str] | None:
    """Return the compiled pattern of --round; None if the option is not given."""
    if marker is None:
        return None
    if silence is not None or smallest is not None:
        raise UsageError("--round replaces --silence and --smallest; give one of them")
    if not command:
        raise UsageError("--round reads the output of COMMAND; write it behind --")
    try:
        return re.compile(marker)
    except re.error as e:
        raise UsageError(f"--round {marker!r} is no regular expression: {e}") from None
