"""The coordinator's connection to its workers, and a loopback to a worker in the same process.

Only endpoints book envelopes in the ledger, when they send or receive them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import zmq

from fedsim.wire.envelope import Envelope, unpack
from fedsim.wire.ledger import Ledger
from workers.transport.handshake import Hello


@dataclass(frozen=True)
class Incoming:
    """An envelope from a worker. hello: the envelope's content, if it is the worker's first (a hello)."""

    worker: int
    envelope: Envelope
    hello: Hello | None = None


class Endpoint(ABC):
    """The coordinator's connection to its workers."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.total_bytes = {"up": 0, "down": 0}
        """Frame bytes sent or received here, counted independently of the ledger."""
        self.lost: list[int] = []
        """Workers with an ended connection that the coordinator has yet to handle."""
        self.unreadable: dict[int, str] = {}
        """Errors in unreadable envelopes, by worker, that the coordinator has yet to handle."""

    @abstractmethod
    def send(self, worker: int, envelope: Envelope, retry: bool = False) -> None:
        """Send an envelope. retry: True if it was sent before; it is then booked as a retry."""

    @abstractmethod
    def wait(self, fds: list[int], timeout: float) -> tuple[list[Incoming], list[int]]:
        """Wait at most `timeout` seconds; return the envelopes received and the readable descriptors."""

    def residual(self) -> dict[str, int] | None:
        """Return the kernel's count of bytes minus the ledger's, by direction; None without a count (ipc)."""
        return None

    def retransmitted(self) -> int | None:
        """Return the bytes that the kernel has sent to workers again; None without a count, as residual."""
        return None

    def dismiss(self, worker: int) -> None:
        """Forget a worker's connection."""

    def accept(self) -> str:
        """Accept connections again after stop_accepting(); return the address."""
        return ""

    def stop_accepting(self) -> None:
        """Stop listening, because all workers have joined."""

    def drain(self, farewell: Envelope, seconds: float) -> None:
        """Wait at most `seconds` for stopped workers to close their connections.

        A hello in this time is answered with `farewell`. Do nothing if the transport cannot tell when a
        worker ends.
        """

    def close(self) -> None:
        """Release sockets and files; envelopes that have not been delivered may be lost."""

    def _book(self, envelope: Envelope, worker: int, direction: str, retry: bool = False) -> None:
        self.total_bytes[direction] += len(envelope.head) + sum(memoryview(f).nbytes for f in envelope.frames)
        self.ledger.book(envelope, worker, direction, retry)


class Worker(Protocol):
    """An object that answers envelopes, such as workers.worker.runtime.WorkerRuntime."""

    def handle(self, envelope: Envelope) -> Envelope | None: ...


class Loopback(Endpoint):
    """A link to one worker in this process: envelopes are encoded, checked and booked as on the wire."""

    def __init__(self, ledger: Ledger, runtime: Worker) -> None:
        super().__init__(ledger)
        self.runtime = runtime
        self._queue: deque[Envelope] = deque()

    def send(self, worker: int, envelope: Envelope, retry: bool = False) -> None:
        self._book(envelope, worker, "down", retry)
        self._queue.append(unpack([envelope.head, *envelope.frames], "loopback"))

    def wait(self, fds: list[int], timeout: float) -> tuple[list[Incoming], list[int]]:
        poller = zmq.Poller()
        for fd in fds:
            poller.register(fd, zmq.POLLIN)
        ready = [int(fd) for fd, _ in poller.poll(0 if self._queue else int(timeout * 1000))]
        if ready or not self._queue:
            return [], ready
        reply = self.runtime.handle(self._queue.popleft())
        if reply is None:
            return [], []
        envelope = unpack([reply.head, *reply.frames], "loopback")
        self._book(envelope, 0, "up")
        return [Incoming(0, envelope)], []
