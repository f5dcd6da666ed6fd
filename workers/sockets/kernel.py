"""What the kernel says of our TCP connections: an oracle for the ledger that knows nothing of ZeroMQ.

TCP_INFO's bytes_received counts what the stream has delivered in order, bytes_acked what the other side
has confirmed; neither counts retransmissions, as bytes_sent does. An accepted connection counts exactly the
stream's bytes while it is open (reference/wire.md 2.3).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

_ACKED, _RECEIVED = 120, 128
"""Offsets in struct tcp_info of two u64."""


@dataclass(frozen=True)
class Traffic:
    """Stream bytes of all connections that a port has accepted."""

    down: int
    up: int
    connections: int


def accepted(port: int) -> Traffic:
    """Of this process's own open connections on a local port of 127.0.0.1."""
    down = up = count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # a descriptor may be closed while we look, or be no socket
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family != socket.AF_INET or connection.getsockname()[1] != port:
                    continue
                connection.getpeername()  # the listening socket has no peer
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            down += struct.unpack_from("Q", info, _ACKED)[0]
            up += struct.unpack_from("Q", info, _RECEIVED)[0]
            count += 1
    return Traffic(down, up, count)


def residual(port: int, booked: Callable[[], tuple[int, int]], deadline: float = 5.0) -> dict[str, int]:
    """Kernel minus ledger, in bytes: {"down": 0, "up": 0} if every byte is accounted for.

    booked gives the ledger's totals (down, up). Waits until both are 0, because the last bytes sent are
    confirmed a little later, but at most `deadline` seconds.
    """
    until = time.monotonic() + deadline
    while True:
        seen, (down, up) = accepted(port), booked()
        left = {"down": seen.down - down, "up": seen.up - up}
        if not any(left.values()) or time.monotonic() > until:
            return left
        time.sleep(0.01)
