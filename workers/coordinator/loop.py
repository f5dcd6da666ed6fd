"""The coordinator: carries out what the round machine decides.

It waits in Endpoint.wait, on sockets and process handles, with a deadline; the disk and the fold have
deadlines of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedsim.errors import FedsimError, TaskError
from fedsim.learning.gaussian import Gaussian, Point
from fedsim.participation import Schedule
from fedsim.problem import Problem
from fedsim.round_machine import (
    Close,
    Command,
    Commit,
    Drop,
    Event,
    Finish,
    Folded,
    Give,
    Open,
    Release,
    RoundMachine,
    ScoreChunk,
)
from fedsim.wire.ledger import Entry
from workers.coordinator import failures
from workers.coordinator.aggregation import AggregationThread
from workers.coordinator.broadcasts import Dispatch
from workers.coordinator.exchange_clock import ExchangeClock
from workers.coordinator.membership import Membership, Timeouts, WorkerCallbacks
from workers.coordinator.registration import Registration
from workers.coordinator.response_filter import Piece, ProtocolViolation, ResponseFilter
from workers.coordinator.responses import UploadHandler
from workers.coordinator.round_log import RoundLog
from workers.coordinator.task_timeline import Span, Timeline
from workers.coordinator.worker_pool import WorkerPool
from workers.state_transfer import ReplicaMap
from workers.storage.journal import Journal
from workers.storage.recovery import Recovery
from workers.storage.store import Checkpoints
from workers.storage.upload_spool import Spool
from workers.transport.endpoint import Endpoint, Incoming
from workers.transport.eventfd import Wakeup


class RunCallbacks(WorkerCallbacks, Protocol):
    """Who writes and shows what happens."""

    def committed(self, commit: Commit, entries: list[Entry]) -> int:
        """Returns where the ledger's file ends with these rows."""

    def evaluated(self, metrics: Mapping[str, Any]) -> None: ...

    def spans(self, spans: list[Span]) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """The end of a run that was not an error."""

    server: Any
    model: Point | Gaussian
    versions: tuple[int, ...]
    seconds_to_first_round: float
    seconds_rounds: tuple[float, ...]
    seconds_clients: float
    kernel_residual: Mapping[str, int] | None = None
    """The kernel's count of the streams minus the ledger's, before the workers are told to stop."""


