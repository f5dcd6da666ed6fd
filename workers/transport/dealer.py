"""A worker's connection to the coordinator: a DEALER socket with deadlines."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from fedsim.errors import AccessError, ConnectionLost, TaskError, WireError
from fedsim.wire.envelope import Envelope, unpack
from workers.transport import handshake
from workers.transport.handshake import Hello
from workers.transport.join_credentials import KeyPair
from workers.transport.tcp_address import TcpAddress

SEND_QUEUE, TO_WORKER = 8, 160
"""The numbers of envelopes that may be queued for a peer and for a worker. A worker may be sent two tasks for
each of 16 lanes, a state before each task, and a few small envelopes. Twice as many are allowed, because
libzmq may still count envelopes that it has delivered."""
HELLO_DEADLINE = 30.0
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)
_ENDED = (zmq.EVENT_CLOSED, zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
"""The events of an attempt to connect that was refused or that ended during the handshake."""
TURNED_DOWN = 5.0
"""The seconds of refused attempts after which a coordinator that answered before is considered gone."""
ATTEMPTS = 5
"""The minimum number of refused attempts in this time. If packets are lost, a single attempt takes long."""


class KeyRefused(AccessError):
    """The coordinator does not accept this key, now or later."""


class CurveKeys(NamedTuple):
    """CURVE keys in Z85: the worker's own pair, and the coordinator's public one."""

    public: bytes
    secret: bytes
    server: bytes

    @staticmethod
    def of(own: KeyPair, server: str) -> CurveKeys:
        """Encode a worker's own keys and the coordinator's public key."""
        return CurveKeys(own.public.encode(), own.secret.encode(), server.encode())


class Connection:
    """A connection to the coordinator, which begins with a hello.

    With CURVE keys the connection is encrypted and monitored: receive and send notice when it has ended.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        max_frame: int,
        curve_keys: CurveKeys | None = None,
        patience: float = HELLO_DEADLINE,
        again: bool = False,
    ) -> None:
        """Connect and send the hello.

        max_frame: the largest accepted frame, in bytes. curve_keys: None for a worker on the coordinator's
        machine. patience: seconds to wait for an answer. again: True if this worker was connected before;
        refused attempts for TURNED_DOWN seconds then mean that the coordinator has ended.

        Raises:
            TaskError: if no coordinator answers within `patience` seconds.
            KeyRefused: if the coordinator does not accept the key.
            WireError: if the hello cannot be sent.
        """
        self.address = address
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        bound(self._socket, max_frame)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._monitor: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        try:
            if curve_keys is not None:
                self._secure(curve_keys)
            if address.startswith("tcp://"):
                TcpAddress.to_connect(address, "address").allow(self._socket)
            self._socket.connect(address)
            if curve_keys is not None:
                self._await_handshake(patience, again)
            self.send(handshake.hello(hello), HELLO_DEADLINE)
        except zmq.ZMQError as e:
            self.close()
            raise TaskError(f"cannot connect to {address}: {e.strerror}") from None
        except BaseException:
            self.close()
            raise

    def _secure(self, curve_keys: CurveKeys) -> None:
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, curve_keys.public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, curve_keys.secret)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, curve_keys.server)
        keep_alive(self._socket)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._poller.register(self._monitor, zmq.POLLIN)

    def _await_handshake(self, patience: float, again: bool) -> None:
        assert self._monitor is not None
        began, turned_down = time.monotonic(), 0
        until = began + patience
        while (left := until - time.monotonic()) > 0:
            if not self._monitor.poll(int(left * 1000)):
                break
            event = recv_monitor_message(self._monitor)["event"]
            turned_down += event in _ENDED
            if again and turned_down >= ATTEMPTS and time.monotonic() - began >= TURNED_DOWN:
                raise TaskError(
                    f"for {TURNED_DOWN:g} s nobody has answered at {self.address}: the run is over, or its "
                    "coordinator has ended (fedsim resume makes a new join.json)"
                )
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise KeyRefused(f"the coordinator at {self.address} does not accept this key (any longer)")
        raise TaskError(
            f"no coordinator with the key of the join file answered at {self.address} within {patience:g} s; "
            "is it running, and is that its address as seen from here (--connect)?"
        )

    def send(self, envelope: Envelope, deadline: float = 60.0) -> None:
        """Send an envelope to the coordinator.

        Raises:
            ConnectionLost: if the connection has ended.
            WireError: if it cannot be sent within `deadline` seconds.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLOUT)
        if self._monitor is not None:
            poller.register(self._monitor, zmq.POLLIN)
        until = time.monotonic() + deadline
        while (left := until - time.monotonic()) > 0:
            ready = dict(poller.poll(int(left * 1000)))
            if self._monitor in ready:  # the connection has ended, and there may be no new one
                raise self._lost()
            with suppress(zmq.Again):
                self._socket.send_multipart([envelope.head, *envelope.frames], flags=zmq.NOBLOCK, copy=False)
                return
        raise WireError(f"the coordinator took no envelope for {deadline:g} s")

    def check(self) -> None:
        """Raise ConnectionLost if the connection has ended. Without CURVE keys, do nothing."""
        if self._monitor is not None and self._monitor.poll(0):
            raise self._lost()

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"the connection to {self.address} was lost")

    def offer(self, envelope: Envelope) -> None:
        """Send an envelope if the socket takes it at once; otherwise drop it."""
        with suppress(zmq.Again):
            self._socket.send_multipart([envelope.head, *envelope.frames], flags=zmq.NOBLOCK)

    def receive(self, deadline: float) -> Envelope | None:
        """Return the next envelope, or None after `deadline` seconds.

        Raises:
            ConnectionLost: If the connection has ended, or the coordinator has removed this worker.
        """
        ready = dict(self._poller.poll(int(deadline * 1000)))
        if self._socket in ready:
            frames = self._socket.recv_multipart(copy=False)
            envelope = unpack([f.buffer for f in frames], "from the coordinator")
            if envelope.header.kind != "rejoin":
                return envelope
            if self._monitor not in ready:  # libzmq has not reconnected by itself
                raise ConnectionLost(f"the coordinator at {self.address} had given this worker up")
        if ready:
            raise self._lost()
        return None

    def close(self, linger: float = 0.0) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
        self._socket.close(int(linger * 1000))
        self._context.term()


def bound(socket: zmq.Socket[bytes], max_frame: int, to_send: int = SEND_QUEUE) -> None:
    """Set the options that both ends need: no lingering, short queues, no frame above `max_frame` bytes."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, to_send)
    socket.setsockopt(zmq.RCVHWM, SEND_QUEUE)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame)


def keep_alive(socket: zmq.Socket[bytes]) -> None:
    """Let the kernel detect within half a minute that the other machine is gone. TCP_MAXRT covers the time in
    which sent data is unconfirmed. Unlike ZMTP's heartbeats, these options add no bytes to the stream."""
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 10),
        (zmq.TCP_KEEPALIVE_INTVL, 5),
        (zmq.TCP_KEEPALIVE_CNT, 4),
        (zmq.TCP_MAXRT, 30_000),
    ):
        socket.setsockopt(option, value)
