"""A TCP relay that counts the bytes it forwards, and compares its counts with the kernel's.

The relay does not interpret bytes. One thread serves all connections; each direction of a connection buffers
at most one piece, so that a slow receiver slows its sender down. The end of one direction is forwarded while
the other continues (half-close), and a reset is forwarded as a reset.
"""

from __future__ import annotations

import errno
import fcntl
import os
import selectors
import socket
import struct
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fedsim.errors import UsageError
from workers.transport.tcp_address import TcpAddress
from workers.transport.tcp_counters import allow_descriptors, tcp_info

PIECE = 1 << 18
"""The maximum number of bytes that are read at once."""
CONNECT_DEADLINE = 10.0
"""Seconds for a connection to the target."""
DESCRIPTORS = 1 << 16
"""The limit of descriptors, if the system allows it; each connection needs two."""
RETRY = 0.05
"""Seconds between two checks whether connections have drained, or whether a descriptor is free."""
_RESET = struct.pack("ii", 1, 0)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_BUSY = (errno.EAGAIN, errno.EINPROGRESS)
_FIN_RECEIVED = (8, 9, 11)
"""The states CLOSE_WAIT, LAST_ACK and CLOSING."""
_CLOSED = 7
_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
"""The addresses that mean all addresses of this machine, each with the address that local clients use."""
DIRECTIONS = ("down", "up")


@dataclass(frozen=True)
class RelayedConnection:
    """The record of a connection that has ended. Bytes go up to the target, and down from the target.

    Attributes:
        number: The number of the connection, from 0, in the order of acceptance.
        peer: ADDRESS:PORT of the side that connected to the relay.
        began, ended: Seconds since the relay began.
        end: "closed" if both sides closed it, "reset" if one side reset it, "cut" if the relay ended first.
            If both sides had closed the connection before the cut, the kernel still delivers its bytes.
        bytes: The bytes that the relay has read in order to forward them, by direction.
        undelivered: The part of `bytes` that the receiver had not confirmed at the end, by direction; 0
            unless `end` is "reset" or "cut".
        retransmitted: The bytes that the kernel sent to the receiver again, by direction.
        residual: The kernel's count minus the relay's, by direction, at the socket that differs more.
    """

    number: int
    peer: str
    began: float
    ended: float
    end: str
    bytes: dict[str, int]
    undelivered: dict[str, int]
    retransmitted: dict[str, int]
    residual: dict[str, int]


_Address = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]


@dataclass
class _Stream:
    """One direction of a connection: from one socket to the other."""

    source: socket.socket
    sink: socket.socket
    read: int = 0
    written: int = 0
    held: memoryview = field(default_factory=lambda: memoryview(b""))
    ended: bool = False
    """True if the source has sent its FIN, and all bytes before it are read."""
    shut: bool = False
    """True if the FIN was forwarded to the sink."""


class _Connection:
    """An accepted connection and the relay's connection to the target for it."""

    def __init__(self, number: int, accepted: socket.socket, began: float, addresses: list[_Address]) -> None:
        self.number, self.accepted, self.began = number, accepted, began
        self.peer = _text(accepted.getpeername())
        self.left = addresses
        """The addresses of the target that are still to be tried."""
        self.target: socket.socket | None = None
        self.connected = False
        self.deadline = began + CONNECT_DEADLINE
        self.streams: dict[str, _Stream] = {}
        self.interest: dict[socket.socket, int] = {}
        self.reset: set[socket.socket] = set()
        """The sockets that have raised an error, which a later call would not raise again."""

    def join(self) -> None:
        """Begin to forward, because the target has accepted."""
        assert self.target is not None
        self.connected = True
        self.streams = {
            "down": _Stream(self.target, self.accepted),
            "up": _Stream(self.accepted, self.target),
        }


