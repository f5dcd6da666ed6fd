"""fedsim relay: count the bytes of any tool that uses TCP, with a relay in front of its server.

The relay does not interpret bytes. It books them by round, connection and direction: down from the server,
up to it. The end of one direction is forwarded while the other continues (half-close), a reset is forwarded
as a reset, and a slow receiver slows its sender down. At its end, the counts of each connection are compared
with the kernel's (TCP_INFO).
"""

from __future__ import annotations

import asyncio
import csv
import fcntl
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from fedsim.errors import FedsimError, Interrupted, TaskError, UsageError, WireError
from fedsim.wire.ledger_rows import COLUMNS
from launch import terminal
from launch.commands.errors import Command
from launch.commands.shared import FOLDER, json_option
from launch.numbers import counted, duration, size
from launch.table import Table
from workers.storage.atomic_files import disk_errors
from workers.storage.growing_file import LEDGER

if TYPE_CHECKING:
    from workers.transport.tcp_address import TcpAddress

VARIABLE, DOCUMENT = "FEDSIM_RELAY", "relay.json"
"""The environment variable in which the command gets the relay's address; the file of all counts."""
SIDES = ("down", "up")
CHUNK, LINE = 1 << 18, 1 << 16
"""Bytes that are forwarded at a time; the longest line of output that is searched as one."""
CONNECT_DEADLINE, GRACE, STOP_DEADLINE, TERM_DEADLINE = 10.0, 5.0, 10.0, 5.0
"""Seconds for a connection to the server; for connections to end by themselves after the command; for the
command to end after a signal; for its process group to end after SIGTERM before it is killed."""
LOOK = 0.05
"""Seconds between two looks at processes, whose end sends no event."""
SHOWN = 20
"""The maximum number of rows of a table on the terminal; relay.json has all rows."""
UNIT = 4
"""Bytes per parameter (float32); --params P shows bytes in units of UNIT * P."""
_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
"""The addresses that mean all addresses of this machine, each with the address that local clients use."""


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
@click.option("--out", **FOLDER, help="Write ledger.csv and relay.json there.")
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
    from workers.transport.tcp_address import TcpAddress

    pattern = None if marker is None else _pattern(marker, command)
    if out is not None:
        _make(out)
    urls = (address if "://" in address else f"tcp://{address}" for address in (listen, target))
    relay = Relay(TcpAddress.to_listen(next(urls), "--listen"), TcpAddress.to_connect(next(urls), "--to"))
    terminal.say(f"relay: {relay.address} to {target}", err=True)

    def line(text: str) -> None:
        match = pattern.search(text) if pattern else None
        if match is not None:
            number = (match[1] if match.re.groups else None) or ""
            relay.rounds.begin(relay.seconds(), int(number) if re.fullmatch(r"\d{1,9}", number) else None)

    stdout = 2 if as_json else 1
    code, interrupted = asyncio.run(run_relay(relay, command, line if pattern else None, stdout))
    connections = sorted(relay.ended, key=lambda connection: connection["number"])
    residuals = {side: [c["residual"][side] for c in connections] for side in SIDES}
    counts = {
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
    if as_json:
        terminal.print_json(counts)
    else:
        _print(counts)
    if out is not None:
        _write(out, counts, relay.rounds)
    if error := _error(counts, interrupted):
        raise error
    sys.exit(code or 0)


def _pattern(marker: str, command: tuple[str, ...]) -> re.Pattern[str]:
    """Return the compiled pattern of --round."""
    if not command:
        raise UsageError("--round reads the output of COMMAND; write it behind --")
    try:
        return re.compile(marker)
    except re.error as e:
        raise UsageError(f"--round {marker!r} is no regular expression: {e}") from None


# ---- counting and forwarding


@dataclass
class RelayedRounds:
    """Bytes by round, connection and direction; memory does not grow with the number of pieces.

    number: the current round; 0 for the traffic before the first line that begins a round.
    """

    number: int = 0
    cells: Counter[tuple[int, int, str]] = field(default_factory=Counter)
    _times: dict[int, tuple[float, float]] = field(default_factory=lambda: {0: (0.0, 0.0)})

    def begin(self, time: float, number: int | None = None) -> None:
        """Begin the next round, or round `number`; do nothing if `number` is not above the current round."""
        following = self.number + 1 if number is None else number
        if following > self.number:  # a program may write the same line to several logs
            self.number = following
            self._times[following] = (time, time)

    def book(self, time: float, connection: int, direction: str, size: int) -> None:
        """Book bytes in the current round. time: seconds since the relay began."""
        self.cells[self.number, connection, direction] += size
        self._times[self.number] = (self._times[self.number][0], time)

    def rounds(self) -> list[dict[str, Any]]:
        """Return the rounds of relay.json, with round 0 only if data passed before round 1."""
        result = []
        for number, (began, ended) in self._times.items():
            cells = {key[1:]: size for key, size in self.cells.items() if key[0] == number}
            sums = {side: sum(n for (_, at), n in cells.items() if at == side) for side in SIDES}
            if number or cells:
                of_round = {"number": number, "began": began, "ended": ended, **sums}
                result.append({**of_round, "connections": len({connection for connection, _ in cells})})
        return result


class Relay:
    """A relay that listens, and forwards every connection to a server.

    Attributes:
        address: ADDRESS:PORT at which the relay listens.
        near_address: The same address, as clients on this machine write it.
        rounds: The bytes so far.
        before_booking: Called before every booking; it may begin a round.
        ended: The connections that have ended, each as an object of relay.json (docs/reference.toml).
        refused: The number of connections that were reset because the server did not accept.
        refusal: The reason why the last refused connection was refused; '' if none was refused.
    """

    def __init__(self, listen: TcpAddress, server: TcpAddress) -> None:
        """Begin to listen. The server need not listen yet; its name is resolved now.

        Raises:
            UsageError: if this machine cannot listen there, or does not know the server's name.
        """
        from workers.transport.tcp_counters import allow_descriptors

        self._family, self._server = _resolved(server, f"--to: {server.host} is not known")
        cannot = f"--listen: this machine cannot listen at {listen}"
        family, address = _resolved(listen, cannot)
        try:
            self._listener = socket.create_server(address, family=family)
        except OSError as e:
            raise UsageError(f"{cannot}: {e.strerror}") from None
        self._listener.setblocking(False)
        allow_descriptors(1 << 16)  # each connection needs two
        host, port = self._listener.getsockname()[:2]
        if self._server[1] == port and (host in _EVERY or self._server[0] in (host, *_EVERY)):
            self._listener.close()
            raise UsageError(f"--to: {server} would be the relay's own address; name the server's")
        self.address, self.near_address = _text(host, port), _text(_EVERY.get(host, host), port)
        self.rounds = RelayedRounds()
        self.before_booking: Callable[[], object] = lambda: None
        self.ended: list[dict[str, Any]] = []
        self.refused, self.refusal = 0, ""
        self.open: set[asyncio.Task[None]] = set()
        self._began = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds since the relay began."""
        return time.monotonic() - self._began

    async def listen(self) -> None:
        """Accept connections, and forward each in a task of `open`, until cancelled."""
        loop, number = asyncio.get_running_loop(), 0
        while True:
            try:
                client, peer = await loop.sock_accept(self._listener)
            except OSError:  # too many open files, or a client that has gone
                await asyncio.sleep(LOOK)
                continue
            task = loop.create_task(self._relay(number, client, _text(*peer[:2])))
            self.open.add(task)
            task.add_done_callback(self.open.discard)
            number += 1

    def close(self) -> None:
        """Listen no more; the kernel refuses new connections."""
        self._listener.close()

    async def _relay(self, number: int, client: socket.socket, peer: str) -> None:
        """Forward one connection until its end, and compare its counts with the kernel's."""
        loop, began = asyncio.get_running_loop(), self.seconds()
        server = socket.socket(self._family, socket.SOCK_STREAM)
        with _closed_or_reset(client, server) as outcome:
            try:
                server.setblocking(False)
                async with asyncio.timeout(CONNECT_DEADLINE):
                    await loop.sock_connect(server, self._server)
            except OSError as e:
                self.refused += 1
                self.refusal = os.strerror(e.errno) if e.errno else f"no answer in {CONNECT_DEADLINE:.0f} s"
                return
            for stream in (client, server):  # urgent bytes stay in order
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
            up, down = _Direction(client, server), _Direction(server, client)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(up.forward(partial(self._book, number, "up")))
                    group.create_task(down.forward(partial(self._book, number, "down")))
                outcome["end"] = "closed"
            except* OSError:
                outcome["end"] = "reset"
            finally:
                end, sizes = outcome["end"], {"down": down.size, "up": up.size}
                residual = {"down": down.residual(end), "up": up.residual(end)}
                times = {"began": began, "ended": self.seconds()}
                counts = {"number": number, "peer": peer, **times, "end": end, "bytes": sizes}
                self.ended.append(counts | {"residual": residual})

    def _book(self, number: int, direction: str, size: int) -> None:
        self.before_booking()
        self.rounds.book(self.seconds(), number, direction, size)


@dataclass
class _Direction:
    """One direction of a connection. size: the bytes read so far."""

    source: socket.socket
    sink: socket.socket
    size: int = 0

    async def forward(self, book: Callable[[int], None]) -> None:
        """Forward all bytes and the FIN. book: called with the size of every piece."""
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(self.source, CHUNK):
            self.size += len(data)
            book(len(data))
            await loop.sock_sendall(self.sink, data)
        with suppress(OSError):  # the receiver has reset the connection: its other direction ends with that
            self.sink.shutdown(socket.SHUT_WR)

    def residual(self, end: str) -> int:
        """Return the kernel's count of received bytes, without unread ones and the FIN, minus `size`.

        It is unknown whether a FIN came before a reset or a cut. One additional byte is then taken for it.
        """
        from workers.transport.tcp_counters import tcp_info

        while True:
            received = tcp_info(self.source).received
            unread = int.from_bytes(fcntl.ioctl(self.source, termios.FIONREAD, bytes(4)), "little")
            if tcp_info(self.source).received == received:  # otherwise bytes have arrived in between
                break
        surplus = received - unread - self.size
        return surplus - (end == "closed" or surplus == 1)


@contextmanager
def _closed_or_reset(*ends: socket.socket) -> Iterator[dict[str, str]]:
    """Close sockets at the end of the block, by a reset unless it has set "end" to closed."""
    outcome = {"end": "cut"}
    try:
        yield outcome
    finally:
        for end in ends:
            if outcome["end"] != "closed":
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()


def _resolved(address: TcpAddress, otherwise: str) -> tuple[socket.AddressFamily, Any]:
    """Return the first address of a host, IPv4 before IPv6, with its family. otherwise: the error message."""
    try:
        family, host = address.resolved()[0]
        return family, socket.getaddrinfo(host, address.port, family, socket.SOCK_STREAM)[0][4]
    except (OSError, UnicodeError) as e:
        raise UsageError(f"{otherwise}: {getattr(e, 'strerror', None) or e}") from None


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# ---- the command


class _Process:
    """A started command with its process group, and its output if lines are searched."""

    def __init__(
        self, words: Sequence[str], address: str, line: Callable[[str], None] | None, stdout: int
    ) -> None:
        from launch.processes.fork_server import die_with_parent

        self._line = line or (lambda text: None)
        pipe = None if line is None else subprocess.PIPE
        flushed = {} if line is None else {"PYTHONUNBUFFERED": "1"}
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=stdout if pipe is None else pipe,
                stderr=pipe,
                env={**flushed, **os.environ, VARIABLE: address},
                process_group=0,
                preexec_fn=partial(die_with_parent, os.getpid()),  # safe with one thread
            )
        except OSError as e:
            raise UsageError(f"cannot start {words[0]}: {e.strerror}") from None
        pipes = {self._process.stdout: stdout, self._process.stderr: 2}
        self.sinks = {file: sink for file, sink in pipes.items() if file is not None}
        self._partial = dict.fromkeys(self.sinks, b"")
        for file in self.sinks:
            os.set_blocking(file.fileno(), False)
            asyncio.get_running_loop().add_reader(file, self._read, file)

    def read(self) -> None:
        """Pass on the output so far, so that a line begins its round before the bytes that follow it."""
        for pipe in [*self.sinks]:
            self._read(pipe)

    def _read(self, pipe: IO[bytes]) -> None:
        """Pass on what a pipe has, at most LINE bytes, so that connections have their turn."""
        try:
            text = os.read(pipe.fileno(), LINE)
        except BlockingIOError:
            return
        rest = memoryview(text)
        with suppress(OSError):  # the reader of our output has gone
            while rest:
                rest = rest[os.write(self.sinks[pipe], rest) :]
        *lines, last = (self._partial[pipe] + text).split(b"\n")
        if not text or len(last) > LINE:
            lines, last = [*lines, last], b""
        self._partial[pipe] = last
        for line in lines:
            self._line(line.decode(errors="replace"))
        if not text:
            self._close(pipe)

    def _close(self, pipe: IO[bytes]) -> None:
        asyncio.get_running_loop().remove_reader(pipe)
        del self.sinks[pipe]
        pipe.close()

    @property
    def code(self) -> int | None:
        """The exit code, or 128 plus the number of the signal that ended the command; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def signal(self, number: int) -> bool:
        """Send a signal to all processes of the command's group; return False if there is none."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> int | None:
        """Kill the remaining processes of the group; return the exit code."""
        self.signal(signal.SIGKILL)
        for pipe in [*self.sinks]:
            self._close(pipe)
        self._process.wait(STOP_DEADLINE)
        return self.code


