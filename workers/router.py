"""The coordinator's socket: a ROUTER that knows its workers."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from fedsim.errors import TaskError, WireError
from fedsim.wire.ledger import Ledger
from fedsim.wire.letter import Letter, open_letter
from workers import kernel
from workers.connection import SEND_QUEUE, Hello
from workers.endpoint import Endpoint, Incoming

Transport = Literal["ipc", "tcp"]


class ZmqEndpoint(Endpoint):
    """A ROUTER socket on a private ipc folder or on loopback tcp.

    A worker proves itself with the run's token in its hello (design: routing ids are ZeroMQ's own;
    a stranger's letters are dropped). MANDATORY: a letter to a vanished worker is an error, not lost.
    """

    def __init__(self, ledger: Ledger, transport: Transport, max_frame: int) -> None:
        super().__init__(ledger)
        self.token = secrets.token_hex(16)
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 64)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        self._socket.setsockopt(zmq.RCVHWM, SEND_QUEUE)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
        self._folder: Path | None = None
        self._port = 0
        if transport == "ipc":
            short = len(tempfile.gettempdir()) < 60  # a socket's path has at most 107 bytes
            self._folder = Path(tempfile.mkdtemp(prefix="fedsim-", dir=None if short else "/tmp"))  # 0700
            self.address = f"ipc://{self._folder}/coordinator"
            self._socket.bind(self.address)
        else:
            self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
            self.address = f"tcp://127.0.0.1:{self._port}"
        self._workers: dict[bytes, int] = {}
        self._routes: dict[int, bytes] = {}
        self._poller, self._polled = zmq.Poller(), [-1]
        self.strangers = 0

    def send(self, worker: int, letter: Letter) -> None:
        """Errors: TaskError if the worker is gone or does not take its letters."""
        self._book(letter, worker, "down")
        try:
            self._socket.send_multipart(
                [self._routes[worker], letter.head, *letter.frames], flags=zmq.NOBLOCK, copy=False
            )
        except zmq.ZMQError as e:
            raise TaskError(f"cannot send to worker {worker}: {e.strerror}") from None

    def wait(self, fds: list[int], timeout: float) -> tuple[list[Incoming], list[int]]:
        if fds != self._polled:
            self._poller, self._polled = zmq.Poller(), fds
            for item in (*fds, self._socket):
                self._poller.register(item, zmq.POLLIN)
        ready = [item for item, _ in self._poller.poll(int(timeout * 1000))]
        letters = self._receive_all() if self._socket in ready else []
        return letters, [item for item in ready if isinstance(item, int)]

    def _receive_all(self) -> list[Incoming]:
        letters = []
        while True:
            try:
                route, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            incoming = self._accept(bytes(route.buffer), [f.buffer for f in frames])
            if incoming is not None:
                letters.append(incoming)
        return letters

    def _accept(self, route: bytes, frames: list[memoryview]) -> Incoming | None:
        worker = self._workers.get(route)
        if worker is not None:
            letter = open_letter(frames, f"from worker {worker}")
        else:
            try:
                letter = open_letter(frames, "from a stranger")
                worker = self._admit(route, letter)
            except WireError:
                self.strangers += 1
                return None
            self.ledger.book_handshake(worker)
        self._book(letter, worker, "up")
        return Incoming(worker, letter)

    def _admit(self, route: bytes, letter: Letter) -> int:
        """Bind a connection to a worker index by its hello."""
        if letter.header.kind != "hello" or len(letter.frames) != 1:
            raise WireError("no hello")
        try:
            hello = msgspec.json.decode(letter.frames[0], type=Hello)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise WireError(f"an unreadable hello: {e}") from None
        right = secrets.compare_digest(hello.token.encode(), self.token.encode())
        if not right or hello.index in self._routes:
            raise WireError("not of this run")
        self._workers[route] = hello.index
        self._routes[hello.index] = route
        return hello.index

    def residual(self) -> dict[str, int] | None:
        if not self._port:
            return None
        return kernel.residual(self._port, lambda: (self.ledger.booked("down"), self.ledger.booked("up")))

    def close_door(self) -> None:
        """Remove the socket's folder; open connections stay, and no crash can leave it behind."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()
        self.close_door()