class _ResetError(Exception):
    """A call on a socket has failed because the other side reset the connection or does not answer."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__()
        self.end = end


class Relay:
    """A relay that listens, and forwards every connection to a target. turn() does all the work.

    Attributes:
        address: ADDRESS:PORT at which the relay listens.
        near_address: The same address, as clients on this machine write it.
        ended: The connections that have ended, in the order of their ends.
        refused: The number of connections that were reset because the target did not accept.
        refusal: The reason why the last refused connection was refused; '' if none was refused.
    """

    def __init__(
        self, listen: TcpAddress, target: TcpAddress, passed: Callable[[float, int, str, int], None]
    ) -> None:
        """Begin to listen.

        Args:
            listen: The address to listen at; with port 0 the system chooses a port.
            target: The server. It need not listen yet; its name is resolved now.
            passed: Called for every piece before it is forwarded, with seconds since the relay began, the
                number of the connection, the direction and the number of bytes.

        Raises:
            UsageError: if this machine cannot listen there, the target's name is not known, or the relay
                would connect to itself.
        """
        self._target, self._passed = target, passed
        try:
            self._addresses = [_address(family, host, target.port) for family, host in target.resolved()]
        except (OSError, UnicodeError) as e:
            why = getattr(e, "strerror", None) or e
            raise UsageError(f"--to: {target.host} is not known: {why}") from None
        try:
            family, host = listen.resolved()[0]
            self._listener = socket.create_server(_address(family, host, listen.port)[1], family=family)
        except (OSError, UnicodeError) as e:
            why = getattr(e, "strerror", None) or e
            raise UsageError(f"--listen: this machine cannot listen at {listen}: {why}") from None
        if any(_reaches(self._listener, *address) for address in self._addresses):
            self._listener.close()
            raise UsageError(f"--to: {target} is the relay's own address; name the server's")
        self._listener.setblocking(False)
        allow_descriptors(DESCRIPTORS)
        self.address = _text(self._listener.getsockname())
        host, port = self._listener.getsockname()[:2]
        self.near_address = _text((_EVERY.get(host, host), port))
        self._began = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._paused_until: float | None = None
        self._open: dict[int, _Connection] = {}
        self._draining: dict[int, _Connection] = {}
        """Connections that both sides have closed, but whose last bytes are not confirmed yet."""
        self._look = 0.0
        """The time of the next check of draining connections."""
        self._watched: dict[int, Callable[[], object]] = {}
        self._accepted = 0
        self.ended: list[RelayedConnection] = []
        self.refused = 0
        self.refusal = ""

    @property
    def busy(self) -> int:
        """The number of connections that have not ended."""
        return len(self._open) + len(self._draining)

    def seconds(self) -> float:
        """Return the seconds since the relay began."""
        return time.monotonic() - self._began

    def watch(self, descriptor: int, ready: Callable[[], object]) -> None:
        """Call `ready` in every turn in which the descriptor can be read, before any connection is served.

        A message that a process writes to a pipe before it sends bytes is thus read before these bytes.
        """
        self._watched[descriptor] = ready
        self._selector.register(descriptor, selectors.EVENT_READ)

    def ignore(self, descriptor: int) -> None:
        """End watch(); do nothing if the descriptor is not watched."""
        if self._watched.pop(descriptor, None) is not None:
            self._selector.unregister(descriptor)

    def turn(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for events, and handle them."""
        waits = [timeout]
        if self._draining or self._paused_until is not None:
            waits.append(RETRY)
        waits += [
            connection.deadline - self.seconds()
            for connection in self._open.values()
            if not connection.connected
        ]
        events = self._selector.select(max(0.0, min(waits)))
        for key, _ in events:
            if key.fd in self._watched:
                self._watched[key.fd]()
        for key, mask in events:
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _Connection) and key.data.number in self._open:
                self._serve(key.data, key.fileobj, mask)
        for connection in list(self._open.values()):
            if not connection.connected and self.seconds() > connection.deadline:
                self._next_address(connection, f"no answer in {CONNECT_DEADLINE:.0f} s")
        if self._draining and self.seconds() >= self._look:
            self._look = self.seconds() + RETRY
            for connection in [c for c in self._draining.values() if self._drained(c)]:
                del self._draining[connection.number]
                self._close(connection, "closed")
        if self._paused_until is not None and self.seconds() > self._paused_until:
            self._paused_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def stop_listening(self) -> None:
        """Refuse new connections; those that are open continue."""
        if self._listener.fileno() < 0:
            return
        if self._paused_until is None:
            self._selector.unregister(self._listener)
        self._paused_until = None
        self._listener.close()

    def close(self) -> None:
        """Stop listening, and cut open connections; `ended` then contains all connections."""
        self.stop_listening()
        for connection in list(self._open.values()):
            self._abandon(connection, "cut")
        for connection in self._draining.values():
            self._close(connection, "closed" if self._drained(connection) else "cut")
        self._draining.clear()
        self._selector.close()

    # ---- a connection begins

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
            accepted.setblocking(False)
            connection = _Connection(self._accepted, accepted, self.seconds(), list(self._addresses))
        except BlockingIOError:
            return
        except OSError as e:
            if e.errno in _NO_DESCRIPTOR:
                self._selector.unregister(self._listener)
                self._paused_until = self.seconds() + RETRY
            return  # otherwise the connection was reset before it was accepted
        self._accepted += 1
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)  # urgent bytes are read in order
        self._open[connection.number] = connection
        self._next_address(connection, "")

    def _next_address(self, connection: _Connection, why: str) -> None:
        """Connect to the next address of the target, or refuse the connection if none is left."""
        if connection.target is not None:
            self._want(connection, connection.target, 0)
            connection.target.close()
            connection.target = None
        while connection.left:
            family, address = connection.left.pop(0)
            try:
                target = socket.socket(family, socket.SOCK_STREAM)
            except OSError as e:
                why = str(e.strerror)
                continue
            target.setblocking(False)
            target.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
            with suppress(OSError):
                target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = target.connect_ex(address)
            if code in (0, *_BUSY):
                connection.target = target
                connection.deadline = self.seconds() + CONNECT_DEADLINE
                self._want(connection, target, selectors.EVENT_WRITE)
                return
            target.close()
            why = os.strerror(code)
        self.refused += 1
        self.refusal = why
        del self._open[connection.number]
        _reset(connection.accepted)

    def _serve(self, connection: _Connection, end: object, mask: int) -> None:
        """Read from or write to the socket `end` of a connection, which is ready."""
        if not connection.connected:
            assert connection.target is not None
            code = connection.target.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._next_address(connection, os.strerror(code))
                return
            connection.join()
        try:
            for direction, stream in connection.streams.items():
                if stream.sink is end and mask & selectors.EVENT_WRITE:
                    _push(stream)
                if stream.source is end and mask & selectors.EVENT_READ and not stream.held:
                    self._pull(connection, direction, stream)
        except _ResetError as e:
            connection.reset.add(e.end)
            self._abandon(connection, "reset")
            return
        if all(stream.shut for stream in connection.streams.values()):
            del self._open[connection.number]
            self._forget(connection)
            self._draining[connection.number] = connection
            return
        for socket_ in (connection.accepted, connection.target):
            assert socket_ is not None
            interest = 0
            for stream in connection.streams.values():
                if stream.source is socket_ and not stream.ended and not stream.held:
                    interest |= selectors.EVENT_READ
                if stream.sink is socket_ and stream.held:
                    interest |= selectors.EVENT_WRITE
            self._want(connection, socket_, interest)

    def _pull(self, connection: _Connection, direction: str, stream: _Stream) -> None:
        """Read a piece, count it, and forward as many bytes as the sink accepts now."""
        try:
            piece = stream.source.recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            raise _ResetError(stream.source) from None
        if piece:
            stream.read += len(piece)
            self._passed(self.seconds(), connection.number, direction, len(piece))
            stream.held = memoryview(piece)
        else:
            stream.ended = True
        _push(stream)

    def _want(self, connection: _Connection, end: socket.socket, interest: int) -> None:
        """Register a socket for these events; 0 stands for no events."""
        before = connection.interest.get(end, 0)
        if interest == before:
            return
        if not before:
            self._selector.register(end, interest, connection)
        elif not interest:
            self._selector.unregister(end)
        else:
            self._selector.modify(end, interest, connection)
        connection.interest[end] = interest

    # ---- a connection ends

    def _forget(self, connection: _Connection) -> None:
        for end in (connection.accepted, connection.target):
            if end is not None:
                self._want(connection, end, 0)

    def _abandon(self, connection: _Connection, how: str) -> None:
        """End a connection that one side has reset, or that the relay cuts."""
        del self._open[connection.number]
        self._forget(connection)
        if connection.connected:
            self._close(connection, how)
            return
        if connection.target is not None:
            connection.target.close()
        _reset(connection.accepted)

    def _drained(self, connection: _Connection) -> bool:
        """Return whether all bytes and FINs that were sent are confirmed, or can no longer be confirmed."""
        for stream in connection.streams.values():
            if _queued(stream.sink, termios.TIOCOUTQ) and tcp_info(stream.sink).state != _CLOSED:
                return False
        return True

    def _close(self, connection: _Connection, how: str) -> None:
        """Compare the counts with the kernel's, and close both sockets."""
        assert connection.target is not None
        counts, undelivered, retransmitted, residual = (dict[str, int]() for _ in range(4))
        for direction in DIRECTIONS:
            stream = connection.streams[direction]
            received = _received(stream, stream.source in connection.reset)
            confirmed, unconfirmed, again = _sent(stream, stream.sink is connection.target)
            counts[direction] = stream.read
            undelivered[direction] = stream.read - stream.written + unconfirmed
            retransmitted[direction] = again
            differences = received - stream.read, confirmed + unconfirmed - stream.written
            residual[direction] = max(differences, key=abs)
        if how == "closed" and any(undelivered.values()):
            how = "reset"
        complete = all(stream.shut for stream in connection.streams.values())
        for end in (connection.accepted, connection.target):
            end.close() if complete else _reset(end)  # a reset discards unsent bytes
        result = RelayedConnection(
            connection.number,
            connection.peer,
            connection.began,
            self.seconds(),
            how,
            counts,
            undelivered,
            retransmitted,
            residual,
        )
        self.ended.append(result)


