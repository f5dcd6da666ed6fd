"""Close connections that send too much or are revoked, and those without a hello if descriptors are scarce.

libzmq cannot do this. It limits the size of frames and the number of whole messages, but stores all parts of
an endless message. It refuses a revoked key at the next handshake, but keeps the open connection. Therefore a
thread reads the kernel's byte count of each connection, and shuts down those over their limit. libzmq
then acts as if the other side had ended, and drops the parts that it has stored.

libzmq does not limit the number of connections either. Each uses a descriptor of this process, which needs
some for its files. When few are left, connections without a hello are closed, those that sent least first.

Before its hello is accepted, a connection may send only a hello. Afterwards its unread bytes are limited.
The bytes that arrive between two checks can exceed this limit.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from workers.transport import tcp_counters

SECONDS = 0.05
"""Seconds between two checks. A check takes 0.3 ms with ten workers; slow checks are made less often."""
RESERVE = 48
"""The number of descriptors that connections without a hello must leave free, if the limit allows it."""
PLENTY = 4096
"""The limit of descriptors for a process with a port, if the system allows it. A peer cannot use up so many
between two checks."""
NOTES = 1 << 20
"""Bytes for small envelopes, such as one heartbeat a second, that queue up while the coordinator is busy."""


@dataclass
class _Account:
    """The account of a worker's connection. may_send: the bytes that it is allowed to send in all."""

    worker: int
    may_send: int


class IngressLimiter:
    """A thread that enforces the limits of one port.

    greeting: bytes that a connection may send before its hello is accepted. ahead: unread bytes
    allowed to a worker after that. revoked: returns the workers that must not be connected at the moment.
    """

    def __init__(self, port: int, greeting: int, ahead: int, revoked: Callable[[], frozenset[int]]) -> None:
        self._port, self._revoked = port, revoked
        self._greeting, self._ahead = greeting, ahead + NOTES
        self._accounts: dict[int, _Account] = {}
        """The accounts by the inode of a connection's socket: descriptors are reused, inodes are not."""
        self._current: dict[int, _Account] = {}
        """The accounts of the latest connections, by worker."""
        self._since: dict[int, int] = {}
        """The number of the check that first saw a connection without a hello, by inode."""
        self._looks = 0
        tcp_counters.allow_descriptors(PLENTY)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ingress-limiter", daemon=True)
        self._thread.start()

    def register(self, descriptor: int, worker: int) -> None:
        """Record a connection's worker; the record outlives a dismissal, until the connection ends."""
        account = _Account(worker, self._greeting + self._ahead)
        with suppress(OSError):  # the connection has already ended
            self._accounts[os.fstat(descriptor).st_ino] = account
        self._current[worker] = account

    def took(self, worker: int, nbytes: int) -> None:
        """Raise a worker's limit by the stream bytes `nbytes` of an envelope that was read from libzmq."""
        self._current[worker].may_send += nbytes

    def _watch(self) -> None:
        pause, scarce = SECONDS, False
        while not self._over.wait(pause):
            began = time.monotonic()
            with suppress(OSError):
                scarce = self._look()
            pause = 10 * (time.monotonic() - began)
            pause = min(pause, SECONDS) if scarce else max(SECONDS, pause)

    def _look(self) -> bool:
        """Close connections over their limit; return whether descriptors are scarce."""
        known, revoked = set(self._accounts), self._revoked()
        streams = tcp_counters.streams(self._port)
        for stream in streams:
            account = self._accounts.get(stream.inode)
            may_send = account.may_send if account else self._greeting
            if stream.up > may_send or (account and account.worker in revoked):
                tcp_counters.end(stream)
        scarce = self._spare_descriptors([s for s in streams if s.inode not in self._accounts])
        for inode in known - {stream.inode for stream in streams}:
            del self._accounts[inode]
        return scarce

    def _spare_descriptors(self, unknown: list[tcp_counters.TcpStream]) -> bool:
        """Close connections without a hello if descriptors are scarce; return whether they are."""
        self._looks += 1
        self._since = {s.inode: self._since.get(s.inode, self._looks) for s in unknown}
        limit = tcp_counters.limit()
        free = limit - len(tcp_counters.descriptors())
        reserve = min(RESERVE, limit // 4)
        if free >= reserve:
            return False
        # until twice the reserve is free, so that new connections do not make descriptors scarce at once
        for stream in sorted(unknown, key=lambda s: (s.up, self._since[s.inode]))[: 2 * reserve - free]:
            tcp_counters.end(stream)
        return True

    def close(self) -> None:
        self._over.set()
        self._thread.join()
