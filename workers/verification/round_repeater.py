"""Repeat a committed round of a run in this process, without changing the run's folder.

The round machine, broadcasts, codecs and folds are those of the run. A worker object computes the tasks
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedsim.errors import FedsimError, TaskError
from fedsim.problem import Problem
from fedsim.round_events import Arrived, Commit, Folded, Joined
from fedsim.round_machine import RoundMachine
from fedsim.tree import fold_order
from fedsim.wire.envelope import Envelope
from fedsim.wire.ledger import Ledger, stream_bytes
from workers.coordinator import failures
from workers.coordinator.aggregation import AggregationThread, why_invalid
from workers.coordinator.broadcasts import Dispatch
from workers.coordinator.commands import CommandExecutor, RoundRecords
from workers.coordinator.task_timeline import Timeline
from workers.protocol_messages import task_of
from workers.storage.checkpoints import Checkpoint
from workers.storage.client_states import ClientStates
from workers.storage.upload_spool import Spool
from workers.transport.endpoint import Loopback, Worker
from workers.transport.eventfd import Wakeup

WAIT = 60.0
"""The timeout of one wait for an upload or a fold, in seconds."""


class RoundRepeater:
    """Repetition of a round with one worker in this process.

    worker: answers a task with an upload, or with 'absent' to leave the task out of the fold. scratch: a
    folder for data that does not fit into memory.
    """

    def __init__(self, problem: Problem, run: str, worker: Worker, scratch: Path) -> None:
        self.problem, self._scratch = problem, scratch
        self._endpoint = Loopback(Ledger(), worker)
        self._exchange_clock = problem.rounds.exchange_clock()
        states = ClientStates(scratch / "state", problem.algorithm.client_type, run)
        self._dispatch = Dispatch(
            run, 1, problem, self._endpoint, states, self._exchange_clock, None, Timeline()
        )

    def repeat(
        self, round: int, before: Checkpoint[Any] | None, earlier: Mapping[int, Checkpoint[Any]]
    ) -> Checkpoint[Any]:
        """Return the new checkpoint of a round.

        before: the checkpoint of the round before it; None for the run's first round. earlier: the
        checkpoints of the rounds in RoundPolicy.origins of the round, by round.

        Raises:
            TaskError: If a task or a fold fails; the error names client and round.
            FedsimError: If the worker raises one.
        """
        self._dispatch.broadcasts.restore(before, earlier)
        machine, records = self._machine(before, round), _Commits(self._endpoint.ledger)
        wakeup, spool = Wakeup(), Spool(self._scratch / "spool")
        aggregation = AggregationThread(self.problem, spool.take, wakeup.set)
        server = before.server if before else self.problem.algorithm.server_init(self.problem.context(0, 0))
        executor = CommandExecutor(server, self._dispatch, spool, aggregation, records)
        try:
            executor.carry_out(machine.start(resumed=before is not None))
            executor.carry_out(machine.handle(Joined(0)))
            while not executor.finished:
                incoming, ready = self._endpoint.wait([wakeup.fd], WAIT)
                for envelope in (i.envelope for i in incoming):
                    executor.carry_out(machine.handle(self._arrived(envelope, spool)))
                if ready and wakeup.clear():
                    try:
                        executor.take_fold()
                    except FedsimError as e:
                        raise TaskError(f"round {machine.round} cannot be folded: {e}") from e
                    executor.carry_out(machine.handle(Folded()))
        finally:
            aggregation.stop()
            wakeup.close()
        (created,) = records.checkpoints
        return created

    def _machine(self, before: Checkpoint[Any] | None, last: int) -> RoundMachine:
        """Return a machine that gives tasks in ascending client id, so uploads are folded as they arrive."""
        problem = self.problem
        algorithm = problem.algorithm
        return RoundMachine(
            rounds=last,
            exchanges=len(algorithm.exchanges),
            schedule=problem.rounds.schedule(),
            versions=before.versions.tolist() if before else [0] * len(problem.clients),
            cost=lambda k: 0.0,
            order=fold_order(problem.rounds.tree),
            chunks=0,
            setup=len(algorithm.setup),
            round=before.round if before else 0,
            folded_rounds=before.folds if before else 0,
        )

    def _arrived(self, envelope: Envelope, spool: Spool) -> Arrived:
        h, task = envelope.header, task_of(envelope)
        if h.kind == "failed":
            raise failures.failure(0, envelope)
        if h.kind == "absent":
            return Arrived(0, task, late=True)
        spool.put(h.client, envelope)
        late = self._exchange_clock.late(task, stream_bytes(envelope))
        return Arrived(0, task, late or self._skipped(envelope))

    def _skipped(self, envelope: Envelope) -> bool:
        """Return whether --bad-uploads skip leaves the upload out, as in the run."""
        if self.problem.experiment.bad_uploads != "skip":
            return False
        h = envelope.header
        down = self._dispatch.broadcasts.answered(h.round, h.client).decoded
        return bool(why_invalid(self.problem, envelope, down))


class _Commits(RoundRecords):
    """The checkpoints of repeated rounds. Nothing else is recorded, and no model is evaluated."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.checkpoints: list[Checkpoint[Any]] = []

    def written(self, commit: Commit, server: Any, broadcast: tuple[Any, int]) -> None:
        self._ledger.close(commit.round)
        r, versions, sent = commit.round, torch.tensor(commit.versions), broadcast
        self.checkpoints.append(
            Checkpoint(r, versions, server, commit.folded_rounds, broadcast=sent[0], broadcast_round=sent[1])
        )
