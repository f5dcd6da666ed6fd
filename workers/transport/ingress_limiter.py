"""Close connections that send too much, connections of revoked workers, and surplus idle ones.

libzmq cannot do this. It limits frames and the number of whole messages, but keeps every part of a message
that never ends. A revoked key is refused at its next handshake, but its open connection stays. So a small
thread reads the kernel's counts of this process's connections, and shuts down those over their limit. libzmq
treats this as the end of the other side and drops the parts that it has.

libzmq does not limit the number of connections either. Each takes a descriptor of this process, which needs
some for its files. When few are left, connections without a hello are closed, those that sent least first.

Before its hello is accepted, a connection may send only a hello; afterwards, the answers that its worker can
owe. It can exceed this limit by the bytes that arrive between two checks.
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
"""Seconds between two checks. A check takes 0.3 ms with ten workers, and at most a tenth of the time."""
RESERVE = 48
"""Descriptors that connections without a hello must leave free, if the limit allows."""
PLENTY = 4096
"""The limit of descriptors for a process with a port, if the system allows. A peer cannot take all of them
between two checks."""
NOTES = 1 << 20
"""Bytes of small envelopes that may queue up while the coordinator is busy: one heartbeat a second."""


@dataclass
class _Account:
    """The account of a worker's connection. may_send: the largest number of bytes since its start."""

    worker: int
    may_send: int


class IngressLimiter:
    """The limits of one port.

    greeting: bytes that a connection may send before its hello is accepted. ahead: unread bytes that a worker
    may have sent after that. revoked: returns the workers that must not be connected at the moment.
    """

    def __init__(self, port: int, greeting: int, ahead: int, revoked: Callable[[], frozenset[int]]) -> None:
        self._port, self._revoked = port, revoked
        self._greeting, self._ahead = greeting, ahead + NOTES
        self._accounts: dict[int, _Account] = {}
        """The accounts by the inode of a connection's socket: descriptors are reused, inodes are not."""
        self._current: dict[int, _Account] = {}
        """The accounts of the latest connections, by worker."""
        self._since: dict[int, int] = {}
        """Connections without a hello, by inode: the number of the check that first saw them."""
        self._looks = 0
        tcp_counters.allow_descriptors(PLENTY)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ingress-limiter", daemon=True)
        self._thread.start()

    def register(self, descriptor: int, worker: int) -> None:
        """Note the worker of a connection; this holds until the connection ends, even after a dismissal."""
        account = _Account(worker, self._greeting + self._ahead)
        with suppress(OSError):  # it has ended already
            self._accounts[os.fstat(descriptor).st_ino] = account
        self._current[worker] = account

    def took(self, worker: int, nbytes: int) -> None:
        """Note that an envelope of a worker was read from libzmq. nbytes: its bytes on the stream."""
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
        # twice as many as needed, so that new connections have to fill them first
        for stream in sorted(unknown, key=lambda s: (s.up, self._since[s.inode]))[: 2 * reserve - free]:
            tcp_counters.end(stream)
        return True

    def close(self) -> None:
        self._over.set()
        self._thread.join()
