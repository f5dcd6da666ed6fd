"""The coordinator's ROUTER socket, which knows the connection of each worker."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from fedsim.errors import AccessError, TaskError, WireError
from fedsim.wire.envelope import NONE, Envelope, unpack
from fedsim.wire.ledger import Ledger
from workers.transport import tcp_counters
from workers.transport.dealer import TO_WORKER, bound
from workers.transport.endpoint import Endpoint, Incoming
from workers.transport.handshake import Hello, read_hello, refusal, rejoin
from workers.transport.ingress_limiter import IngressLimiter
from workers.transport.listeners import Listener

SOCKETS = 64
HANDSHAKE_MS = 5000
"""The maximum duration of a handshake, after which a connection is closed."""
HELLO_BYTES = 4096
AHEAD = 16
"""The default limit of a worker's unread bytes, in frames of the largest size."""
BATCH = 256
"""Envelopes taken at a time, so that a peer that never stops sending cannot block the coordinator."""


class NoHello(WireError):
    """An envelope on a connection that has sent no hello, or none since its worker was dismissed."""


class ZmqEndpoint(Endpoint):
    """A ROUTER socket that a listener opens.

    A worker authenticates itself with its first envelope, as the listener demands. Anything else from an
    unauthenticated peer is dropped and not booked. The connection of a dismissed worker stays open; if the
    worker sends anything, it is asked to join again. ZeroMQ chooses the routing ids. ROUTER_MANDATORY makes
    an envelope to a vanished worker raise an error.
    """

    def __init__(self, ledger: Ledger, listener: Listener, max_frame: int, ahead: int | None = None) -> None:
        """Open a listener.

        max_frame: the largest frame that a peer may send, in bytes. ahead: the largest number of unread bytes
        of a worker; a TCP connection that sends more is closed.

        Raises:
            UsageError: if the listener cannot be opened.
        """
        super().__init__(ledger)
        ledger.mechanism = listener.mechanism
        self.listener = listener
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS)
        self._socket = self._context.socket(zmq.ROUTER)
        bound(self._socket, max_frame, TO_WORKER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) if listener.watched else None
        try:
            self.address = listener.open(self._socket)
        except BaseException:
            self._close_socket()
            self._context.term()
            raise
        greeting = listener.mechanism.handshake["up"] + 2 * HELLO_BYTES
        ahead = AHEAD * max_frame if ahead is None else ahead
        self._limiter = (
            IngressLimiter(listener.port, greeting, ahead, listener.revoked) if listener.port else None
        )
        self._workers: dict[bytes, int] = {}
        self._routes: dict[int, bytes] = {}
        self._descriptors: dict[int, int] = {}
        """The workers by the descriptor of their connection, because the monitor reports descriptors."""
        self._rejoin_sent: dict[int, bytes] = {}
        """Connections that were asked to join again. Each is asked only once."""
        self._poller, self._polled = zmq.Poller(), [-1]
        self._refused = {"up": 0, "down": 0}
        """Bytes of connections that were refused."""
        self.unauthenticated_peers = 0
        self.complete = True
        """False once a connection is lost, because the kernel no longer counts its bytes."""

    def send(self, worker: int, envelope: Envelope, retry: bool = False) -> None:
        """Send an envelope to a worker and book it.

        Raises:
            TaskError: if the worker is gone or does not take its envelopes.
        """
        # book it even if it is not sent: the ledger must not depend on when a worker was lost
        self._book(envelope, worker, "down", retry)
        if worker not in self._routes:
            raise TaskError(f"cannot send to worker {worker}: it has no connection")
        try:
            self._send(self._routes[worker], envelope)
        except zmq.ZMQError as e:
            if e.errno == zmq.EHOSTUNREACH and self._monitor is not None:
                self._ended(worker)  # the monitor reported the end before the worker's hello was read
            raise TaskError(f"cannot send to worker {worker}: {e.strerror}") from None

    def _send(self, route: bytes, envelope: Envelope) -> None:
        self._socket.send_multipart([route, envelope.head, *envelope.frames], flags=zmq.NOBLOCK, copy=False)

    def wait(self, fds: list[int], timeout: float) -> tuple[list[Incoming], list[int]]:
        if fds != self._polled:
            self._poller, self._polled = zmq.Poller(), fds
            for item in (*fds, self._socket, *([self._monitor] if self._monitor else [])):
                self._poller.register(item, zmq.POLLIN)
        until = time.monotonic() + timeout
        while True:  # go on if only unauthenticated peers sent: an empty result means silence
            left = 0.0 if self.lost else max(0.0, until - time.monotonic())
            ready = [item for item, _ in self._poller.poll(math.ceil(left * 1000))]
            envelopes = self._receive_all() if self._socket in ready else []
            if self._monitor in ready:
                self._note_ends()
            readable = [item for item in ready if isinstance(item, int)]
            if envelopes or readable or self.lost or self.unreadable or not left:
                return envelopes, readable

    def _receive_all(self) -> list[Incoming]:
        envelopes = []
        for _ in range(BATCH):
            try:
                route, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            incoming = self._accept(bytes(route.buffer), frames)
            if incoming is not None:
                envelopes.append(incoming)
        return envelopes

    def _accept(self, route: bytes, frames: list[zmq.Frame]) -> Incoming | None:
        buffers = [f.buffer for f in frames]
        worker = self._workers.get(route)
        hello: Hello | None = None
        if worker is not None:
            try:
                envelope = unpack(buffers, f"from worker {worker}")
                if envelope.header.kind == "hello":
                    raise WireError("a second hello")
            except WireError as e:
                self.unreadable[worker] = str(e)
                return None
        else:
            try:
                envelope = first_envelope(buffers)
                hello = read_hello(envelope)
                worker = self._register(route, hello, frames[0])
            except NoHello:
                self._ask_to_rejoin(route, frames[0])
                return None
            except AccessError as e:
                self._refuse(route, envelope, hello.index if hello else NONE, str(e))
                return None
            except WireError:
                self.unauthenticated_peers += 1
                return None
            self.ledger.book_handshake(worker)
        self._book(envelope, worker, "up")
        if self._limiter is not None:
            self._limiter.took(worker, sum(envelope.sizes) + self.listener.mechanism.framing(envelope.sizes))
        return Incoming(worker, envelope, hello)

    def _register(self, route: bytes, hello: Hello, frame: zmq.Frame) -> int:
        worker = self.listener.identify(hello, self._proved(frame))
        if worker in self._routes:
            if self._monitor is None:
                raise WireError("not of this run")
            raise AccessError(f"worker {worker} has joined already")
        descriptor = int(frame.get(zmq.SRCFD))
        if self._limiter is not None:
            self._limiter.register(descriptor, worker)
        if self._monitor is not None:
            self._note_ends()  # first: a connection that has just ended may have had this descriptor
            self._descriptors[descriptor] = worker
        self._workers[route] = worker
        self._routes[worker] = route
        return worker

    def _refuse(self, route: bytes, envelope: Envelope, worker: int, reason: str) -> None:
        """Tell the owner of a key why it must not join, and book its connection as control traffic.

        The peer closes the connection, so the kernel does not count it at the end of the run. `residual`
        therefore leaves its bytes out.
        """
        before = {direction: self.ledger.booked(direction) for direction in self._refused}
        self.ledger.book_handshake(worker)
        self._book(envelope, worker, "up")
        answer = refusal(reason)
        with suppress(zmq.ZMQError):
            self._send(route, answer)
            self._book(answer, worker, "down")
        for direction, n in before.items():
            self._refused[direction] += self.ledger.booked(direction) - n

    def _ask_to_rejoin(self, route: bytes, frame: zmq.Frame) -> None:
        """Ask the owner of a key to join again; send nothing to an unauthenticated peer."""
        worker = self.listener.owner(self._proved(frame))
        if worker is None:
            self.unauthenticated_peers += 1
            return
        descriptor = int(frame.get(zmq.SRCFD))
        if self._rejoin_sent.get(descriptor) == route:
            return
        envelope = rejoin()
        with suppress(zmq.ZMQError):  # if its queue is full, try again after its next envelope
            self._send(route, envelope)
            self._rejoin_sent[descriptor] = route
            self._book(envelope, worker, "down")

    def _proved(self, frame: zmq.Frame) -> str:
        """Return the public key of the connection that a frame came from; '' without CURVE."""
        return str(frame.get("User-Id")) if self._monitor is not None else ""

    def _note_ends(self) -> None:
        assert self._monitor is not None
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            worker = self._descriptors.pop(int(event["value"]), None)
            if worker is not None:
                self._ended(worker)

    def _ended(self, worker: int) -> None:
        self.dismiss(worker)
        self.lost.append(worker)

    def dismiss(self, worker: int) -> None:
        """Forget a worker's connection, so that another worker may join in its place."""
        self.complete = False
        self._workers.pop(self._routes.pop(worker, b""), None)
        self._descriptors = {fd: w for fd, w in self._descriptors.items() if w != worker}

    def residual(self) -> dict[str, int] | None:
        if not self.listener.port or not self.complete:
            return None
        return tcp_counters.residual(self.listener.port, self._booked)

    def retransmitted(self) -> int | None:
        if not self.listener.port or not self.complete:
            return None
        return sum(stream.retransmitted for stream in tcp_counters.streams(self.listener.port))

    def _booked(self) -> tuple[int, int] | None:
        """Return the booked bytes (down, up) of accepted connections; None if one was lost."""
        self._receive_all()
        if self._monitor is not None:
            self._note_ends()
        if not self.complete:
            return None
        down, up = (self.ledger.booked(direction) - self._refused[direction] for direction in ("down", "up"))
        return down, up

    def drain(self, farewell: Envelope, seconds: float) -> None:
        if self._monitor is None:
            return
        until = time.monotonic() + seconds
        while self._routes and (left := until - time.monotonic()) > 0:
            for incoming in self.wait([], left)[0]:
                if incoming.hello is not None:
                    with suppress(TaskError):
                        self.send(incoming.worker, farewell)
            self.lost.clear()
            self.unreadable.clear()

    def accept(self) -> str:
        self.address = self.listener.reopen(self._socket)
        return self.address

    def stop_accepting(self) -> None:
        self.listener.stop_accepting()

    def close(self) -> None:
        if self._limiter is not None:
            self._limiter.close()
        self._close_socket()
        self.listener.close()
        self._context.term()

    def _close_socket(self) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
        self._socket.close(0)


def first_envelope(buffers: Sequence[memoryview]) -> Envelope:
    """Return the first envelope of a connection, which must be a hello.

    Raises:
        NoHello: if the envelope is not a hello.
    """
    if sum(b.nbytes for b in buffers) > HELLO_BYTES:
        raise NoHello("too long for a hello")
    try:
        envelope = unpack(buffers, "from an unauthenticated peer")
    except WireError as e:
        raise NoHello(str(e)) from None
    if envelope.header.kind != "hello" or len(envelope.frames) != 1:
        raise NoHello(f"an envelope of kind {envelope.header.kind!r} where a hello is due")
    return envelope
