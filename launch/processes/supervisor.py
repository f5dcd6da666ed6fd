"""The supervisor, which starts worker processes by the fork server, watches their pidfds, and ends them.

This module imports neither torch nor NumPy, because only a process without them can fork the fork server.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedsim.errors import Interrupted, TaskError
from launch.processes.fork_server import ForkServer
from workers.coordinator.worker_pool import ProcessExit
from workers.devices import Placement
from workers.place import Place, engine_of
from workers.transport.eventfd import Wakeup

START_DEADLINE = 120.0
STOP_DEADLINE = 5.0
LAST_WORDS = 12


@dataclass
class Process:
    """A row of processes.json. `node` is a machine, `gpu` a UUID or '', and `engine` such as 'mpi', or ''."""

    role: str
    index: int
    pid: int
    device: str
    log: str
    started: str
    ended: str | None = None
    node: str = ""
    gpu: str = ""
    engine: str = ""


class Supervisor:
    """The processes of one run. After stop(), none of them is left.
    Methods that wait raise Interrupted after a signal to stop, and TaskError if a process failed to start."""

    def __init__(self, interrupted: Wakeup) -> None:
        self.processes: list[Process] = [_process("coordinator", 0, os.getpid(), "cpu", "")]
        self.changed: Callable[[list[Process]], None] = lambda _: None
        self._interrupted = interrupted
        self._server: ForkServer | None = None
        self._workers: dict[int, Process] = {}
        self._pidfds: dict[int, int] = {}
        self._statuses: dict[int, int] = {}
        self._specs: list[dict[str, Any]] = []
        self._placements: tuple[Placement, ...] = ()

    # ---- starting

    def start_server(self, fresh: bool = False, packages: Sequence[str] = ()) -> None:
        """Start the fork server, by a fork if that is safe and not `fresh`, else as a new interpreter."""
        self._server = ForkServer(fresh, packages)
        self.processes.append(_process("forkserver", 0, self._server.pid, "cpu", ""))

    def start_workers(self, specs: list[dict[str, Any]], placements: tuple[Placement, ...]) -> None:
        """Start all workers, and wait until each has a pid."""
        self._specs, self._placements = specs, placements
        deadline = time.monotonic() + START_DEADLINE
        self._expect("ready", deadline)
        for spec in specs:
            self._send({"start": spec})
        for _ in specs:
            self._started(self._expect("started", deadline))
        self.changed(self.processes)

    def replace(self, worker: int, address: str) -> None:
        """Start another process in place of one that has ended."""
        self._statuses.pop(worker, None)
        self._send({"start": self._specs[worker] | {"address": address}})
        self._started(self._expect("started", time.monotonic() + START_DEADLINE))
        self.changed(self.processes)

    def kill(self, worker: int) -> None:
        """Kill a worker's process. fds() and check() report its end like that of any other process."""
        for fd, index in self._pidfds.items():
            if index == worker:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)

    def _started(self, answer: dict[str, Any]) -> None:
        index, pid = answer["started"], answer["pid"]
        spec = self._specs[index]
        worker = _process("worker", index, pid, str(self._placements[index]), spec["log"])
        self.processes.append(worker)
        self._workers[index] = worker
        try:
            self._pidfds[os.pidfd_open(pid)] = index
        except ProcessLookupError:
            raise TaskError(f"worker {index} ended at once.\n{self._log_tail(index)}") from None

    def _send(self, message: dict[str, Any]) -> None:
        assert self._server is not None
        try:
            self._server.link.send(json.dumps(message).encode())
        except OSError:
            raise self._server_lost(self._server) from None

    def _expect(self, key: str, deadline: float) -> dict[str, Any]:
        """Return the next message that has `key`; record the ends of workers that are reported before it."""
        assert self._server is not None
        while True:
            left = deadline - time.monotonic()
            fds = [self._server.link.fileno(), self._interrupted.fd]
            ready, _, _ = select.select(fds, [], [], max(0.0, left))
            if self._interrupted.fd in ready:
                raise Interrupted("interrupted")
            if not ready:
                raise TaskError(f"the fork server did not answer within {START_DEADLINE:g} s")
            data = self._server.link.recv(1 << 16)
            if not data:
                raise self._server_lost(self._server)
            message: dict[str, Any] = json.loads(data)
            if "ended" in message:
                self._statuses[message["ended"]] = message["status"]
            if key in message:
                return message

    def _server_lost(self, server: ForkServer) -> TaskError:
        code = server.end(patience=1.0)
        text = "\n".join(server.output.splitlines()[-LAST_WORDS:])
        return TaskError(f"the fork server ended (exit code {code}).\n{text}")

    # ---- watching (workers.coordinator.worker_pool.WorkerPool)

    def fds(self) -> list[int]:
        return [self._interrupted.fd, *self._pidfds]

    def check(self, ready: list[int]) -> ProcessExit | None:
        """Return the end of a worker whose descriptor is among the ready ones, if any."""
        if self._interrupted.fd in ready:
            raise Interrupted("interrupted")
        for fd in ready:
            if fd in self._pidfds:
                index = self._note_end(fd)
                how = self._how(index)
                return ProcessExit(index, how, self._log_tail(index), self._statuses.get(index))
        return None

    def _note_end(self, fd: int) -> int:
        index = self._pidfds.pop(fd)
        os.close(fd)
        self._workers[index].ended = _now()
        self.changed(self.processes)
        return index

    def _how(self, index: int) -> str:
        """Describe a worker's end, as the fork server saw it."""
        if index not in self._statuses:
            try:
                deadline = time.monotonic() + 1.0
                while index not in self._statuses:
                    self._expect("ended", deadline)
            except TaskError:
                return "ended"
        status = self._statuses[index]
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with exit code {status}"

    def _log_tail(self, index: int) -> str:
        log = Path(self._workers[index].log)
        try:
            lines = log.read_text(errors="replace").splitlines()[-LAST_WORDS:]
        except OSError:
            lines = []
        if not lines:
            return f"Its log {log} is empty."
        return f"The last lines of {log}:\n" + "\n".join(f"  {line}" for line in lines)

    # ---- remote workers, which other machines start

    def note_remote(self, index: int, pid: int, host: str) -> None:
        """Record a worker with the process `pid` of the machine `host`."""
        self._workers[index] = _process("remote worker", index, pid, "", "")
        self._workers[index].node = host
        self.processes.append(self._workers[index])
        self.changed(self.processes)

    def note_place(self, index: int, place: Place) -> None:
        row = self._workers.get(index)
        if row is not None and row.ended is None:
            row.node, row.device, row.gpu, row.engine = place.node, place.device, place.gpu, place.engine
            self.changed(self.processes)

    def note_left(self, index: int) -> None:
        self._workers[index].ended = _now()
        self.changed(self.processes)

    # ---- ending

    def stop(self, gently: bool) -> None:
        """Wait for the workers if they were told to stop (gently), and kill the rest. No process is left."""
        self._await_ends(STOP_DEADLINE if gently else 0.0)
        for fd in self._pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        self._await_ends(STOP_DEADLINE)
        if self._server is not None:
            self._server.end(patience=1.0)
        for process in self.processes:
            process.ended = process.ended or _now()
        self.changed(self.processes)

    def _await_ends(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._pidfds and (left := deadline - time.monotonic()) > 0:
            for fd in select.select(list(self._pidfds), [], [], left)[0]:
                self._note_end(fd)


def _process(role: str, index: int, pid: int, device: str, log: str) -> Process:
    return Process(role, index, pid, device, log, _now(), node=platform.node(), engine=engine_of(os.environ))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
