"""The workers of a run: who comes, who goes, and who takes whose place.

A worker on this machine that dies, or whose lease runs out, is replaced, unless what it was at has ended
too many. One elsewhere that is gone is made good by the others until somebody comes in its place.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from fedsim.errors import AccessError, TaskError, WireError
from fedsim.round_events import ChunkId, Event, Joined, Left, WorkItem
from fedsim.round_machine import RoundMachine
from fedsim.wire.envelope import NONE, VERSION, Envelope, Header, blob, pack
from workers.coordinator import failures
from workers.coordinator.broadcasts import Dispatch
from workers.coordinator.registration import Registration
from workers.coordinator.response_filter import ProtocolViolation
from workers.coordinator.worker_pool import ProcessExit, WorkerPool
from workers.storage.journal import Journal
from workers.transport.dealer import Hello
from workers.transport.endpoint import Endpoint
from workers.transport.router import refusal
from workers.worker.heartbeat import Leases

MAX_TASK_FAILURES = 3
"""A task at which so many workers have ended is not given again."""


class WorkerCallbacks(Protocol):
    """Who writes down who was there."""

    def joined(self, worker: int, hello: Hello) -> None: ...

    def left(self, worker: int, why: str) -> None: ...


@dataclass(frozen=True)
class Timeouts:
    """Seconds in which workers must join, after which a silent one is given up, and in which something has
    to happen at all (the longest task, generously). elsewhere: they come from other machines."""

    join_within: float
    lease: float
    patience: float
    remote: bool = False


class Membership:
    """handle: gives the machine an event, and carries out what follows; `begun` once the first round is open,
    before which nobody is told of workers."""

    def __init__(
        self,
        registration: Registration,
        timeouts: Timeouts,
        endpoint: Endpoint,
        worker_pool: WorkerPool,
        dispatch: Dispatch,
        machine: RoundMachine,
        callbacks: WorkerCallbacks,
        journal: Journal,
        handle: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registration, self.timeouts, self.endpoint, self.worker_pool = (
            registration,
            timeouts,
            endpoint,
            worker_pool,
        )
        self.dispatch, self.machine, self.callbacks, self.journal = dispatch, machine, callbacks, journal
        self._handle, self._clock = handle, clock
        self.leases = Leases(timeouts.lease, clock)
        self.begun = False
        self._task_failures: Counter[WorkItem | str | None] = Counter()
        """How many workers have ended at something."""

    @property
    def size(self) -> int:
        """How many there should be; 0 in process."""
        return self.registration.workers

    # ---- coming

    def waiting(self, everybody: bool) -> Iterator[float]:
        """Until all are there, or anybody: the seconds that are left, to wait in and look again.

        Raises:
            TaskError: if they do not come in time.
        """
        deadline = self._clock() + self.timeouts.join_within
        while self.registration.missing if everybody else self.size and not self.registration.ready:
            left = deadline - self._clock()
            if left <= 0:
                missing = ", ".join(map(str, self.registration.missing))
                raise TaskError(
                    f"{len(self.registration.ready)} of {self.size} workers were ready after "
                    f"{self.timeouts.join_within:g} s; missing: {missing}"
                )
            yield left

    def begin(self) -> None:
        """The first round is open: all who are there take part."""
        self.begun = True
        for worker in sorted(self.registration.ready) if self.size else [0]:
            self._handle(Joined(worker))
        self._stop_accepting()

    def hello(self, worker: int, envelope: Envelope) -> None:
        """Tell a newcomer what to do."""
        fields, frames = blob("welcome", self.registration.registration_reply(worker))
        run = self.dispatch.run
        self.dispatch.send(worker, pack(Header(VERSION, "welcome", run, fields=fields), frames))
        self.callbacks.joined(worker, msgspec.json.decode(envelope.frames[0], type=Hello))

    def ready(self, worker: int, envelope: Envelope) -> None:
        """See below.

        Raises:
            AccessError: if a worker of this machine does not have what the run needs.
            ProtocolViolation: if the message breaks the protocol.
        """
        if not self.size:
            raise ProtocolViolation("says that it is ready, and nobody was waited for")
        if worker in self.registration.ready:
            return
        try:
            why = self.registration.check_worker(worker, envelope)
        except WireError as e:
            raise ProtocolViolation(f"sends {e}") from None
        if not why:
            if self.begun:
                self._handle(Joined(worker))
                self._stop_accepting()
            return
        if not self.timeouts.remote:
            raise AccessError(f"worker {worker}: {why}")
        self.endpoint.send(worker, refusal(why))
        self.endpoint.dismiss(worker)
        self.callbacks.left(worker, f"refused: {why}")

    def _stop_accepting(self) -> None:
        if not self.registration.missing:
            self.endpoint.stop_accepting()

    # ---- going

    def failed(self, worker: int, envelope: Envelope) -> None:
        """One elsewhere that cannot set itself up may come again; whatever else fails, fails everywhere. What
        the worker does not hold (any more) may fail.

        Raises:
            TaskError: if a task or a worker fails.
            DiskError: if the disk cannot be read or written.
        """
        if envelope.header.round != NONE and not self._holds(worker, envelope):
            return
        error = failures.failure(worker, envelope)
        if not self.timeouts.remote or envelope.header.round != NONE:
            raise error
        self.endpoint.dismiss(worker)
        self.callbacks.left(worker, str(error))

    def died(self, process_exit: ProcessExit) -> None:
        """Put another process in its place.

        Raises:
            TaskError: after STRIKES at the same thing.
        """
        worker = process_exit.worker
        at = self.machine.doing(worker) if worker in self.registration.ready else "start"
        self._task_failures[at] += 1
        if self._task_failures[at] >= MAX_TASK_FAILURES:
            raise failures.task_failures(self.machine, process_exit, self._task_failures[at])
        self.left(worker, process_exit.how)
        self.worker_pool.replace(worker, self.endpoint.accept())

    def left(self, worker: int, why: str) -> None:
        """A worker is gone: others take over what it held, and another may come in its place."""
        self.callbacks.left(worker, f"{why} {failures.doing(self.machine, worker)}")
        self.journal.append("left", worker=worker, round=self.machine.round)
        self.endpoint.dismiss(worker)
        self.leases.forget(worker)
        self.dispatch.left(worker)
        if worker in self.registration.ready:
            self.registration.ready.discard(worker)
            if self.begun:
                self._handle(Left(worker))

    def give_up(self, worker: int, why: str) -> None:
        """End with a worker that hangs, or does not keep to the protocol; its work is done by others.

        Raises:
            TaskError: in process, where nobody else is.
        """
        if not self.size:
            raise TaskError(f"worker {worker} {why}")
        self.leases.forget(worker)
        if self.timeouts.remote:
            self.left(worker, why)
        else:
            self.callbacks.left(worker, f"{why} {failures.doing(self.machine, worker)}, and is killed")
            self.worker_pool.kill(worker)

    # ---- silence

    def alive(self, worker: int, envelope: Envelope) -> bool:
        """A heartbeat counts for the task, or chunk, that it names."""
        counts = self._holds(worker, envelope)
        if counts:
            self.leases.heard(worker)
        return counts

    def _holds(self, worker: int, envelope: Envelope) -> bool:
        """Whether a worker holds the task, or chunk, that its envelope is about."""
        h = envelope.header
        if h.client == NONE:
            return self.machine.holds(worker, ChunkId(h.round, h.exchange))
        tasks = self.machine.held_by(worker)
        return (h.round, h.exchange, h.client) in [(t.round, t.exchange, t.client) for t in tasks]

    def patience(self) -> float:
        """How long to wait for anything: until the first lease runs out."""
        if not self.size:
            return self.timeouts.patience
        return min(self.timeouts.patience, self.leases.left(self.machine.working))

    def end_leases(self) -> None:
        """Give up the workers that were silent for too long: they hang or are stopped."""
        for worker in self.leases.over(self.machine.working) if self.size else ():
            self.give_up(worker, f"was silent for {self.timeouts.lease:g} s")
