"""The workers of a run: their registration, their leases, and their replacement when they leave.

A local worker that dies, or whose lease ends, is replaced, unless too many workers have died in the same
task. When a remote worker leaves, the other workers compute its tasks until a worker joins in its place.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from fedsim.errors import AccessError, TaskError, WireError
from fedsim.round_events import ChunkId, Command, Event, Give, Joined, Left, ScoreChunk, WorkItem
from fedsim.round_machine import RoundMachine
from fedsim.wire.envelope import NONE, Envelope
from workers import protocol_messages as messages
from workers.coordinator import failures
from workers.coordinator.broadcasts import Dispatch
from workers.coordinator.responses import ProtocolViolation
from workers.coordinator.worker_pool import ProcessExit, WorkerPool
from workers.numerics import Difference, Facts, differences
from workers.place import Place
from workers.protocol_messages import WorkerConfig, WorkerManifest
from workers.storage.journal import Journal
from workers.transport.endpoint import Endpoint
from workers.transport.handshake import Hello, refusal

REFUSED_GRACE = 10.0
"""Seconds to wait for other workers before the first round, if all missing workers were refused."""
MAX_TASK_FAILURES = 3
"""The number of worker deaths in one task, or of one worker during its start, that ends the run."""
FIRST_WORD = 20.0
"""The shortest lease in seconds of a process that has not sent its hello, because it imports torch first."""


class WorkerCallbacks(Protocol):
    """Callbacks for workers that join and leave."""

    def joined(self, worker: int, hello: Hello) -> None: ...

    def left(self, worker: int, why: str) -> None: ...

    def admitted(self, worker: int, facts: Facts, drift: str, place: Place) -> None: ...

    def waits(self, why: str) -> None: ...


class Registration:
    """The expected workers.

    worker_config: the configuration of all workers, without their indices. manifest: the values that a worker
    must report. workers: the number of processes. allow_drift: True to accept workers with other numerics.
    """

    def __init__(
        self, worker_config: WorkerConfig, manifest: WorkerManifest, workers: int, allow_drift: bool = False
    ) -> None:
        self.worker_config, self.manifest, self.workers = worker_config, manifest, workers
        self.allow_drift = allow_drift
        self.facts = dict(manifest.facts)
        """The numerics of the run. The first worker provides those that the coordinator does not know."""
        self.places: dict[int, Place] = {}
        self.ready: set[int] = set()
        self.setting_up: set[int] = set()
        """Workers that have their configuration and are not ready yet."""
        self.refused: dict[int, str] = {}
        """The last reason why a worker could not take part, by worker that is not ready."""

    def cannot_start(self) -> bool:
        """Return whether workers are missing, all of them were refused, and none is being set up."""
        missing = self.missing
        return bool(missing) and self.refused.keys() >= set(missing) and not self.setting_up

    @property
    def missing(self) -> list[int]:
        """The workers that are not ready yet."""
        return sorted(set(range(self.workers)) - self.ready)

    def config_of(self, worker: int) -> WorkerConfig:
        """Return the configuration of a joining worker, and record that the worker is being set up."""
        self.setting_up.add(worker)
        return msgspec.structs.replace(self.worker_config, index=worker)

    def check_worker(self, worker: int, envelope: Envelope) -> tuple[str, str]:
        """Check a worker's manifest, and count the worker as ready if the manifest fits the run.

        Returns:
            The reason to refuse the worker, or ''; and the differences of its numerics, or ''.

        Raises:
            WireError: If the worker's message cannot be read.
        """
        theirs = WorkerManifest.of(envelope)
        self.places[worker] = theirs.place
        drift = list(differences(theirs.facts, self.facts))
        why = theirs.differ(self.manifest)
        if not why and drift and not self.allow_drift:
            why = self._other_bits(theirs, drift)
        if not why:
            self.ready.add(worker)
            self.setting_up.discard(worker)
            self.refused.pop(worker, None)
            self.facts = {**theirs.facts, **self.facts}
        return why, "; ".join(map(str, drift))

    def _other_bits(self, theirs: WorkerManifest, drift: list[Difference]) -> str:
        """Return the reason to refuse a worker with other numerics, with possible remedies."""
        processors = ""
        if theirs.processor != self.manifest.processor:
            processors = f" (it runs on {theirs.processor}, the coordinator on {self.manifest.processor})"
        return (
            f"it computes other bits: {'; '.join(map(str, drift))}{processors}. Take machines of one "
            "kind, or start the run with --numerics portable, or with --allow-drift"
        )

    def refuse(self, worker: int, why: str) -> None:
        """Record why a worker cannot take part."""
        self.setting_up.discard(worker)
        self.refused[worker] = why

    def left(self, worker: int) -> None:
        """Forget a worker that has left."""
        self.setting_up.discard(worker)
        self.ready.discard(worker)


@dataclass(frozen=True)
class Timeouts:
    """Limits in seconds.

    join_within: until all workers have joined. lease: until a silent worker is removed. patience: until the
    run stops because nothing has happened. remote: True if the workers are on other machines.
    """

    join_within: float
    lease: float
    patience: float
    remote: bool = False


@dataclass(frozen=True)
class Workers:
    """The workers of a run: their endpoint, processes, registration and time limits.

    lanes: the number of tasks that a worker computes at once.
    """

    endpoint: Endpoint
    pool: WorkerPool
    registration: Registration
    timeouts: Timeouts
    lanes: int = 1


class Leases:
    """The leases of workers: the deadlines before which workers must send a sign of life."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._heard: dict[int, float] = {}

    def heard(self, worker: int) -> None:
        self._heard[worker] = self._clock()

    def assigned(self, commands: Iterable[Command], machine: RoundMachine) -> None:
        """Begin the leases of idle workers to which these commands give work."""
        pieces = Counter(c.worker for c in commands if isinstance(c, Give | ScoreChunk))
        for worker, count in pieces.items():
            if len(machine.held_by(worker)) <= count:
                self.heard(worker)

    def starts(self, worker: int) -> None:
        """Begin the lease of a starting worker, at least FIRST_WORD seconds, if it has none."""
        self._heard.setdefault(worker, self._clock() + max(0.0, FIRST_WORD - self.seconds))

    def forget(self, worker: int) -> None:
        """End a worker's lease."""
        self._heard.pop(worker, None)

    def left(self, working: list[int]) -> float:
        """Return the seconds until the first lease of these workers ends, at least 0."""
        now = self._clock()
        ends = [self._heard.setdefault(worker, now) + self.seconds for worker in working]
        return max(0.0, min(ends, default=now + self.seconds) - now)

    def over(self, working: list[int]) -> list[int]:
        """Return the workers among these whose leases have ended."""
        now = self._clock()
        return [w for w in working if self._heard.setdefault(w, now) + self.seconds <= now]