def _push(stream: _Stream) -> None:
    """Forward the buffered bytes, then the end of the stream, if it has arrived."""
    try:
        if stream.held:
            with suppress(BlockingIOError):
                sent = stream.sink.send(stream.held)
                stream.written += sent
                stream.held = stream.held[sent:]
        if stream.ended and not stream.held and not stream.shut:
            stream.sink.shutdown(socket.SHUT_WR)
            stream.shut = True
    except OSError:
        raise _ResetError(stream.sink) from None


def _received(stream: _Stream, was_reset: bool) -> int:
    """Return the kernel's count of the bytes read from the source, without unread bytes and the FIN.

    If a call has reported a reset, it is unknown whether a FIN came before the reset. One additional byte in
    the kernel's count is then considered the FIN.
    """
    while True:
        info = tcp_info(stream.source)
        if info.state == _CLOSED and not stream.ended:
            unread, fin = _rest(stream.source)
            received = info.received - unread
            return received - ((received == stream.read + 1) if was_reset else fin)
        unread = _queued(stream.source, termios.FIONREAD)
        if tcp_info(stream.source) == info:  # otherwise bytes have arrived in between
            return info.received - unread - (stream.ended or info.state in _FIN_RECEIVED)


def _rest(source: socket.socket) -> tuple[int, int]:
    """Read a closed socket to its end; return the number of bytes, and 1 if a FIN ends them, else 0."""
    count = 0
    while True:
        try:
            piece = source.recv(PIECE)
        except OSError:
            return count, 0
        if not piece:
            return count, 1
        count += len(piece)


