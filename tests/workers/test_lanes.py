"""Runs with lanes: the bits and bytes of one task at a time, in any lanes, by any worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.problem import Problem
from fedsim.round_events import TaskId
from fedsim.wire.envelope import Envelope, encode
from fedsim.wire.ledger import Entry, Ledger
from protocols.fedavg import FedAvg
from protocols.fedlap_cov import FedLapCov
from tests.support.endpoints import Shuffled
from tests.support.harness import ALGORITHMS, Class, Run, play, problem_of
from workers.protocol_messages import read_failure, task
from workers.task_lanes import TaskLanes
from workers.transport.endpoint import Endpoint, Loopback
from workers.worker.runtime import WorkerRuntime

FULL = ("bayes_admm", "fedep")
"""Their messages or chains have P x P numbers, too many for the MLP."""


def in_lanes(problem: Problem, folder: Path, ledger: Ledger) -> Endpoint:
    return Loopback(ledger, WorkerRuntime(problem, folder, "run", 0), problem.lanes)


def rows(run: Run) -> list[Entry]:
    return sorted(entry._replace(worker=0) for entry in run.entries)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_every_algorithm_has_the_bits_of_one_task_at_a_time(algorithm: Class, tmp_path: Path) -> None:
    """Three clients in four lanes, and each alone in them; the bytes are those without lanes, the numbers
    almost."""

    def problem(lanes: int) -> Problem:
        model = "logistic_bias" if algorithm.name in FULL else "mlp_small"
        return problem_of(algorithm, model=model, lanes=lanes, fraction=0.2)

    together = play(problem(4), tmp_path / "together", connect=in_lanes)
    assert together.bits == play(problem(4), tmp_path / "alone").bits
    plain = play(problem(1), tmp_path / "plain")
    assert rows(together) == rows(plain)
    theirs = plain.outcome.model.mean
    torch.testing.assert_close(together.outcome.model.mean, theirs, rtol=1e-3, atol=1e-3)


@settings(deadline=None, derandomize=True, database=None, max_examples=5)
@given(order=st.randoms(use_true_random=False))
def test_three_workers_that_answer_in_any_order(
    order: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each of them holds up to two tasks and as many in advance."""
    folder = tmp_path_factory.mktemp("order")

    def problem() -> Problem:
        return problem_of(FedLapCov, model="mlp_small", lanes=2, clients=7, fraction=0.3, participation="5")

    def connect(problem: Problem, folder: Path, ledger: Ledger) -> Endpoint:
        runtimes = [WorkerRuntime(problem, folder, "run", w) for w in range(3)]
        return Shuffled(ledger, runtimes, lambda waiting: order.choice(sorted(waiting)))  # type: ignore[attr-defined]

    shuffled = play(problem(), folder / "shuffled", connect=connect, workers=3)
    assert shuffled.bits == play(problem(), folder / "together", connect=in_lanes).bits


# ---- a worker's lanes


@dataclass(frozen=True)
class OneFails(FedAvg):
    name = "one_fails"

    def client_update(self, client, down, shard, task):  # type: ignore[no-untyped-def]
        result = super().client_update(client, down, shard, task)
        if task.client == 1:
            raise ValueError("of client 1 alone")
        return result


def tasks(problem: Problem) -> list[Envelope]:
    algorithm, ctx = problem.algorithm, problem.context(1, 1, asked=3)
    sent = algorithm.broadcast(algorithm.server_init(problem.context(0, 0)), ctx)
    payload = encode(sent, problem.codecs["down"], problem.dims)
    return [task("run", 1, TaskId(1, 1, k, 0), payload, asked=3) for k in range(3)]


def answers(problem: Problem, folder: Path, given: list[Envelope]) -> dict[int, Envelope]:
    """By client; every task starts before the first one ends."""
    runtime = WorkerRuntime(problem, folder, "run", 0)
    (folder / "state").mkdir(parents=True)
    computing: TaskLanes[Envelope | None] = TaskLanes(problem.lanes, runtime.handle)
    for envelope in given:
        assert computing.takes and computing.take(envelope) == []
    replies: list[Envelope | None] = []
    while computing.computing:
        replies += computing.advance()
    return {reply.header.client: reply for reply in replies if reply is not None}


def test_a_clients_error_is_reported_for_its_task_alone(tmp_path: Path) -> None:
    good = problem_of(FedAvg, model="mlp_small", lanes=3, fraction=0.2)
    broken = problem_of(FedAvg, model="mlp_small", lanes=3, fraction=0.2)
    object.__setattr__(broken, "algorithm", OneFails(**vars(broken.algorithm)))
    expected = answers(good, tmp_path / "good", tasks(good))
    replies = answers(broken, tmp_path / "broken", tasks(broken))
    assert {k: reply.header.kind for k, reply in replies.items()} == {0: "upload", 1: "failed", 2: "upload"}
    assert "of client 1 alone" in read_failure(replies[1])[1]
    for k in (0, 2):
        assert replies[k].header.fields == expected[k].header.fields
