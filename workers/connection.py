"""A worker's side of the wire."""

from __future__ import annotations

import os

import msgspec
import zmq

from fedsim.errors import WireError
from fedsim.wire.letter import VERSION, Header, Letter, blob, open_letter, seal

SEND_QUEUE = 8
"""Letters queued for one worker; it never holds more than two tasks and a few small letters."""


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