async def run_relay(
    relay: Relay, words: Sequence[str], line: Callable[[str], None] | None, stdout: int
) -> tuple[int | None, bool]:
    """Relay until a command ends, or until SIGINT, SIGTERM or SIGHUP; then cut open connections.

    The command's process group gets the same signal. Its processes that still run GRACE seconds after the
    command's end get SIGTERM, then SIGKILL.

    Args:
        relay: The relay, which already listens.
        words: The command and its arguments; empty for no command.
        line: Called with every line of the command's output; with None, no output is read.
        stdout: The descriptor to which the command's standard output goes.

    Returns:
        The command's exit code (None without a command), and whether a signal ended the relay.

    Raises:
        UsageError: if the command cannot be started.
    """
    loop, signals, process = asyncio.get_running_loop(), list[int](), None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            loop.add_signal_handler(number, signals.append, number)
    listening = loop.create_task(relay.listen())
    try:
        if words:
            process = _Process(words, relay.near_address, line, stdout)
            relay.before_booking = process.read
        await _until(lambda: signals or listening.done() or (process and process.code is not None))
        if process is not None:
            if signals:
                process.signal(signals[0])
                await _until(lambda: process.code is not None, STOP_DEADLINE)
            listening.cancel()
            await asyncio.wait([listening])
            relay.close()
            await _until(lambda: not relay.open and not process.sinks, GRACE)
            if process.signal(signal.SIGTERM):
                await _until(lambda: not process.signal(0), TERM_DEADLINE)
    finally:
        for task in (listening, *relay.open):
            task.cancel()
        results = await asyncio.gather(listening, *relay.open, return_exceptions=True)
        relay.close()
        code = process.close() if process is not None else None
    for error in results:
        if isinstance(error, Exception):
            raise error
    return code, bool(signals)


