"""The workers of a run: their registration, their leases, and their replacement when they leave.

A local worker that dies, or whose lease ends, is replaced, unless too many workers have died at the same
task. The tasks of a remote worker that leaves are computed by the others until it, or another one, joins in
its place.
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
"""Seconds for which a run that has not begun waits for others when all missing workers were refused."""
MAX_TASK_FAILURES = 3
"""After this many deaths of workers in one task, the task is not repeated; after this many deaths during its
start, a worker is not started again."""
FIRST_WORD = 20.0
"""The least number of seconds until a process sends its hello: a new interpreter has to import torch."""


class WorkerCallbacks(Protocol):
    """Callbacks for workers that join and leave."""

    def joined(self, worker: int, hello: Hello) -> None: ...

    def left(self, worker: int, why: str) -> None: ...

    def admitted(self, worker: int, facts: Facts, drift: str, place: Place) -> None: ...

    def waits(self, why: str) -> None: ...


class Registration:
    """The expected workers.

    worker_config: for all workers; each worker also gets its index. manifest: the values that a worker must
    have. workers: the number of workers, 0 in process. allow_drift: accept workers that compute other bits.
    """

    def __init__(
        self, worker_config: WorkerConfig, manifest: WorkerManifest, workers: int, allow_drift: bool = False
    ) -> None:
        self.worker_config, self.manifest, self.workers = worker_config, manifest, workers
        self.allow_drift = allow_drift
        self.facts = dict(manifest.facts)
        """The numerics of the run; the coordinator takes unknown values from the first worker."""
        self.places: dict[int, Place] = {}
        """The place of each registered worker."""
        self.ready: set[int] = set()
        self.setting_up: set[int] = set()
        """Workers that are being set up, and have not answered yet."""
        self.refused: list[str] = []
        """The reasons why workers could not take part."""

    def cannot_start(self) -> bool:
        """Return whether as many workers were refused as are missing, and no other one is being set up."""
        return bool(self.missing) and len(self.refused) >= len(self.missing) and not self.setting_up

    @property
    def missing(self) -> list[int]:
        """The workers that are not ready yet."""
        return sorted(set(range(self.workers)) - self.ready)

    def config_of(self, worker: int) -> WorkerConfig:
        """Return the configuration of a worker that joins; the worker counts as being set up from now on."""
        self.setting_up.add(worker)
        return msgspec.structs.replace(self.worker_config, index=worker)

    def check_worker(self, worker: int, envelope: Envelope) -> tuple[str, str]:
        """Check a worker that is set up, and count it as ready if it may take part.

        Returns:
            The reason to refuse the worker, '' if it may take part; and the differences of its numerics, ''
            if there are none.

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
            self.facts = {**theirs.facts, **self.facts}
        return why, "; ".join(map(str, drift))

    def _other_bits(self, theirs: WorkerManifest, drift: list[Difference]) -> str:
        """Return the reason for refusing a worker that computes other bits, with possible remedies."""
        processors = ""
        if theirs.processor != self.manifest.processor:
            processors = f" (it runs on {theirs.processor}, the coordinator on {self.manifest.processor})"
        return (
            f"it computes other bits: {'; '.join(map(str, drift))}{processors}. Take machines of one "
            "kind, or start the run with --numerics portable, or with --allow-drift"
        )

    def refuse(self, worker: int, why: str) -> None:
        """Note that a worker cannot take part."""
        self.setting_up.discard(worker)
        self.refused.append(f"worker {worker}: {why}")

    def left(self, worker: int) -> None:
        """Note that a worker has left."""
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
    """The workers of a run: their endpoint, their authentication and their time limits.

    edges: True if the tree's edge servers are processes, with numbers after those of the workers. lanes: the
    number of tasks that a worker computes at once.
    """

    endpoint: Endpoint
    pool: WorkerPool
    registration: Registration
    timeouts: Timeouts
    edges: bool = False
    lanes: int = 1


