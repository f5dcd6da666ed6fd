"""The coordinator: receives workers' envelopes, and executes the round machine's commands.

Membership and ResponseHandler turn envelopes into events, which this module passes to the round machine. The
coordinator waits in Endpoint.wait for sockets and process handles, always with a deadline. Waits for the disk
and for the fold have separate deadlines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fedsim.errors import FedsimError, Interrupted, TaskError
from fedsim.learning.gaussian import Model
from fedsim.participation import Schedule
from fedsim.problem import Problem
from fedsim.round_events import Command, Event, Folded, Give, ScoreChunk
from fedsim.round_machine import RoundMachine
from fedsim.tree import fold_order
from workers import protocol_messages as messages
from workers.coordinator import failures
from workers.coordinator.aggregation import AggregationThread
from workers.coordinator.broadcasts import Dispatch, ReplicaMap
from workers.coordinator.commands import CommandExecutor
from workers.coordinator.membership import Membership, WorkerCallbacks, Workers
from workers.coordinator.responses import ProtocolViolation, ResponseHandler
from workers.coordinator.run_records import RecordCallbacks, RunIdentity, RunRecords, Storage
from workers.coordinator.task_timeline import Timeline
from workers.heap import saves_memory
from workers.storage.atomic_files import remove_temporaries
from workers.storage.upload_spool import MEMORY_BYTES, Spool
from workers.transport.endpoint import Incoming
from workers.transport.eventfd import Wakeup

DRAIN_SECONDS = 3.0
"""Seconds to wait after the end of a run for remote workers to close their connections."""


class RunCallbacks(WorkerCallbacks, RecordCallbacks, Protocol):
    """The callbacks for all recorded or displayed events."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run that ended without an error."""

    server: Any
    model: Model
    versions: tuple[int, ...]
    seconds_to_first_round: float
    seconds_rounds: tuple[float, ...]
    seconds_clients: float
    folds: int = 0
    """The number of rounds in which an upload was folded."""
    kernel_residual: Mapping[str, int] | None = None
    """The kernel's byte counts minus the ledger's, by direction, before stop messages are sent."""
    kernel_retransmitted: int | None = None
    """The bytes that the coordinator's kernel has sent again, which the ledger has once."""