async def _until(done: Callable[[], object], seconds: float = float("inf")) -> None:
    """Wait until a condition holds, at most `seconds`."""
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until:
        await asyncio.sleep(LOOK)


# ---- the result


def _error(counts: dict[str, Any], interrupted: bool) -> FedsimError | None:
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
    return TaskError(f"nothing connected to {listen}; let the clients connect to the address in {VARIABLE}")


def _print(counts: dict[str, Any]) -> None:
    """Print the addresses and the traffic between them, both tables, and whether the kernel agrees."""
    console, (down, up), code = terminal.console(), counts["bytes"].values(), counts["exit_code"]
    console.print(
        f"{counts['listen']} to {counts['to']}: {counted(len(counts['connections']), 'connection')}, "
        f"{size(down)} down, {size(up)} up in {duration(counts['seconds'])}"
        + ("" if code is None else f"; the command ended with exit code {code}"),
        soft_wrap=True,
    )
    unit = UNIT * (counts["params"] or 0)
    rounds = [
        {**row, **({f"{side} / {UNIT} P": row[side] / unit for side in SIDES} if unit else {})}
        for row in counts["rounds"]
    ]
    for title, rows in (("by round", rounds), ("by connection", counts["connections"])):
        cells = [[*map(_cell, row.values())] for row in rows[:SHOWN]]
        if len(rows) > SHOWN:
            cells.append([f"... {len(rows) - SHOWN:,} more", *[""] * (len(rows[0]) - 1)])
        if rows:
            Table([*rows[0]], cells, title=title).print(console)
    text = f"kernel and relay agree: {down:,} bytes down and {up:,} up, residual 0"
    if any(counts["residual"].values()):
        down, up = counts["residual"].values()
        text = f"kernel and relay differ: {down:+,} bytes down, {up:+,} up"
    if counts["refused"]:
        text += f"\n{counted(counts['refused'], 'connection')} refused by {counts['to']}: {counts['refusal']}"
    console.print(f"\n{text}", soft_wrap=True)


def _cell(value: object) -> str:
    """Return a value of a row as text; two directions as DOWN / UP."""
    if isinstance(value, dict):
        return " / ".join(map(_cell, value.values()))
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:.4f}" if isinstance(value, float) else str(value)
    )


def _make(folder: Path) -> None:
    """Make the folder of --out, before anything is counted."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--out {folder}: there is something already; name a new folder")
    with disk_errors(f"--out {folder}: cannot write there"):
        folder.mkdir(parents=True, exist_ok=True)


def _write(folder: Path, counts: dict[str, Any], rounds: RelayedRounds) -> None:
    """Write ledger.csv, in the columns of a run's, and relay.json."""
    with terminal.output_file(folder / DOCUMENT) as file:
        file.write((json.dumps(counts, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
    with (
        disk_errors(f"--out {folder}: cannot write there"),
        (folder / LEDGER).open("x", newline="") as ledger,
    ):
        writer = csv.writer(ledger, lineterminator="\n")
        writer.writerow(COLUMNS)
        for (number, connection, direction), size in sorted(rounds.cells.items()):
            writer.writerow(("opaque", number, -1, -1, connection, direction, "", "", "stream", "", 0, size))
