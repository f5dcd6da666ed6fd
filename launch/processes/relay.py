"""Count the bytes that another tool sends over TCP, with a relay in front of its server (`fedsim relay`).

The relay does not interpret bytes. It books them by round, connection and direction: down from the server,
up to it. The end of one direction is forwarded while the other continues (half-close), a reset is forwarded
as a reset, and a slow receiver slows its sender down. At its end, the counts of each connection are compared
with the kernel's (TCP_INFO).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import struct
import subprocess
import termios
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

from fedsim.errors import UsageError
from fedsim.wire.header import NONE
from fedsim.wire.ledger_rows import Entry
from launch.processes.fork_server import die_with_parent
from workers.transport.tcp_address import TcpAddress
from workers.transport.tcp_counters import allow_descriptors, tcp_info

VARIABLE = "FEDSIM_RELAY"
"""The environment variable in which the command gets the relay's address."""
DIRECTIONS = ("down", "up")
CONNECT_DEADLINE = 10.0
"""Seconds for a connection to the server."""
GRACE = 5.0
"""Seconds that connections have to end by themselves after the command has ended."""
STOP_DEADLINE = 10.0
"""Seconds that the command has to end after a signal was forwarded to it."""
TERM_DEADLINE = 5.0
"""Seconds that the command's process group has to end after SIGTERM before it is killed."""
LOOK = 0.05
"""Seconds between two looks at what sends no event: processes, and bytes that are not confirmed."""
LINE = 1 << 16
"""The longest line of output that is searched as one, in bytes; also the capacity of a pipe."""
_CLOSED, _FIN_RECEIVED = 7, (8, 9, 11)
"""States of TCP: CLOSED; and CLOSE_WAIT, LAST_ACK, CLOSING."""
_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
"""The addresses that mean all addresses of this machine, each with the address that local clients use."""


@dataclass
class RelayedRounds:
    """Bytes by round, connection and direction; memory does not grow with the number of pieces.

    number: the current round; 0 for the traffic before the first line that begins a round.
    """

    number: int = 0
    _bytes: Counter[tuple[int, int, str]] = field(default_factory=Counter)
    _times: dict[int, tuple[float, float]] = field(default_factory=lambda: {0: (0.0, 0.0)})

    def begin(self, time: float, number: int | None = None) -> None:
        """Begin the next round, or round `number`; do nothing if `number` is not above the current round."""
        following = self.number + 1 if number is None else number
        if following > self.number:  # a program may write the same line to several logs
            self.number = following
            self._times[following] = (time, time)

    def book(self, time: float, connection: int, direction: str, size: int) -> None:
        """Book bytes in the current round. time: seconds since the relay began."""
        self._bytes[self.number, connection, direction] += size
        self._times[self.number] = (self._times[self.number][0], time)

    def rounds(self) -> list[dict[str, Any]]:
        """Return the rounds of relay.json, with round 0 only if data passed before round 1."""
        result = []
        for number, (began, ended) in self._times.items():
            cells = {key[1:]: size for key, size in self._bytes.items() if key[0] == number}
            sums = {side: sum(n for (_, at), n in cells.items() if at == side) for side in DIRECTIONS}
            if number or cells:
                of_round = {"number": number, "began": began, "ended": ended, **sums}
                result.append({**of_round, "connections": len({connection for connection, _ in cells})})
        return result

    def entries(self) -> list[Entry]:
        """Return the rows of ledger.csv, ordered by round, connection and direction."""
        return [
            Entry("opaque", number, NONE, NONE, connection, direction, "", "", "stream", "", 0, size)
            for (number, connection, direction), size in sorted(self._bytes.items())
        ]


