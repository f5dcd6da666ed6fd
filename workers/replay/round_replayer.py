"""Committed rounds of a run carried out again in this process, and nothing of its folder is changed.

Machine, broadcasts, codecs and folds are the run's own; the answers to tasks come from whoever is asked: a
worker that computes them again, or the trace of the uploads that the run has kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fedsim.errors import FedsimError, TaskError
from fedsim.participation import schedule
from fedsim.problem import Problem
from fedsim.round_machine import (
    Arrived,
    Close,
    Commit,
    Drop,
    Finish,
    Folded,
    Give,
    Joined,
    Open,
    Release,
    RoundMachine,
)
from fedsim.wire.envelope import Envelope
from fedsim.wire.ledger import Ledger, stream_bytes
from workers.coordinator import failures
from workers.coordinator.aggregation import AggregationThread
from workers.coordinator.broadcasts import Dispatch
from workers.coordinator.exchange_clock import ExchangeClock
from workers.storage.checkpoints import Checkpoint
from workers.storage.client_states import ClientStates
from workers.storage.upload_spool import Spool
from workers.transport.endpoint import Loopback, Worker
from workers.transport.eventfd import Wakeup
from workers.worker.runtime import task_of

WAIT = 60.0


class RoundReplayer:
    """worker: who is asked. It answers a task with its upload; with an envelope of kind 'absent' if it leaves
    the task out, which is then not folded. scratch: a folder for what memory does not hold."""

    def __init__(self, problem: Problem, run: str, worker: Worker, scratch: Path) -> None:
        self.problem, self._scratch = problem, scratch
        self._endpoint = Loopback(Ledger(), worker)
        self._exchange_clock = ExchangeClock(problem.clock, problem.sizes)
        states = ClientStates(scratch / "state", problem.algorithm.client_type)
        self._dispatch = Dispatch(run, 1, problem, self._endpoint, states, self._exchange_clock, None)

    def rounds(self, before: Checkpoint[Any] | None, last: int) -> Iterator[Checkpoint[Any]]:
        """What each round commits, from the one after `before` (None: from the start) up to `last`.

        Raises:
            TaskError: naming client and round; what the worker raises.
        """
        problem = self.problem
        machine = self._machine(before, last)
        wakeup, spool = Wakeup(), Spool(self._scratch / "spool")
        folder = AggregationThread(problem, spool.take, wakeup.set)
        server: Any = before.server if before else problem.algorithm.server_init(problem.context(0, 0))
        left_out: set[int] = set()
        due = deque(machine.start(resumed=before is not None))
        due += machine.handle(Joined(0))
        try:
            while True:
                while due:
                    match due.popleft():
                        case Open() as opened:
                            left_out.clear()
                            if opened.exchange > 1:
                                self._exchange_clock.close()
                            sent = self._dispatch.encode_broadcast(server, opened)
                            if opened.folds:
                                folder.start(server, sent, opened.round, opened.exchange)
                        case Give() as give:
                            self._dispatch.give(server, give)
                        case Release(client):
                            folder.release(client)
                        case Drop(client) if client in left_out:
                            left_out.remove(client)
                        case Drop(client):
                            spool.take(client)
                        case Close():
                            folder.close()
                        case Commit() as commit:
                            self._exchange_clock.close()
                            self._endpoint.ledger.close(commit.round)
                            yield Checkpoint(commit.round, torch.tensor(commit.versions), server)
                        case Finish():
                            return
                incoming, ready = self._endpoint.wait([wakeup.fd], WAIT)
                for envelope in (i.envelope for i in incoming):
                    due += machine.handle(self._arrived(envelope, spool, left_out))
                if ready and wakeup.clear():
                    server = _folded(folder, machine.round)
                    due += machine.handle(Folded())
        finally:
            folder.stop()
            wakeup.close()

    def _machine(self, before: Checkpoint[Any] | None, last: int) -> RoundMachine:
        """One that gives tasks in ascending client id, so that uploads are folded as they come."""
        problem = self.problem
        e, algorithm = problem.experiment, problem.algorithm
        return RoundMachine(
            rounds=last,
            exchanges=len(algorithm.exchanges),
            schedule=schedule(e.participation, clients=e.clients, seed=e.seed, sizes=problem.sizes),
            versions=before.versions.tolist() if before else [0] * len(problem.clients),
            cost=lambda k: 0.0,
            chunks=0,
            setup=len(algorithm.setup),
            round=before.round if before else 0,
        )

    def _arrived(self, envelope: Envelope, spool: Spool, left_out: set[int]) -> Arrived:
        h = envelope.header
        task = task_of(envelope)
        if h.kind == "failed":
            raise failures.failure(0, envelope)
        if h.kind == "absent":
            left_out.add(h.client)
            return Arrived(0, task, late=True)
        spool.put(h.client, envelope)
        return Arrived(0, task, self._exchange_clock.late(task, stream_bytes(envelope)))


def _folded(folder: AggregationThread, round: int) -> Any:
    try:
        return folder.result().server
    except FedsimError as e:
        raise TaskError(f"round {round} cannot be folded: {e}") from e
