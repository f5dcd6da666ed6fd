"""The addresses at which the coordinator listens, and the authentication of workers.

Workers that the run starts itself connect through a private folder (ipc) or a local port (tcp), and send the
run's token. Remote workers connect to a CURVE listener, and need a key on its list. At every listener, libzmq
refuses peers that do not speak ZMTP 3 (workers.transport.zap).
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from typing import Literal

import zmq

from fedsim.errors import AccessError, UsageError, WireError
from fedsim.wire import wire_size
from workers.scratch import Scratch, parent_of_sockets
from workers.transport.dealer import keep_alive
from workers.transport.handshake import Hello
from workers.transport.join_credentials import KeyPair, Revocations
from workers.transport.tcp_address import TcpAddress
from workers.transport.zap import guard

Transport = Literal["ipc", "tcp"]


class Listener(ABC):
    """A way to listen for workers.

    mechanism: ZMTP's security mechanism. port: the TCP port, 0 if there is none. watched: True if the end of
    a worker is known from its connection, not from a process handle.
    """

    mechanism: wire_size.Mechanism
    port: int
    watched: bool

    @abstractmethod
    def open(self, socket: zmq.Socket[bytes]) -> str:
        """Bind the socket; return the address to connect to.

        Raises:
            UsageError: if the address is not valid or cannot be bound, or libzmq is too old.
        """

    @abstractmethod
    def reopen(self, socket: zmq.Socket[bytes]) -> str:
        """Listen again after stop_accepting(); return the address, which may be new."""

    @abstractmethod
    def identify(self, hello: Hello, key: str) -> int:
        """Return the worker that sent a hello.

        key: the authenticated public key of its connection; '' without CURVE.

        Raises:
            WireError: if the peer is not authenticated.
            AccessError: if the worker was revoked.
        """

    def owner(self, key: str) -> int | None:
        """Return the worker with a public key; None if there is none, or if it was revoked."""
        return None

    def revoked(self) -> frozenset[int]:
        """Return the workers whose keys were revoked; other threads call this, too."""
        return frozenset()

    def stop_accepting(self) -> None:
        """Stop listening, if the listener can, because all workers have joined."""

    def close(self) -> None:
        """Release the listener's files; call this after the socket is closed."""


class _TokenListener(Listener):
    """A listener for workers that the run has started. libzmq accepts all peers; identify() checks tokens."""

    mechanism = wire_size.NULL
    watched = False

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self.port = 0

    def identify(self, hello: Hello, key: str) -> int:
        if not secrets.compare_digest(hello.token.encode(), self.token.encode()):
            raise WireError("not of this run")
        return hello.index


class IpcListener(_TokenListener):
    """A listener for ipc in a folder that only this user can enter.

    The folder is removed as soon as all workers have joined; open connections stay. If the process crashes
    earlier, the next run removes the folder.
    """

    def open(self, socket: zmq.Socket[bytes]) -> str:
        guard(socket, lambda key: True)
        return self._bind(socket)

    def reopen(self, socket: zmq.Socket[bytes]) -> str:
        if self._folder.path.exists():
            return self._address
        return self._bind(socket)  # the old address stays bound: unbinding would end its connections

    def _bind(self, socket: zmq.Socket[bytes]) -> str:
        self._folder = Scratch("fedsim-listener-", parent_of_sockets())
        self._address = f"ipc://{self._folder.path}/coordinator"
        socket.bind(self._address)
        return self._address

    def stop_accepting(self) -> None:
        self._folder.remove()

    def close(self) -> None:
        self._folder.remove()


class LocalTcpListener(_TokenListener):
    """A TCP listener on 127.0.0.1, whose bytes the kernel and a relay can count."""

    def open(self, socket: zmq.Socket[bytes]) -> str:
        guard(socket, lambda key: True)
        self.port = socket.bind_to_random_port("tcp://127.0.0.1")
        return self.reopen(socket)

    def reopen(self, socket: zmq.Socket[bytes]) -> str:
        return f"tcp://127.0.0.1:{self.port}"


class CurveListener(Listener):
    """A TCP listener for other machines, with CURVE and a list of allowed keys.

    Each key belongs to one of the workers 0, 1, ... until it is revoked.
    """

    mechanism = wire_size.CURVE
    watched = True

    def __init__(
        self, bind: str, server: KeyPair, workers: tuple[KeyPair, ...], revocations: Revocations
    ) -> None:
        self.bind, self.port = bind, 0
        self._revocations, self._server = revocations, server
        self._workers = {pair.public: index for index, pair in enumerate(workers)}

    def open(self, socket: zmq.Socket[bytes]) -> str:
        address = TcpAddress.to_listen(self.bind)
        guard(socket, lambda key: self.owner(key) is not None)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._server.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._server.secret.encode())
        keep_alive(socket)
        address.allow(socket)
        try:
            socket.bind(str(address))
        except zmq.ZMQError as e:
            raise UsageError(f"--bind {self.bind}: {e.strerror}") from None
        url = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self.port = TcpAddress.to_listen(url).port
        return url

    def reopen(self, socket: zmq.Socket[bytes]) -> str:
        return self.bind

    def identify(self, hello: Hello, key: str) -> int:
        worker = self._workers.get(key)
        if worker is None:
            raise WireError("not of this run")
        if worker in self.revoked():  # the key was revoked after the handshake
            raise AccessError(f"the key of worker {worker} was revoked")
        return worker

    def owner(self, key: str) -> int | None:
        worker = self._workers.get(key)
        return None if worker in self.revoked() else worker

    def revoked(self) -> frozenset[int]:
        return self._revocations.workers()


def local_listener(transport: Transport) -> IpcListener | LocalTcpListener:
    return IpcListener() if transport == "ipc" else LocalTcpListener()
