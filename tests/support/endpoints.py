"""Endpoints for tests: answers in any order, counted bytes, two real workers over ZeroMQ."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from fedsim.problem import Problem
from fedsim.wire.envelope import VERSION, Envelope, Header, blob, pack, unpack
from fedsim.wire.ledger import Ledger
from fedsim.wire.wire_size import framing
from tests.support.commands import DEADLINE
from tests.support.harness import CLIENTS
from workers.coordinator.worker_pool import ProcessExit
from workers.protocol_messages import WorkerManifest
from workers.transport.endpoint import Endpoint, Incoming, Loopback
from workers.transport.listeners import Transport, local_listener
from workers.transport.router import ZmqEndpoint
from workers.worker.runtime import WorkerRuntime

MAX_FRAME = 1 << 22


class Shuffled(Endpoint):
    """Three workers in this process that answer in an order of the test's choosing.

    choose(candidates) picks whose turn it is from {worker: the client of its oldest envelope}.
    """

    def __init__(
        self, ledger: Ledger, runtimes: list[WorkerRuntime], choose: Callable[[dict[int, int]], int]
    ) -> None:
        super().__init__(ledger)
        self.runtimes, self.choose = runtimes, choose
        self._queues: dict[int, list[Envelope]] = {w: [] for w in range(len(runtimes))}
        fields, frames = blob("ready", msgspec.json.encode(WorkerManifest("", {})))
        header = Header(VERSION, "ready", "run", fields=fields)
        self._ready = [Incoming(w, pack(header, frames)) for w in self._queues]
        self.order: list[tuple[int, int]] = []
        """(round, client) of uploads as they arrived."""

    def send(self, worker: int, envelope: Envelope, second: bool = False) -> None:
        self._book(envelope, worker, "down", second)
        if envelope.header.kind != "stop":
            self._queues[worker].append(unpack([envelope.head, *envelope.frames], "here"))

    def wait(self, fds: list[int], timeout: float) -> tuple[list[Incoming], list[int]]:
        if self._ready:
            ready, self._ready = self._ready, []
            return ready, []
        waiting = {w: q[0].header.client for w, q in self._queues.items() if q}
        readable, _, _ = select.select(fds, [], [], 0 if waiting else timeout)
        if readable or not waiting:
            return [], readable
        worker = self.choose(waiting)
        reply = self.runtimes[worker].handle(self._queues[worker].pop(0))
        self._book(reply, worker, "up")
        if reply.header.kind == "upload":
            self.order.append((reply.header.round, reply.header.client))
        return [Incoming(worker, unpack([reply.head, *reply.frames], "here"))], []


def three_workers(problem: Problem, folder: Path, ledger: Ledger) -> Endpoint:
    """Three workers, of which the one with the most tasks answers next."""
    runtimes = [WorkerRuntime(problem, folder, "run", w) for w in range(3)]
    return Shuffled(ledger, runtimes, lambda waiting: min(waiting, key=lambda w: (-waiting[w], w)))


class LateScores(Shuffled):
    """Answers training first, and of the envelopes of evaluation the newest first."""

    def __init__(self, ledger: Ledger, runtimes: list[WorkerRuntime]) -> None:
        super().__init__(ledger, runtimes, self.newest)
        self.scored: list[int] = []
        self._folds = 0

    def wait(self, fds: list[int], timeout: float) -> tuple[list[Incoming], list[int]]:
        if len(self.order) == CLIENTS * (self._folds + 1):  # all are in: the fold thread is at work
            self._folds += 1
            return [], select.select(fds, [], [], timeout)[0]
        return super().wait(fds, timeout)

    def newest(self, waiting: dict[int, int]) -> int:
        heads = {w: self._queues[w][0].header for w in waiting}
        worker = max(heads, key=lambda w: (heads[w].kind == "task", heads[w].round))
        if heads[worker].kind == "evaluate":
            self.scored.append(heads[worker].round)
        return worker


class Counting(Loopback):
    """Counts what passes, apart from Endpoint's own books and the ledger."""

    def __init__(self, ledger: Ledger, runtime: WorkerRuntime) -> None:
        super().__init__(ledger, runtime)
        self.frames = {"down": 0, "up": 0}
        self.framing = {"down": 0, "up": 0}

    def count(self, direction: str, envelope: Envelope) -> None:
        sizes = [len(envelope.head), *(memoryview(f).nbytes for f in envelope.frames)]
        self.frames[direction] += sum(sizes)
        self.framing[direction] += framing(sizes)

    def send(self, worker: int, envelope: Envelope, second: bool = False) -> None:
        self.count("down", envelope)
        super().send(worker, envelope, second)

    def wait(self, fds: list[int], timeout: float) -> tuple[list[Incoming], list[int]]:
        envelopes, ready = super().wait(fds, timeout)
        for incoming in envelopes:
            self.count("up", incoming.envelope)
        return envelopes, ready


class Pool:
    """A fork server (launch.processes.fork_server's own protocol) that starts two real workers for every run.

    Also the run's worker pool: a worker that ends before its run does is a death.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        self.server = subprocess.Popen(
            [sys.executable, "-m", "launch.processes.fork_server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        ours.settimeout(DEADLINE)
        self.link = ours
        self.pidfds: dict[int, int] = {}
        assert json.loads(ours.recv(1 << 16)) == {"ready": True}

    def connect(
        self,
        problem: Problem,
        folder: Path,
        ledger: Ledger,
        transport: Transport = "ipc",
        through: Callable[[str], str] = lambda address: address,
    ) -> Endpoint:
        """through: from the endpoint's address to the one that workers are told."""
        listener = local_listener(transport)
        endpoint = ZmqEndpoint(ledger, listener, MAX_FRAME)
        address = through(endpoint.address)
        cores = sorted(os.sched_getaffinity(0))
        for i in range(2):
            spec = {
                "index": i,
                "address": address,
                "token": listener.token,
                "max_frame": MAX_FRAME,
                "log": str(folder / "logs" / f"worker-{i}.log"),
                "device": "cpu",
                "cores": cores,
                "env": {},
            }
            self.link.send(json.dumps({"start": spec}).encode())
            answer: dict[str, Any] = {}
            while "started" not in answer:  # on the way: the ends of an earlier run's workers
                answer = json.loads(self.link.recv(1 << 16))
            self.pidfds[os.pidfd_open(answer["pid"])] = i
        return endpoint

    def fds(self) -> list[int]:
        return list(self.pidfds)

    def check(self, ready: list[int]) -> ProcessExit | None:
        for fd in ready:
            if fd in self.pidfds:
                return ProcessExit(self.pidfds[fd], "ended", "see its log")
        return None

    def replace(self, worker: int, address: str) -> None:
        raise AssertionError(f"worker {worker} has ended")

    def kill(self, worker: int) -> None:
        raise AssertionError(f"worker {worker} is to be killed")

    def finish(self) -> None:
        """End the run's workers. All that they compute is on disk before they reply."""
        for fd in self.pidfds:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            select.select([fd], [], [], 10.0)
            os.close(fd)
        self.pidfds = {}

    def close(self) -> None:
        self.finish()
        self.link.close()  # end of file ends the server
        self.server.wait(DEADLINE)