class Leases:
    """The times of the last signs of life of workers that have work."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._heard: dict[int, float] = {}

    def heard(self, worker: int) -> None:
        """Renew a worker's lease."""
        self._heard[worker] = self._clock()

    def assigned(self, commands: Iterable[Command], machine: RoundMachine) -> None:
        """Begin the leases of workers that were idle and get work now."""
        pieces = Counter(c.worker for c in commands if isinstance(c, Give | ScoreChunk))
        for worker, count in pieces.items():
            if len(machine.held_by(worker)) <= count:
                self.heard(worker)

    def starts(self, worker: int) -> None:
        """Begin the lease of a worker that starts, if it has none."""
        self._heard.setdefault(worker, self._clock() + max(0.0, FIRST_WORD - self.seconds))

    def forget(self, worker: int) -> None:
        """End a worker's lease."""
        self._heard.pop(worker, None)

    def left(self, working: list[int]) -> float:
        """Return the seconds until the first lease of these workers ends, never less than 0."""
        now = self._clock()
        ends = [self._heard.setdefault(worker, now) + self.seconds for worker in working]
        return max(0.0, min(ends, default=now + self.seconds) - now)

    def over(self, working: list[int]) -> list[int]:
        """Return the workers among these whose leases have ended."""
        now = self._clock()
        return [w for w in working if self._heard.setdefault(w, now) + self.seconds <= now]