class Coordinator:
    """The coordinator of one run, from its first broadcast to its last score."""

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        identity: RunIdentity,
        workers: Workers,
        storage: Storage,
        callbacks: RunCallbacks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up a new run, or continue a run that was started earlier.

        clock: returns seconds, for leases and deadlines.

        Raises:
            DiskError: If files of an earlier start cannot be removed.
        """
        self.problem, self.endpoint, self.worker_pool = problem, workers.endpoint, workers.pool
        self.timeouts, self._clock, self._silent_since = workers.timeouts, clock, clock()
        recovery, algorithm = storage.recovery, problem.algorithm
        before = recovery.checkpoint if recovery else None
        self._resumed = before is not None
        self._unscored = [record.number for record in recovery.unscored] if recovery else []
        if recovery is not None:
            remove_temporaries(storage.folder)
        frugal = saves_memory(problem.net.layout.size)
        self.machine = RoundMachine(
            rounds=problem.experiment.rounds,
            exchanges=len(algorithm.exchanges),
            schedule=schedule,
            versions=before.versions.tolist() if before else [0] * len(problem.clients),
            cost=lambda k: problem.sizes[k],
            order=fold_order(problem.rounds.tree),
            chunks=problem.evaluation.chunks,
            eval_every=problem.experiment.eval_every,
            ahead=not frugal,
            lanes=workers.lanes,
            setup=len(algorithm.setup),
            round=before.round if before else 0,
            folded_rounds=before.folds if before else 0,
            has_target=problem.experiment.until > 0,
            target_reached=recovery is not None and recovery.target_reached,
        )
        self._wakeup = Wakeup()
        spool = Spool(storage.folder / "spool", 0 if frugal else MEMORY_BYTES)
        self.aggregation = AggregationThread(problem, spool.take, self._wakeup.set)
        self.dispatch = Dispatch(
            identity.name,
            recovery.epoch if recovery else 1,
            problem,
            workers.endpoint,
            storage.checkpoints.states,
            problem.rounds.exchange_clock(),
            ReplicaMap() if workers.timeouts.remote else None,
            Timeline(),
        )
        kept = {checkpoint.round: checkpoint for checkpoint in recovery.kept} if recovery else {}
        self.dispatch.broadcasts.restore(before, kept)
        self.records = RunRecords(problem, identity, storage, callbacks, self.dispatch, clock)
        server = before.server if before else algorithm.server_init(problem.context(0, 0))
        self.records.restore(server)
        self.executor = CommandExecutor(server, self.dispatch, spool, self.aggregation, self.records)
        self.responses = ResponseHandler(
            problem, self.machine, self.dispatch, self.records.round_log, spool, storage.journal
        )
        self.members = Membership(workers, self.dispatch, self.machine, callbacks, storage.journal, clock)

    def run(self) -> Outcome:
        """Run until the last round is committed and evaluated.

        Raises:
            TaskError: If a task, a worker or a fold fails; the error names worker, client and round.
            Interrupted: If a signal asks the run to stop.
            DiskError: If the disk cannot be read or written.
        """
        try:
            outcome = self._run()
        except BaseException as e:
            if self.timeouts.remote:  # the supervisor ends local workers
                self._stop_workers(isinstance(e, Interrupted))
            raise
        self._stop_workers()
        return outcome

    def _stop_workers(self, interrupted: bool = False) -> None:
        """Stop all workers, and wait until remote ones have disconnected."""
        farewell = messages.stop(self.dispatch.run, interrupted)
        self.dispatch.stop(self.members.size, farewell)
        if self.timeouts.remote:
            self.endpoint.drain(farewell, DRAIN_SECONDS)

    def _run(self) -> Outcome:
        try:
            for left in self.members.waiting(all_of_them=True):
                self._step(left)
                self._give_up_silent()
            self._begin()
            while not self.executor.finished:
                for left in self.members.waiting(all_of_them=False):
                    self._step(left)
                    self._give_up_silent()
                if self._step(self.members.patience()):
                    self._silent_since = self._clock()
                self._give_up_silent()
                if self._clock() - self._silent_since >= self.timeouts.patience:
                    raise failures.silence(self.machine, self.members.size, self.timeouts.patience)
        finally:
            self.aggregation.stop()
            self._wakeup.close()
        residual, server, problem = self.endpoint.residual(), self.executor.server, self.problem
        return Outcome(
            server,
            problem.algorithm.model(server, problem.context(self.machine.round, 0)),
            tuple(self.machine.versions),
            self.records.seconds_to_first_round,
            tuple(self.records.seconds_rounds),
            self.responses.seconds_clients,
            self.machine.folded_rounds,
            residual,
            self.endpoint.retransmitted(),
        )

    def _begin(self) -> None:
        self._silent_since = self._clock()
        self.records.begin(self.dispatch.epoch)
        self._carry_out(self.machine.start(self._resumed, self._unscored))
        joined = self.members.begin()
        self._carry_out(self.machine.handle(*joined))  # in one call, so that all share the first tasks

    def _step(self, timeout: float) -> bool:
        """Wait once, handle what arrives, and return whether any of it shows progress of the run."""
        incoming, ready = self.endpoint.wait([self._wakeup.fd, *self.worker_pool.fds()], timeout)
        matters = bool(ready)
        for envelope in incoming:
            events = self._receive(envelope)
            if events is not None:
                matters = True
                self._handle(events)
        unreadable, self.endpoint.unreadable = self.endpoint.unreadable, {}
        for worker, why in unreadable.items():
            self._give_up(worker, f"sent what cannot be read ({why})")
        lost, self.endpoint.lost = self.endpoint.lost, []
        for worker in lost:
            self._handle(self.members.left(worker, "its connection was lost"))
        if self._wakeup.fd in ready and self._wakeup.clear():
            self._handle([self._take_fold()])
        process_exit = self.worker_pool.check(ready)
        if process_exit is not None:
            self._handle(self.members.died(process_exit))
        return matters or bool(lost or unreadable)

    def _receive(self, incoming: Incoming) -> list[Event] | None:
        """Handle an envelope and return its events; None for a duplicate, and for a heartbeat that names no
        task that the worker holds."""
        worker, envelope = incoming.worker, incoming.envelope
        try:
            if incoming.hello is not None:
                self.members.hello(worker, incoming.hello)
                return []
            match envelope.header.kind:
                case "heartbeat":
                    return [] if self.members.alive(worker, envelope) else None
                case "ready":
                    return self.members.ready(worker, envelope)
                case "failed":
                    self.members.failed(worker, envelope)
                    return []
            events = self.responses.take(worker, envelope)
            if events is not None:
                self.members.leases.heard(worker)
            return events
        except ProtocolViolation as e:
            self._give_up(worker, str(e))
            return []

    def _take_fold(self) -> Event:
        try:
            fold = self.executor.take_fold()
        except FedsimError as e:
            raise TaskError(f"round {self.machine.round} cannot be folded: {e}") from e
        self.records.folded(self.machine.round, fold)
        return Folded()

    def _handle(self, events: Iterable[Event]) -> None:
        for event in events:
            self._carry_out(self.machine.handle(event))

    def _give_up(self, worker: int, why: str) -> None:
        """Dismiss or kill a worker that hangs or breaks the protocol."""
        self._handle(self.members.give_up(worker, why))

    def _give_up_silent(self) -> None:
        """Remove the workers whose leases have ended."""
        for worker in self.members.silent():
            self._give_up(worker, f"was silent for {self.timeouts.lease:g} s")

    def _carry_out(self, commands: list[Command]) -> None:
        self.members.leases.assigned(commands, self.machine)
        for command in commands:
            match command:
                case Give(worker, task):
                    self.responses.filter.gave(worker, task)
                case ScoreChunk(worker, chunk):
                    self.responses.filter.gave(worker, chunk)
        self.executor.carry_out(commands)
