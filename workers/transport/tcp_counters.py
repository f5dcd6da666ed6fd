"""The kernel's counters of this process's TCP connections, which check the ledger independently of ZeroMQ.

TCP_INFO's bytes_received counts the bytes that have arrived in order, and bytes_acked counts the bytes that
the other side has confirmed. Unlike bytes_sent, neither counts retransmissions. For an accepted connection,
they are exactly the stream's bytes while it is open (docs/references/bytes.md#which-counters-are-exact).
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

_ACKED, _RECEIVED, _SENT, _RETRANSMITTED = 120, 128, 200, 208
"""The offsets of four u64 in struct tcp_info, whose first byte is the state."""


class TcpInfo(NamedTuple):
    """The kernel's counters of one socket, in bytes.

    Attributes:
        state: The socket's state, a number of Linux's enum of TCP states.
        acked: The bytes that the other side has confirmed; SYN and FIN count as one each.
        received: The bytes that have arrived in order; the other side's FIN counts as one.
        sent: The bytes that were sent, including every retransmission.
        retransmitted: The bytes that were sent again.
    """

    state: int
    acked: int
    received: int
    sent: int
    retransmitted: int


def tcp_info(connection: socket.socket) -> TcpInfo:
    """Ask the kernel for the counters of a TCP socket.

    Raises:
        OSError: if the socket is not a TCP socket, or is closed.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    at = (_ACKED, _RECEIVED, _SENT, _RETRANSMITTED)
    return TcpInfo(info[0], *(struct.unpack_from("Q", info, offset)[0] for offset in at))


@dataclass(frozen=True)
class TcpStream:
    """An open connection that a port of this process has accepted, and its stream bytes. inode: the socket's
    inode, which identifies the connection; the descriptor may be reused at any time. retransmitted: the bytes
    that this side has sent again."""

    descriptor: int
    inode: int
    down: int
    up: int
    retransmitted: int


def streams(port: int) -> list[TcpStream]:
    """Return this process's open connections on a local port. One with several descriptors is listed once."""
    result = {}
    for descriptor in descriptors():
        with suppress(OSError):  # a descriptor may be closed at any time
            inode = os.fstat(descriptor)
            if stat.S_ISSOCK(inode.st_mode) and inode.st_ino not in result:
                stream = _stream(descriptor, port)
                if stream is not None:
                    result[stream.inode] = stream
    return list(result.values())


def descriptors() -> list[int]:
    """Return this process's open descriptors, even if no descriptor is left to list them."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError as e:
        if e.errno != errno.EMFILE:
            raise
    return [descriptor for descriptor in range(limit()) if _is_open(descriptor)]


def limit() -> int:
    """Return the number of descriptors that this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def allow_descriptors(count: int) -> None:
    """Raise this process's soft limit of open files to `count`, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < raised:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _stream(descriptor: int, port: int) -> TcpStream | None:
    """Return the connection behind a descriptor; None if it is not on this port."""
    with _held(descriptor) as (connection, inode):
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
            return None
        connection.getpeername()  # the listening socket has no peer
        info = tcp_info(connection)
        return TcpStream(descriptor, inode, info.acked, info.received, info.retransmitted)


@contextmanager
def _held(descriptor: int) -> Iterator[tuple[socket.socket, int]]:
    """Yield one of ZeroMQ's sockets, through a duplicate of its descriptor, and its inode.

    If no descriptor is left, ZeroMQ's own descriptor is used, so the block must be short.
    """
    try:
        ours = os.dup(descriptor)
    except OSError as e:
        if e.errno != errno.EMFILE:
            raise
        borrowed = socket.socket(fileno=descriptor)
        try:
            yield borrowed, os.fstat(descriptor).st_ino
        finally:
            borrowed.detach()
        return
    try:
        connection = socket.socket(fileno=ours)
    except OSError:  # the descriptor belongs to another file now
        os.close(ours)
        raise
    with connection:
        yield connection, os.fstat(ours).st_ino


def end(stream: TcpStream) -> None:
    """Shut a connection down if it is still open. Both sides notice this, and drop incomplete messages."""
    with suppress(OSError), _held(stream.descriptor) as (connection, inode):
        if inode == stream.inode:
            connection.shutdown(socket.SHUT_RDWR)


def residual(
    port: int, booked: Callable[[], tuple[int, int] | None], deadline: float = 5.0
) -> dict[str, int] | None:
    """Return the kernel's count minus the ledger's, in bytes: {"down": 0, "up": 0} if they are equal.

    Wait at most `deadline` seconds until both differences are 0, because the last bytes are confirmed some
    time after they are sent. booked: returns the ledger's totals (down, up), or None if the kernel no longer
    counts all of them.
    """
    until = time.monotonic() + deadline
    while True:
        seen, totals = streams(port), booked()
        if totals is None:
            return None
        down, up = totals
        left = {"down": sum(s.down for s in seen) - down, "up": sum(s.up for s in seen) - up}
        if not any(left.values()) or time.monotonic() > until:
            return left
        time.sleep(0.01)
