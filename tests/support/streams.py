"""A pretended GPU for lanes: what is started on a stream has ended some looks later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import torch
import zmq

from fedsim.problem import Problem
from fedsim.wire.envelope import Envelope, unpack
from fedsim.wire.ledger import Ledger
from tests.support.tape import Tapes
from workers.transport.endpoint import Endpoint, Incoming
from workers.worker.lanes import Lanes
from workers.worker.runtime import WorkerRuntime

LOOKS = 4
"""After at most so many looks a stream has computed everything."""


class Device:
    """Its streams, and the one on which kernels are started now."""

    def __init__(self, seed: int) -> None:
        self.random, self.streams, self.current = Random(seed), list["PretendedStream"](), -1

    def stream(self, device: torch.device) -> PretendedStream:
        self.streams.append(PretendedStream(self, len(self.streams)))
        return self.streams[-1]


class PretendedStream:
    """A stream that has ended its work after a few looks, on which all marks before are then passed."""

    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number
        self.entered = self.marked = 0

    def enter(self) -> None:
        self.device.current = self.number
        self.entered += 1

    def mark(self) -> Callable[[], bool]:
        assert self.device.current == self.number, "a task marks another one's stream"
        self.marked += 1
        looks = self.device.random.randrange(LOOKS)

        def passed() -> bool:
            nonlocal looks
            looks -= 1
            return looks < 0

        return passed


class LanedLoopback(Endpoint):
    """One worker with several lanes in this process, on a pretended device."""

    def __init__(self, ledger: Ledger, problem: Problem, folder: Path, lanes: int, seed: int = 0) -> None:
        super().__init__(ledger)
        self.tapes, self.device, self.beats = Tapes(), Device(seed), 0
        problems = [problem, *(problem.beside() for _ in range(1, lanes))]
        for each in problems:
            each.net.recordings = self.tapes.recordings()
        self.runtime = WorkerRuntime(problem, folder, "run", 0, problems)
        self.lanes = Lanes(problems, self.beat, self.device.stream)
        self.queue: deque[Envelope] = deque()
        self.replies: list[Envelope] = []
        self.most = 0
        """The most tasks that were computed at once."""

    def beat(self, *_: object) -> None:
        self.beats += 1

    def send(self, worker: int, envelope: Envelope, retry: bool = False) -> None:
        self._book(envelope, worker, "down", retry)
        self.queue.append(unpack([envelope.head, *envelope.frames], "loopback"))

    def wait(self, fds: list[int], timeout: float) -> tuple[list[Incoming], list[int]]:
        poller = zmq.Poller()
        for fd in fds:
            poller.register(fd, zmq.POLLIN)
        working = self.queue or self.lanes.busy
        ready = [int(fd) for fd, _ in poller.poll(0 if working else int(timeout * 1000))]
        if ready:
            return [], ready
        self.lanes.advance()
        while self.queue and self.lanes.free:
            self.lanes.start(partial(self._answer, self.queue.popleft()))
        self.most = max(self.most, sum(lane.busy for lane in self.lanes._lanes))
        sent, self.replies = self.replies, []
        incoming = [unpack([r.head, *r.frames], "loopback") for r in sent]
        for envelope in incoming:
            self._book(envelope, 0, "up")
        return [Incoming(0, envelope) for envelope in incoming], []

    def _answer(self, envelope: Envelope, problem: Problem) -> None:
        replies = self.runtime.replies(envelope, problem)  # meanwhile others answer
        self.replies += replies