def _sent(stream: _Stream, connects: bool) -> tuple[int, int, int]:
    """Return the kernel's counts of bytes written to the sink: confirmed, not confirmed, and sent again.

    connects: True if the relay opened the connection, because `acked` then includes its SYN.
    """
    while True:
        info, queued = tcp_info(stream.sink), _queued(stream.sink, termios.TIOCOUTQ)
        if tcp_info(stream.sink) == info:
            break
    fin_waits = stream.shut and queued > 0
    fin_confirmed = stream.shut and not queued
    return info.acked - connects - fin_confirmed, queued - fin_waits, info.retransmitted


def _queued(end: socket.socket, queue: int) -> int:
    """Return the length of a socket's queue in the kernel. queue: FIONREAD or TIOCOUTQ."""
    (count,) = struct.unpack("i", fcntl.ioctl(end, queue, bytes(4)))
    return int(count)


def _address(family: socket.AddressFamily, host: str, port: int) -> _Address:
    address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4]
    return family, address  # type: ignore[return-value]


def _reaches(listener: socket.socket, family: socket.AddressFamily, address: tuple[Any, ...]) -> bool:
    """Return whether a connection to the address would reach the listener."""
    host, port = listener.getsockname()[:2]
    if family != listener.family or address[1] != port:
        return False
    if host not in _EVERY:
        return address[0] in (host, *_EVERY)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False  # not an address of this machine
    return True


def _text(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reset(end: socket.socket) -> None:
    """Close a socket with a TCP reset, which the other side sees."""
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.close()
