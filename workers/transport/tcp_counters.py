"""The kernel's counters of our TCP connections: a check of the ledger that is independent of ZeroMQ.

TCP_INFO's bytes_received counts what the stream has delivered in order, bytes_acked what the other side
has confirmed; neither counts retransmissions, as bytes_sent does. An accepted connection counts exactly the
stream's bytes while it is open (docs/references/bytes.md#which-counters-are-exact).
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

_ACKED, _RECEIVED = 120, 128
"""Offsets in struct tcp_info of two u64."""


@dataclass(frozen=True)
class TcpStream:
    """An open connection that a port of this process has accepted, and its stream bytes. inode: which no
    other has, while its descriptor may soon be another's."""

    descriptor: int
    inode: int
    down: int
    up: int


def streams(port: int) -> list[TcpStream]:
    """This process's own open connections on a local port; each once, even with several descriptors."""
    result = {}
    for descriptor in descriptors():
        with suppress(OSError):  # a descriptor may be closed while we look
            inode = os.fstat(descriptor)
            if stat.S_ISSOCK(inode.st_mode) and inode.st_ino not in result:
                stream = _stream(descriptor, port)
                if stream is not None:
                    result[stream.inode] = stream
    return list(result.values())


def descriptors() -> list[int]:
    """This process's open descriptors, also if it has none left to look with."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError as e:
        if e.errno != errno.EMFILE:
            raise
    return [descriptor for descriptor in range(limit()) if _is_open(descriptor)]


def limit() -> int:
    """The number of descriptors that this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


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
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        acked, received = (struct.unpack_from("Q", info, at)[0] for at in (_ACKED, _RECEIVED))
        return TcpStream(descriptor, inode, acked, received)


@contextmanager
def _held(descriptor: int) -> Iterator[tuple[socket.socket, int]]:
    """A socket of ZeroMQ's, by a descriptor of our own, and its inode.

    If this process has no descriptor left it is ZeroMQ's own: what is done then is done at once.
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
    except OSError:  # it is another file's now
        os.close(ours)
        raise
    with connection:
        yield connection, os.fstat(ours).st_ino


def end(stream: TcpStream) -> None:
    """Shut a connection down, if it is still there: both sides learn of it, and half a message is dropped."""
    with suppress(OSError), _held(stream.descriptor) as (connection, inode):
        if inode == stream.inode:
            connection.shutdown(socket.SHUT_RDWR)


def residual(
    port: int, booked: Callable[[], tuple[int, int] | None], deadline: float = 5.0
) -> dict[str, int] | None:
    """Kernel minus ledger, in bytes: {"down": 0, "up": 0} if every byte is accounted for.

    booked gives the ledger's totals (down, up), or None when the kernel does not count all of them any more.
    Waits until both are 0, because the last bytes sent are confirmed a little later, but at most `deadline`
    seconds.
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