class _End(asyncio.Protocol):
    """One side of a connection, which forwards what it reads to the other side.

    Attributes:
        read: The bytes read so far.
        finished: True if this side has sent its FIN, and all bytes before it are read.
        lost: True if the connection was reset, or does not answer.
    """

    def __init__(self, begun: Callable[[_End], object]) -> None:
        """Wait for a connection. begun: called with this end once it is connected."""
        self.read, self.finished, self.lost = 0, False, False
        self._begun, self._changed = begun, asyncio.Event()

    def join(self, other: _End, passed: Callable[[int], object], changed: asyncio.Event) -> None:
        """Begin to forward. passed: called with the size of every piece. changed: set at this side's end."""
        self._other, self._passed, self._changed = other, passed, changed
        self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._kernel: socket.socket = transport.get_extra_info("socket").dup()  # outlives the transport
        self.peer = _text(*transport.get_extra_info("peername", ("", 0))[:2])
        transport.pause_reading()
        self._begun(self)

    def data_received(self, data: bytes) -> None:
        self.read += len(data)
        self._passed(len(data))
        self._other._transport.write(data)

    def eof_received(self) -> bool:
        self.finished = True
        self._other._transport.write_eof()
        self._changed.set()
        return True  # the other direction continues

    def pause_writing(self) -> None:
        self._other._transport.pause_reading()

    def resume_writing(self) -> None:
        self._other._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._changed.set()

    @property
    def shut(self) -> bool:
        """True if all bytes of the other side, and its FIN, were sent to this one."""
        return self._other.finished and not self._transport.get_write_buffer_size()

    @property
    def complete(self) -> bool:
        """True if this side has confirmed all of that."""
        return self.shut and not self._queued(termios.TIOCOUTQ)

    @property
    def gone(self) -> bool:
        """True if this side can confirm nothing any more."""
        return self.lost or (tcp_info(self._kernel).state == _CLOSED and not self.complete)

    def undelivered(self, connects: bool) -> int:
        """Return the other side's bytes minus those that this side has confirmed, as the kernel counts them.

        connects: True if the relay opened the connection, because the kernel then counts its SYN.
        """
        return self._other.read - (tcp_info(self._kernel).acked - connects - self.complete)

    def surplus(self) -> int:
        """Return the kernel's count of the bytes read, without unread bytes and the FIN, minus `read`.

        It is unknown whether a FIN came before a reset. One additional byte is then considered the FIN.
        """
        while True:
            info, unread = tcp_info(self._kernel), self._queued(termios.FIONREAD)
            if tcp_info(self._kernel) == info:  # otherwise bytes have arrived in between
                break
        surplus = info.received - unread - self.read
        fin = self.finished or info.state in _FIN_RECEIVED or (info.state == _CLOSED and surplus == 1)
        return surplus - fin

    def close(self, reset: bool) -> None:
        """Close the connection. reset: discard unsent bytes, and let the other side see a reset."""
        if reset:
            self._kernel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()
        self._kernel.close()

    def _queued(self, queue: int) -> int:
        """Return the length of a queue in the kernel. queue: FIONREAD or TIOCOUTQ."""
        return int.from_bytes(fcntl.ioctl(self._kernel, queue, bytes(4)), "little")


class Relay:
    """A relay that listens, and forwards every connection to a server.

    Attributes:
        address: ADDRESS:PORT at which the relay listens.
        near_address: The same address, as clients on this machine write it.
        rounds: The bytes so far.
        before_booking: Called before every booking; it may begin a round.
        ended: The connections that have ended, each as an object of relay.json (docs/reference.md).
        refused: The number of connections that were reset because the server did not accept.
        refusal: The reason why the last refused connection was refused; '' if none was refused.
    """

    def __init__(self, listen: TcpAddress, server: TcpAddress) -> None:
        """Begin to listen. The server need not listen yet; its name is resolved now.

        Raises:
            UsageError: if this machine cannot listen there, or does not know the server's name.
        """
        _, self._server = _resolved(server, f"--to: {server.host} is not known")
        cannot = f"--listen: this machine cannot listen at {listen}"
        family, address = _resolved(listen, cannot)
        try:
            self._listener = socket.create_server(address, family=family)
        except OSError as e:
            raise UsageError(f"{cannot}: {e.strerror}") from None
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)  # inherited: bytes stay in order
        allow_descriptors(1 << 16)  # each connection needs four
        host, port = self._listener.getsockname()[:2]
        if self._server[1] == port and (host in _EVERY or self._server[0] in (host, *_EVERY)):
            self._listener.close()
            raise UsageError(f"--to: {server} would be the relay's own address; name the server's")
        self.address, self.near_address = _text(host, port), _text(_EVERY.get(host, host), port)
        self.rounds = RelayedRounds()
        self.before_booking: Callable[[], object] = lambda: None
        self.ended: list[dict[str, Any]] = []
        self.refused, self.refusal = 0, ""
        self._began, self._accepted, self._stopped = time.monotonic(), 0, asyncio.Event()

    def seconds(self) -> float:
        """Return the seconds since the relay began."""
        return time.monotonic() - self._began

    async def serve(self) -> None:
        """Serve connections until stop_listening() was called and all have ended; cut them if cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as connections:

            def begin(end: _End) -> None:
                if self._stopped.is_set():
                    end.close(reset=True)
                else:
                    connections.create_task(self._relay(self._accepted, end))
                    self._accepted += 1

            listening = await loop.create_server(lambda: _End(begin), sock=self._listener)
            try:
                await self._stopped.wait()
            finally:
                self._stopped.set()
                listening.close()

    def stop_listening(self) -> None:
        """Refuse new connections; those that are open continue."""
        self._stopped.set()

    def close(self) -> None:
        """Close the listening socket, which serve() closes only if it has begun."""
        self._listener.close()

    async def _relay(self, number: int, client: _End) -> None:
        """Forward one connection until its end, and compare its counts with the kernel's."""
        loop, began, changed = asyncio.get_running_loop(), self.seconds(), asyncio.Event()
        server, incomplete = _End(lambda _: None), "cut"
        try:
            async with asyncio.timeout(CONNECT_DEADLINE):
                await loop.create_connection(lambda: server, *self._server[:2])
        except OSError as e:
            self.refused += 1
            self.refusal = os.strerror(e.errno) if e.errno else f"no answer in {CONNECT_DEADLINE:.0f} s"
            client.close(reset=True)
            return
        except asyncio.CancelledError:
            client.close(reset=True)
            raise
        client.join(server, partial(self._book, number, "up"), changed)
        server.join(client, partial(self._book, number, "down"), changed)
        try:
            while not (client.lost or server.lost or (client.finished and server.finished)):
                await changed.wait()
                changed.clear()
            while not (client.gone or server.gone or (client.complete and server.complete)):
                await asyncio.sleep(LOOK)  # the receiver may be as slow as it likes
            incomplete = "reset"
        finally:
            complete = client.complete and server.complete
            missing = {"down": client.undelivered(connects=False), "up": server.undelivered(connects=True)}
            at_sink = {side: -n if complete or n < 0 else 0 for side, n in missing.items()}
            at_source = {"down": server.surplus(), "up": client.surplus()}
            self.ended.append(
                {
                    "number": number,
                    "peer": client.peer,
                    "began": began,
                    "ended": self.seconds(),
                    "end": "closed" if complete else incomplete,
                    "bytes": {"down": server.read, "up": client.read},
                    "undelivered": {side: n + at_sink[side] for side, n in missing.items()},
                    "residual": {side: max(at_source[side], n, key=abs) for side, n in at_sink.items()},
                }
            )
            forwarded = client.shut and server.shut  # the kernel then delivers what is not confirmed yet
            client.close(reset=not forwarded)
            server.close(reset=not forwarded)

    def _book(self, number: int, direction: str, size: int) -> None:
        self.before_booking()
        self.rounds.book(self.seconds(), number, direction, size)