class Membership:
    """The workers that take part in a run. Its methods return the resulting events for the round machine.

    begun: True once the first round is open. Until then, the machine is not told of workers.
    """

    def __init__(
        self,
        workers: Workers,
        dispatch: Dispatch,
        machine: RoundMachine,
        callbacks: WorkerCallbacks,
        journal: Journal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registration, self.timeouts = workers.registration, workers.timeouts
        self.endpoint, self.worker_pool = workers.endpoint, workers.pool
        self.dispatch, self.machine, self.callbacks, self.journal = dispatch, machine, callbacks, journal
        self._clock = clock
        self.leases = Leases(workers.timeouts.lease, clock)
        self.begun = False
        self._task_failures: Counter[WorkItem | str] = Counter()
        """The number of worker deaths by task, or by state for workers without a task."""
        self._join_until = math.inf
        """The time at which the run stops waiting for workers."""

    @property
    def size(self) -> int:
        """The number of expected processes; 0 if the coordinator computes the tasks itself."""
        return self.registration.workers

    # ---- joining

    def waiting(self, all_of_them: bool) -> Iterator[float]:
        """While workers are missing, yield the next timeout. all_of_them: wait for all, not only for one.

        Raises:
            TaskError: If the workers do not join in time.
            AccessError: If all missing workers were refused.
        """
        self._join_until, last_chance = self._clock() + self.timeouts.join_within, math.inf
        while self.registration.missing if all_of_them else self.size and not self.registration.ready:
            if not (all_of_them and self.registration.cannot_start()):
                last_chance = math.inf
            elif last_chance == math.inf:
                last_chance = self._clock() + REFUSED_GRACE
                self.callbacks.waits(
                    f"no missing worker can take part; waiting {REFUSED_GRACE:g} s for others"
                )
            left = min(self._join_until, last_chance) - self._clock()
            if left <= 0:
                raise self._incomplete()
            yield min(left, self.leases.left(self._watched()))

    def _incomplete(self) -> TaskError | AccessError:
        registration = self.registration
        refused = "; ".join(f"worker {worker}: {why}" for worker, why in sorted(registration.refused.items()))
        refused = f"; refused: {refused}" if refused else ""
        if registration.cannot_start():
            return AccessError(f"{len(registration.ready)} of {self.size} workers can take part{refused}")
        missing = ", ".join(f"worker {worker}" for worker in registration.missing)
        return TaskError(
            f"{len(registration.ready)} of {self.size} workers were ready after "
            f"{self.timeouts.join_within:g} s; missing: {missing}{refused}"
        )

    def begin(self) -> list[Event]:
        """Let all ready workers take part in the first round, which is now open."""
        self.begun = True
        self.registration.refused.clear()
        self._stop_accepting()
        return [Joined(worker) for worker in (sorted(self.registration.ready) if self.size else [0])]

    def hello(self, worker: int, hello: Hello) -> None:
        """Send the configuration to a worker that has connected."""
        config = self.registration.config_of(worker)
        self.leases.heard(worker)
        self.dispatch.send(worker, messages.welcome(self.dispatch.run, config))
        self.callbacks.joined(worker, hello)

    def ready(self, worker: int, envelope: Envelope) -> list[Event]:
        """Let a worker that is set up take part if its manifest fits the run; refuse it otherwise.

        Raises:
            AccessError: If the manifest of a local worker does not fit.
            ProtocolViolation: If the message breaks the protocol.
        """
        if not self.size:
            raise ProtocolViolation("says that it is ready, but this run expects no workers")
        if worker in self.registration.ready:
            return []
        try:
            why, drift = self.registration.check_worker(worker, envelope)
        except WireError as e:
            raise ProtocolViolation(f"sends {e}") from None
        if not why:
            self.leases.forget(worker)
            self._task_failures.pop(_starting(worker), None)
            registration = self.registration
            self.callbacks.admitted(worker, registration.facts, drift, registration.places[worker])
            if not self.begun:
                return []
            self._stop_accepting()
            return [Joined(worker)]
        if not self.timeouts.remote:
            raise AccessError(f"worker {worker}: {why}")
        self.endpoint.send(worker, refusal(why))
        self.endpoint.dismiss(worker)
        self.registration.refuse(worker, why)
        self.callbacks.left(worker, f"refused: {why}")
        return []

    def _stop_accepting(self) -> None:
        if not self.registration.missing:
            self.endpoint.stop_accepting()

    # ---- leaving

    def failed(self, worker: int, envelope: Envelope) -> None:
        """Handle a worker's error.

        An error in a task that the worker holds ends the run, because it would occur in any other worker,
        too. Errors in other tasks are ignored. A remote worker whose set-up has failed may join again.

        Raises:
            TaskError: If a task, or a local worker's set-up, has failed.
            DiskError: If the worker could not read or write a file.
            ProtocolViolation: If a remote worker reports a failure of its set-up after it was ready.
        """
        if envelope.header.round != NONE and not self._holds(worker, envelope):
            return
        registration, why = self.registration, failures.reason(envelope)
        if not self.timeouts.remote or envelope.header.round != NONE:
            raise failures.failure(worker, envelope, worker in registration.ready)
        if worker in registration.ready:
            raise ProtocolViolation(f"failed ({why})")
        self.endpoint.dismiss(worker)
        registration.refuse(worker, why)
        self.callbacks.left(worker, f"could not set itself up: {why}")

    def died(self, process_exit: ProcessExit) -> list[Event]:
        """Replace a process that has ended.

        Raises:
            TaskError: If MAX_TASK_FAILURES workers have died in the same task or state.
        """
        worker = process_exit.worker
        starting = worker not in self.registration.ready
        between = f"between tasks in round {self.machine.round}"
        at: list[WorkItem | str] = [_starting(worker)] if starting else [*self.machine.doing(worker)]
        at = at or [between]
        self._task_failures.update(at)
        most = max(self._task_failures[place] for place in at)
        if most >= MAX_TASK_FAILURES:
            raise failures.task_failures(self._doing(worker), process_exit, most)
        events = self.left(worker, process_exit.how)
        self.worker_pool.replace(worker, self.endpoint.accept())
        return events

    def left(self, worker: int, why: str) -> list[Event]:
        """Remove a worker that has left. Others compute its tasks, and another may join in its place."""
        self.callbacks.left(worker, f"{why} {self._doing(worker)}")
        self.journal.append("left", worker=worker, round=self.machine.round)
        self.endpoint.dismiss(worker)
        self.leases.forget(worker)
        self.dispatch.left(worker)
        was_ready = worker in self.registration.ready
        self.registration.left(worker)
        return [Left(worker)] if was_ready and self.begun else []

    def give_up(self, worker: int, why: str) -> list[Event]:
        """Dismiss a remote worker, or kill a local one, because it hangs or breaks the protocol.

        Raises:
            TaskError: If the run has no worker processes.
        """
        if not self.size:
            raise TaskError(f"worker {worker} {why}")
        self.leases.forget(worker)
        if self.timeouts.remote:
            return self.left(worker, why)
        self.callbacks.left(worker, f"{why} {self._doing(worker)}, and is killed")
        if worker not in self.registration.ready:
            self._join_until = self._clock() + self.timeouts.join_within  # for its replacement
        self.worker_pool.kill(worker)  # its process handle reports its end
        return []

    def _doing(self, worker: int) -> str:
        if worker in self.registration.missing:
            return "while it started"
        return failures.doing(self.machine, worker)

    # ---- leases

    def _watched(self) -> list[int]:
        """Return the workers whose leases count: those with work, and those that are starting.

        A local worker is starting until it is ready, a remote one from its hello until it is ready.
        """
        registration = self.registration
        missing = sorted(registration.setting_up) if self.timeouts.remote else registration.missing
        for worker in missing:
            self.leases.starts(worker)
        return [*self.machine.working, *missing]

    def alive(self, worker: int, envelope: Envelope) -> bool:
        """Handle a heartbeat; return whether the worker holds the task that the heartbeat names.

        If so, and during the worker's set-up, the lease is renewed. A remote worker's heartbeat without a
        task is answered, so that the idle worker knows that the coordinator is alive.
        """
        if worker in self.registration.setting_up:
            self.leases.heard(worker)
            return False
        if self.timeouts.remote and envelope.header.client == envelope.header.round == NONE:
            self.dispatch.send(worker, messages.idle(self.dispatch.run))
            return False
        counts = self._holds(worker, envelope)
        if counts:
            self.leases.heard(worker)
        return counts

    def _holds(self, worker: int, envelope: Envelope) -> bool:
        """Return whether a worker holds the task or chunk that its envelope names."""
        h = envelope.header
        if h.client == NONE:
            return self.machine.holds(worker, ChunkId(h.round, h.exchange))
        tasks = self.machine.held_by(worker)
        return (h.round, h.exchange, h.client) in [(t.round, t.exchange, t.client) for t in tasks]

    def patience(self) -> float:
        """Return the seconds to wait for events, at most until the first lease ends."""
        if not self.size:
            return self.timeouts.patience
        return min(self.timeouts.patience, self.leases.left(self._watched()))

    def silent(self) -> list[int]:
        """Return the workers whose leases have ended: they hang or are stopped."""
        return self.leases.over(self._watched()) if self.size else []


def _starting(worker: int) -> str:
    return f"start of worker {worker}"