class Coordinator:
    """One run from its first broadcast to its last score."""

    def __init__(
        self,
        problem: Problem,
        endpoint: Endpoint,
        worker_pool: WorkerPool,
        checkpoints: Checkpoints,
        schedule: Schedule,
        callbacks: RunCallbacks,
        journal: Journal,
        *,
        run: str,
        registration: Registration,
        timeouts: Timeouts,
        started: float,
        recovery: Recovery | None = None,
        keep: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """recovery: where an earlier start has left off. keep: the folder of the message trace, if any.
        clock: the seconds that leases and deadlines are measured in."""
        self.problem, self.endpoint, self.worker_pool = problem, endpoint, worker_pool
        self.checkpoints, self.callbacks, self.journal = checkpoints, callbacks, journal
        self.timeouts, self.started = timeouts, started
        self.replicas = ReplicaMap() if timeouts.remote else None
        experiment = problem.experiment
        self.machine = RoundMachine(
            rounds=experiment.rounds,
            exchanges=len(problem.algorithm.exchanges),
            schedule=schedule,
            versions=[0] * len(problem.clients),
            cost=lambda k: problem.sizes[k],
            chunks=problem.chunks,
            eval_every=experiment.eval_every,
            setup=len(problem.algorithm.setup),
        )
        self.server: Any = problem.algorithm.server_init(problem.context(0, 0))
        before = recovery.checkpoint if recovery else None
        if before is not None:
            self.machine.round, self.machine.versions = before.round, before.versions.tolist()
            self.server = before.server
        self._resumed = before is not None
        self._unscored = recovery.unscored if recovery else ()
        self._wakeup = Wakeup()
        self.spool = Spool(checkpoints.folder.parent / "spool", keep=keep)
        self.folder = AggregationThread(problem, self.spool.take, self._wakeup.set)
        self.exchange_clock = ExchangeClock(problem.clock, problem.sizes)
        self.dispatch = Dispatch(
            run,
            recovery.epoch if recovery else 1,
            problem,
            endpoint,
            checkpoints.states,
            self.exchange_clock,
            self.replicas,
        )
        self.round_log = RoundLog(problem.chunks, callbacks.evaluated, problem.measure)
        for record in self._unscored:
            self.round_log.restore(record)
        if not self._resumed:
            setup = problem.algorithm.setup
            start = self.round_log.open(0, tuple(range(len(problem.clients))) if setup else ())
            start.model, start.committed = self._model(), not setup
        self.members = Membership(
            registration,
            timeouts,
            endpoint,
            worker_pool,
            self.dispatch,
            self.machine,
            callbacks,
            journal,
            self._handle,
            clock,
        )
        self.response_filter = ResponseFilter(self.dispatch.epoch, self.machine)
        self.upload_handler = UploadHandler(
            problem,
            self.response_filter,
            self.dispatch,
            self.exchange_clock,
            self.round_log,
            self.spool,
            checkpoints.states,
            endpoint.ledger,
            journal,
            self._handle,
        )
        self._clock = clock
        self._stirred = self._round_began = clock()
        self._commits: list[float] = []
        self._first_round = 0.0
        self._finished = False

    # ---- the loop

    def run(self) -> Outcome:
        """See below.

        Raises:
            TaskError: naming worker, client and round.
            Interrupted: if a signal asked to stop.
            DiskError: if the disk cannot be read or written.
        """
        try:
            for left in self.members.waiting(everybody=True):
                self._step(left)
            self._begin()
            while not self._finished:
                for left in self.members.waiting(everybody=False):
                    self._step(left)
                if self._step(self.members.patience()):
                    self._stirred = self._clock()
                self.members.end_leases()
                if self._clock() - self._stirred >= self.timeouts.patience:
                    raise failures.silence(self.machine, self.members.size, self.timeouts.patience)
        finally:
            self.folder.stop()
            self._wakeup.close()
        residual = self.endpoint.residual()
        self.dispatch.stop(self.members.size)
        algorithm, problem = self.problem.algorithm, self.problem
        return Outcome(
            self.server,
            algorithm.model(self.server, problem.context(self.machine.round, 0)),
            tuple(self.machine.versions),
            self._first_round,
            tuple(self._commits),
            self.upload_handler.seconds_clients,
            residual,
        )

    def _begin(self) -> None:
        self._stirred = self._round_began = self._clock()
        self.dispatch.timeline = Timeline()
        self.journal.append("start", epoch=self.dispatch.epoch)
        self._carry_out(self.machine.start(self._resumed, [r.number for r in self._unscored]))
        self.members.begin()

    def _step(self, timeout: float) -> bool:
        """Wait once and handle whatever came; False if nothing did that matters."""
        incoming, ready = self.endpoint.wait([self._wakeup.fd, *self.worker_pool.fds()], timeout)
        counting = [self._receive(envelope) for envelope in incoming]
        unreadable, self.endpoint.unreadable = self.endpoint.unreadable, {}
        for worker, why in unreadable.items():
            self.members.give_up(worker, f"sent what cannot be read ({why})")
        lost, self.endpoint.lost = self.endpoint.lost, []
        for worker in lost:
            self.members.left(worker, "its connection was lost")
        if self._wakeup.fd in ready and self._wakeup.clear():
            self._take_fold()
        process_exit = self.worker_pool.check(ready)
        if process_exit is not None:
            self.members.died(process_exit)
        return any(counting) or bool(ready or lost or unreadable)

    def _handle(self, event: Event) -> None:
        self._carry_out(self.machine.handle(event))

    # ---- what comes in

    def _receive(self, incoming: Incoming) -> bool:
        """False: a duplicate, or a heartbeat of nothing that the worker holds."""
        worker, envelope = incoming.worker, incoming.envelope
        h = envelope.header
        try:
            if h.kind == "heartbeat":
                return self.members.alive(worker, envelope)
            if h.kind == "hello":
                self.members.hello(worker, envelope)
            elif h.kind == "ready":
                self.members.ready(worker, envelope)
            elif h.kind == "failed":
                self.members.failed(worker, envelope)
            elif not self.upload_handler.take(worker, envelope):
                return False
            else:
                self.members.leases.heard(worker)
        except ProtocolViolation as e:
            self.members.give_up(worker, str(e))
        return True

    def _take_fold(self) -> None:
        try:
            fold = self.folder.result()
        except FedsimError as e:
            raise TaskError(f"round {self.machine.round} cannot be folded: {e}") from e
        self.server = fold.server
        self.round_log[self.machine.round].report(fold.scalars)
        self._handle(Folded())

    # ---- what goes out

    def _carry_out(self, commands: list[Command]) -> None:
        """In order, except that the files of a commit are written after the next round is on its way."""
        committed: list[tuple[Commit, Any]] = []
        for command in commands:
            match command:
                case Open():
                    self._open(command)
                case Give():
                    self._gives(command.worker, command.task)
                    self.dispatch.give(self.server, command)
                case ScoreChunk():
                    self._gives(command.worker, (command.round, command.chunk))
                    self.dispatch.give_score(command, self.round_log[command.round].model)
                case Release(client):
                    self.folder.release(client)
                case Drop(client):
                    self.journal.append("lost", round=self.machine.round, client=client)
                    self.spool.take(client)
                case Close():
                    self.folder.close()
                case Commit():
                    self._commit(command)
                    committed.append((command, self.server))
                case Finish():
                    self._finished = True
        for commit, server in committed:
            self._record(commit, server)
        if committed:
            self.round_log.flush()

    def _gives(self, worker: int, piece: Piece) -> None:
        """A lease begins when a worker that was idle gets work."""
        self.response_filter.gave(worker, piece)
        if len(self.machine.held_by(worker)) <= 1:
            self.members.leases.heard(worker)

    def _open(self, command: Open) -> None:
        """The fold computes from the decoded broadcast, as clients do."""
        if command.exchange == 1:
            self.round_log.open(command.round, command.participants)
        else:
            self._close_exchange(command.round)
        self.journal.append(
            "open", round=command.round, exchange=command.exchange, participants=list(command.participants)
        )
        sent = self.dispatch.encode_broadcast(self.server, command)
        if command.folds:
            self.folder.start(self.server, sent, command.round, command.exchange)

    def _close_exchange(self, round: int) -> None:
        """Add what the exchange took on the virtual clock to its round."""
        seconds, label = self.exchange_clock.close(), self.round_log[round]
        if seconds is not None:
            label.simulated = (label.simulated or 0.0) + seconds

    def _commit(self, command: Commit) -> None:
        """The round is folded: remember the model, take the time."""
        r, now = command.round, self._clock()
        label = self.round_log.open(r, command.participants)
        label.folded = command.folded
        self._close_exchange(r)
        label.seconds, self._round_began = now - self._round_began, now
        if r:
            self._commits.append(label.seconds)
        if r and not self._first_round:
            self._first_round = time.time() - self.started
        label.report(self.problem.algorithm.report(self.server, self.problem.context(r, 0)))
        if r:  # the set-up does not change the start model, which is being evaluated
            label.model = self._model()

    def _record(self, commit: Commit, server: Any) -> None:
        """A committed round's files, in the order that workers.storage.recovery relies on: its ledger rows,
        the journal's record, the checkpoint."""
        r, ledger = commit.round, self.endpoint.ledger
        label = self.round_log[r]
        label.bytes_down, label.bytes_up = ledger.rounds[r, "down"], ledger.rounds[r, "up"]
        end = self.callbacks.committed(commit, ledger.close(r))
        self.callbacks.spans(self.dispatch.timeline.take())
        self.journal.append("commit", round=r, about=label.known())
        self.checkpoints.commit(r, server, commit.versions, commit.folded, self.round_log.oldest, end)
        label.committed = True
        if not self.machine.evaluates(r):
            self.round_log.drop(r)

    def _model(self) -> Point | Gaussian:
        return self.problem.algorithm.model(self.server, self.problem.context(0, 0))