def _resolved(address: TcpAddress, otherwise: str) -> tuple[socket.AddressFamily, Any]:
    """Return the first address of a host, IPv4 before IPv6, with its family. otherwise: the error message."""
    try:
        family, host = address.resolved()[0]
        return family, socket.getaddrinfo(host, address.port, family, socket.SOCK_STREAM)[0][4]
    except (OSError, UnicodeError) as e:
        raise UsageError(f"{otherwise}: {getattr(e, 'strerror', None) or e}") from None


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Command:
    """A started command with its process group, and its output if lines are searched."""

    def __init__(
        self, words: Sequence[str], address: str, line: Callable[[str], None] | None, stdout: int
    ) -> None:
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
        self._sinks = {file: sink for file, sink in pipes.items() if file is not None}
        self._partial = dict.fromkeys(self._sinks, b"")
        for file in self._sinks:
            os.set_blocking(file.fileno(), False)
            asyncio.get_running_loop().add_reader(file, self._read, file)

    def read(self) -> None:
        """Pass on the output so far."""
        for pipe in [*self._sinks]:
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
                rest = rest[os.write(self._sinks[pipe], rest) :]
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
        del self._sinks[pipe]
        pipe.close()

    @property
    def quiet(self) -> bool:
        """True if no process has the command's output open any more."""
        return not self._sinks

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
        for pipe in [*self._sinks]:
            self._close(pipe)
        self._process.wait(STOP_DEADLINE)
        return self.code


async def run_relay(
    relay: Relay, words: Sequence[str], line: Callable[[str], None] | None = None, stdout: int = 1
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
    loop, signals, command = asyncio.get_running_loop(), list[int](), None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            loop.add_signal_handler(number, signals.append, number)
    serving = loop.create_task(relay.serve())
    try:
        if words:
            command = _Command(words, relay.near_address, line, stdout)
            relay.before_booking = command.read
        await _until(lambda: signals or serving.done() or (command and command.code is not None))
        if command is not None:
            if signals:
                command.signal(signals[0])
                await _until(lambda: command.code is not None, STOP_DEADLINE)
            relay.stop_listening()
            await _until(lambda: serving.done() and command.quiet, GRACE)
            if command.signal(signal.SIGTERM):
                await _until(lambda: not command.signal(0), TERM_DEADLINE)
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        relay.close()
        code = command.close() if command is not None else None
    if not serving.cancelled():
        serving.result()  # raises its error
    return code, bool(signals)


async def _until(done: Callable[[], object], seconds: float = float("inf")) -> None:
    """Wait until a condition holds, at most `seconds`."""
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until:
        await asyncio.sleep(LOOK)
