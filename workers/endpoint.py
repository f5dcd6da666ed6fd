"""Where letters meet the socket: the coordinator's side of the wire, and its in-process twin.

Every letter is booked in the ledger here, as it is sent or received, and nowhere else.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from fedsim.errors import TaskError, WireError
from fedsim.wire.ledger import Ledger
from fedsim.wire.letter import VERSION, Header, Letter, blob, open_letter, seal
from workers import kernel
from workers.worker import WorkerRuntime

Transport = Literal["ipc", "tcp"]
SEND_QUEUE = 8
"""Letters queued for one worker; it never holds more than two tasks and a few small letters."""


@dataclass(frozen=True)
class Incoming:
    """A letter from a worker."""

    worker: int
    letter: Letter


class Endpoint(ABC):
    """The coordinator's connection to its workers."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.total_bytes = {"up": 0, "down": 0}
        """Frame bytes that passed this endpoint, counted apart from the ledger."""

    @abstractmethod
    def send(self, worker: int, letter: Letter) -> None: ...

    @abstractmethod
    def wait(self, fds: list[int], timeout: float) -> tuple[list[Incoming], list[int]]:
        """Letters that have arrived and descriptors that are readable; both empty after `timeout`."""

    def residual(self) -> dict[str, int] | None:
        """The kernel's count of the streams minus the ledger's, by direction; None where it has none (ipc,
        in process)."""
        return None

    def close_door(self) -> None:
        """Everybody has joined: nothing need be there for others to connect to."""

    def close(self) -> None:
        """Release sockets and files; letters that are still on their way may be lost."""

    def _book(self, letter: Letter, worker: int, direction: str) -> None:
        self.total_bytes[direction] += len(letter.head) + sum(memoryview(f).nbytes for f in letter.frames)
        self.ledger.book(letter, worker, direction)


class Loopback(Endpoint):
    """One worker in this process: letters are encoded, checked and booked as on the wire."""

    def __init__(self, ledger: Ledger, runtime: WorkerRuntime) -> None:
        super().__init__(ledger)
        self.runtime = runtime
        self._queue: deque[Letter] = deque()

    def send(self, worker: int, letter: Letter) -> None:
        self._book(letter, worker, "down")
        self._queue.append(open_letter([letter.head, *letter.frames], "loopback"))

    def wait(self, fds: list[int], timeout: float) -> tuple[list[Incoming], list[int]]:
        poller = zmq.Poller()
        for fd in fds:
            poller.register(fd, zmq.POLLIN)
        ready = [int(fd) for fd, _ in poller.poll(0 if self._queue else int(timeout * 1000))]
        if ready or not self._queue:
            return [], ready
        reply = self.runtime.handle(self._queue.popleft())
        letter = open_letter([reply.head, *reply.frames], "loopback")
        self._book(letter, 0, "up")
        return [Incoming(0, letter)], []


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


class Hello(msgspec.Struct, forbid_unknown_fields=True):
    """A worker's first letter."""

    token: str
    index: int
    pid: int


class Connection:
    """A worker's side of the wire: a DEALER socket with deadlines."""

    def __init__(self, address: str, token: str, index: int, max_frame: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        self._socket.setsockopt(zmq.RCVHWM, SEND_QUEUE)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
        self._socket.connect(address)
        hello = msgspec.json.encode(Hello(token, index, os.getpid()))
        fields, frames = blob("hello", hello)
        self.send(seal(Header(VERSION, "hello", "", fields=fields), frames), 30.0)

    def send(self, letter: Letter, deadline: float = 60.0) -> None:
        self._socket.setsockopt(zmq.SNDTIMEO, int(deadline * 1000))
        try:
            self._socket.send_multipart([letter.head, *letter.frames], copy=False)
        except zmq.Again:
            raise WireError(f"the coordinator took no letter for {deadline:g} s") from None

    def receive(self, deadline: float) -> Letter | None:
        """The next letter, or None after `deadline` seconds."""
        if not self._socket.poll(int(deadline * 1000)):
            return None
        frames = self._socket.recv_multipart(copy=False)
        return open_letter([f.buffer for f in frames], "from the coordinator")

    def close(self, linger: float = 0.0) -> None:
        self._socket.close(int(linger * 1000))
        self._context.term()
