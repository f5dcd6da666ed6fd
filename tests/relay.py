"""A TCP relay that counts: 30 lines that know nothing of ZeroMQ, the ledger's second oracle."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Accepts on a port of its own and connects on to `target`; bytes by direction as the coordinator sees
    them: up is what those who connect send."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.bytes = {"up": 0, "down": 0}
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                theirs, _ = self._listener.accept()
                ours = socket.create_connection(("127.0.0.1", self._target), timeout=10)
                ours.settimeout(None)
                self._open += [theirs, ours]
                threading.Thread(target=self._pump, args=(theirs, ours, "up"), daemon=True).start()
                threading.Thread(target=self._pump, args=(ours, theirs, "down"), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        buffer = bytearray(1 << 16)
        with contextlib.suppress(OSError):
            while count := source.recv_into(buffer):
                with self._lock:
                    self.bytes[direction] += count
                sink.sendall(memoryview(buffer)[:count])
            sink.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Reset what is open; new connections are let through."""
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._open = []

    def close(self) -> None:
        self._listener.close()
        for connection in self._open:
            connection.close()