class Membership:
    """The workers that take part. Methods return the resulting events for the round machine.

    begun: True once the first round is open; before, the machine is not informed of workers.
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
        self._expected: set[int] = set()
        """Workers that were ended with their edge server; their ends do not count against tasks."""
        self._task_failures: Counter[WorkItem | str] = Counter()
        """The number of workers that died, by their task or state."""
        self._join_until = math.inf
        """The time at which the run stops waiting for workers."""

    @property
    def size(self) -> int:
        """The number of expected workers, 0 in process."""
        return self.registration.workers

    # ---- joining

    def waiting(self, all_of_them: bool) -> Iterator[float]:
        """Yield the seconds left to wait until all workers, or any worker, have joined.

        Raises:
            TaskError: If they do not join in time.
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
        if registration.cannot_start():
            return AccessError(
                f"{len(registration.ready)} of {self.size} workers can take part; refused: "
                + "; ".join(dict.fromkeys(registration.refused))
            )
        missing = ", ".join(f"worker {worker}" for worker in registration.missing)
        return TaskError(
            f"{len(registration.ready)} of {self.size} workers were ready after "
            f"{self.timeouts.join_within:g} s; missing: {missing}"
        )

    def begin(self) -> list[Event]:
        """Let all workers that are ready take part: the first round is open."""
        self.begun = True
        self.registration.refused.clear()
        self._stop_accepting()
        return [Joined(worker) for worker in (sorted(self.registration.ready) if self.size else [0])]

    def hello(self, worker: int, hello: Hello) -> None:
        """Send a worker that has connected its configuration."""
        config = self.registration.config_of(worker)
        self.leases.heard(worker)
        self.dispatch.send(worker, messages.welcome(self.dispatch.run, config))
        self.callbacks.joined(worker, hello)

    def refuse(self, worker: int, why: str) -> None:
        """Refuse a worker; it may reconnect."""
        self.dispatch.send(worker, refusal(why))
        self.endpoint.dismiss(worker)

    def ready(self, worker: int, envelope: Envelope) -> list[Event]:
        """Let a worker that is set up take part, if its manifest fits the run.

        Raises:
            AccessError: If the manifest of a worker of this machine does not fit.
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

        A remote worker that cannot set itself up may join again. An error in a task that the worker does not
        hold (any more) is ignored. An error in a task that it holds would occur in any other worker, too.

        Raises:
            TaskError: If a task, or a local worker's set-up, has failed.
            DiskError: If the worker could not read or write a file.
        """
        if envelope.header.round != NONE and not self._holds(worker, envelope):
            return
        error = failures.failure(worker, envelope)
        if not self.timeouts.remote or envelope.header.round != NONE:
            raise error
        self.endpoint.dismiss(worker)
        self.registration.refuse(worker, failures.reason(envelope))
        self.callbacks.left(worker, str(error))

    def died(self, process_exit: ProcessExit) -> list[Event]:
        """Replace a process that has ended.

        Raises:
            TaskError: If MAX_TASK_FAILURES workers have died at the same task.
        """
        worker, edges = process_exit.worker, self.dispatch.edges
        starting = worker not in self.registration.ready
        between = f"between tasks in round {self.machine.round}"
        at: list[WorkItem | str] = [_starting(worker)] if starting else [*self.machine.doing(worker)]
        if not starting and edges is not None and edges.is_edge(worker):
            at = [f"edge server in round {self.machine.round}"]
        at = at or [between]
        if worker not in self._expected:
            self._task_failures.update(at)
        self._expected.discard(worker)
        most = max(self._task_failures[place] for place in at)
        if most >= MAX_TASK_FAILURES:
            raise failures.task_failures(self._doing(worker), process_exit, most)
        events = self.left(worker, process_exit.how)
        self.worker_pool.replace(worker, self.endpoint.accept())
        return events

    def end_behind(self, worker: int) -> list[Event]:
        """End a worker whose edge server has ended; a new one joins the next edge server.

        A worker on another machine reconnects by itself; the edge server's connection for it is dismissed.
        """
        if not self.timeouts.remote:
            self._expected.add(worker)
            self.worker_pool.kill(worker)
        elif worker in self.registration.ready or worker in self.registration.setting_up:
            return self.left(worker, "its edge server has ended")
        return []

    def left(self, worker: int, why: str) -> list[Event]:
        """Let others take over the tasks of a worker that has left; another may join in its place."""
        self.callbacks.left(worker, f"{why} {self._doing(worker)}")
        self.journal.append("left", worker=worker, round=self.machine.round)
        self.endpoint.dismiss(worker)
        self.leases.forget(worker)
        self.dispatch.left(worker)
        was_ready = worker in self.registration.ready
        self.registration.left(worker)
        return [Left(worker)] if was_ready and self.begun else []

    def give_up(self, worker: int, why: str) -> list[Event]:
        """Dismiss or kill a worker that hangs, or that breaks the protocol; others do its work.

        Raises:
            TaskError: In process, where there is no other worker.
        """
        if not self.size:
            raise TaskError(f"worker {worker} {why}")
        self.leases.forget(worker)
        if self.timeouts.remote:
            return self.left(worker, why)
        self.callbacks.left(worker, f"{why} {self._doing(worker)}, and is killed")
        if worker not in self.registration.ready:
            self._join_until = self._clock() + self.timeouts.join_within  # for its replacement
        self.worker_pool.kill(worker)  # its end is known from its process handle
        return []

    def _doing(self, worker: int) -> str:
        if worker in self.registration.missing:
            return "while it started"
        return failures.doing(self.machine, worker)

    # ---- leases

    def _watched(self) -> list[int]:
        """Return the workers whose leases count: those with work, and those that start.

        A local process is starting until it is ready, and a remote worker from its hello on. A process behind
        an edge server can start only after its edge server, whose own lease begins with its hello
        (EdgeServers.silent).
        """
        registration, edges = self.registration, self.dispatch.edges
        missing = sorted(registration.setting_up) if self.timeouts.remote else registration.missing
        if edges is not None:
            missing = [w for w in missing if edges.starts(w)]
        for worker in missing:
            self.leases.starts(worker)
        return [*self.machine.working, *missing]

    def alive(self, worker: int, envelope: Envelope) -> bool:
        """Renew a lease; return whether the worker holds the task that its heartbeat names.

        During a worker's set-up its heartbeats name no task. A heartbeat without a task is answered with a
        heartbeat, so that an idle worker knows that the coordinator is alive.
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
        """Return the seconds to wait for any event: at most until the first lease ends."""
        if not self.size:
            return self.timeouts.patience
        return min(self.timeouts.patience, self.leases.left(self._watched()))

    def silent(self) -> list[int]:
        """Return the workers whose leases have ended: they hang or are stopped."""
        return self.leases.over(self._watched()) if self.size else []


def _starting(worker: int) -> str:
    return f"start of worker {worker}"
