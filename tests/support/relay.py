"""A TCP relay that counts, and that can hold what it carries or cut its connections. It knows nothing of
ZeroMQ: the ledger's second oracle.

Nothing that passes is lost, doubled or out of order, for TCP loses nothing while a connection lives.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from typing import Literal

Direction = Literal["up", "down"]
IN_FLIGHT = 64
"""Chunks of at most 64 KiB that a direction of a connection holds; then its sender has to wait."""
RESET = struct.pack("ii", 1, 0)


class Relay:
    """Accepts on a port of its own and connects on to `target`; bytes by direction as the coordinator sees
    them: up is what those who connect send. All that is said of the network holds for the connections that
    are open and for those to come."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.bytes = {"up": 0, "down": 0}
        self._silent_until = {"up": 0.0, "down": 0.0}
        self._changed = threading.Condition()
        """Guards all of this, and wakes who waits for the end of a silence."""
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def mute(self, direction: Direction, seconds: float) -> None:
        """A silence one way: what goes there is held for so long and comes then, as from a network that is
        broken and mended. cut() throws away what is held."""
        with self._changed:
            self._silent_until[direction] = time.monotonic() + seconds
            self._changed.notify_all()

    def cut(self) -> None:
        """Reset what is open, and lose what is on its way; new connections are let through."""
        with self._changed:
            ended, self._open = self._open, []
            self._changed.notify_all()
        for connection in ended:
            _reset(connection)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # or accept() would hold the port
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                theirs, _ = self._listener.accept()
            except OSError:
                return
            try:
                ours = socket.create_connection(("127.0.0.1", self._target), timeout=10)
            except OSError:
                _reset(theirs)  # as if whoever connects had been refused
                continue
            ours.settimeout(None)
            with self._changed:
                self._open += [theirs, ours]
            self._join(theirs, ours, "up")
            self._join(ours, theirs, "down")

    def _join(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        chunks: queue.Queue[bytes] = queue.Queue(IN_FLIGHT)
        for work in (self._read, self._write):
            end = source if work == self._read else sink
            threading.Thread(target=work, args=(end, chunks, direction), daemon=True).start()

    def _read(self, source: socket.socket, chunks: queue.Queue[bytes], direction: str) -> None:
        """Until the stream ends, which is a chunk too: an empty one."""
        chunk = b"some"
        while chunk:
            try:
                chunk = source.recv(1 << 16)
            except OSError:
                chunk = b""
            with self._changed:
                self.bytes[direction] += len(chunk)
            chunks.put(chunk)

    def _write(self, sink: socket.socket, chunks: queue.Queue[bytes], direction: str) -> None:
        """Write each chunk when nothing holds it. What cannot be written any more is thrown away, so that who
        reads can go on to the end."""
        chunk = b"some"
        while chunk:
            chunk = chunks.get()
            if not self._wait(sink, direction):
                continue
            with contextlib.suppress(OSError):
                if chunk:
                    sink.sendall(chunk)
                else:
                    sink.shutdown(socket.SHUT_WR)

    def _wait(self, sink: socket.socket, direction: str) -> bool:
        """Until a chunk may be written; False if its connection was cut."""
        with self._changed:
            while sink in self._open:
                left = self._silent_until[direction] - time.monotonic()
                if left <= 0:
                    return True
                self._changed.wait(left)
        return False


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RD)  # wakes whoever reads from it, and says nothing to the other side
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    connection.close()
