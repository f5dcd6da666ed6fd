"""The centralised reference: one client with the rows of all, and a bill of 0 bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.errors import UsageError
from fedsim.experiment import Experiment
from fedsim.learning.solvers.first_order import LocalTraining
from fedsim.problem import Problem, _held_by
from launch.results.plan import plan
from protocols.fedavg import FedAvg
from protocols.related.pooled import Pooled
from tests.support.harness import exchanged, play
from tests.support.reproducible import without_seconds

TASK = {"model": "logistic", "clients": 5, "rounds": 3, "partition": "two_dirichlet"}


def built(algorithm: Pooled | FedAvg, **changes: object) -> Problem:
    described = Experiment(algo=algorithm.name, **(TASK | changes))  # type: ignore[arg-type]
    return Problem.build(described, algorithm, None)


@pytest.mark.parametrize("evaluate_on", ["test", "fold:2/4"])
def test_one_client_has_the_rows_that_the_federation_has(evaluate_on: str) -> None:
    federated = built(FedAvg(), evaluate_on=evaluate_on)
    pooled = built(Pooled(), evaluate_on=evaluate_on)
    assert len(federated.clients) == 5
    (rows,) = pooled.clients
    assert np.array_equal(rows, np.sort(np.concatenate(federated.clients)))
    assert pooled.messages.dims["K"] == 1
    assert np.array_equal(pooled.dataset.test_inputs, federated.dataset.test_inputs)


def test_a_row_that_two_clients_share_is_there_once() -> None:
    """Of the partition two_classes, when a class runs out."""
    shared = (np.array([3, 1]), np.array([1, 7]))
    assert [list(rows) for rows in _held_by(Pooled(), shared)] == [[1, 3, 7]]
    assert _held_by(FedAvg(), shared) is shared


@pytest.mark.parametrize(
    "local",
    [LocalTraining(epochs=2), LocalTraining(epochs=2, optimiser="sgd", lr=0.1, momentum=0.5, decay=0.9)],
)
def test_it_is_fedavg_with_one_client_to_the_bit(local: LocalTraining, tmp_path: Path) -> None:
    """Three rounds: moments of Adam are carried over rounds, learning rates decay."""
    problem = built(Pooled(local))
    pooled = play(problem, tmp_path / "pooled")
    fedavg = play(replace(problem, algorithm=FedAvg(local)), tmp_path / "fedavg")
    assert torch.equal(pooled.outcome.model.mean, fedavg.outcome.model.mean)
    scores = [without_seconds(run.metrics) for run in (pooled, fedavg)]
    for mine, other in zip(*scores, strict=True):
        assert {k: v for k, v in mine.items() if "bytes" not in k} == {
            k: v for k, v in other.items() if "bytes" not in k
        }
    assert not torch.equal(pooled.outcome.model.mean.float(), problem.start)


def test_the_bill_is_zero_and_the_weights_travel_as_simulation(tmp_path: Path) -> None:
    problem = built(Pooled(), participation="0.3+lost:0.5", link="up=10mbit,down=50mbit")
    assert problem.experiment.participation == "full"
    assert problem.rounds.clock is None
    with pytest.raises(UsageError, match="is no rate"):
        built(Pooled(), link="up=fast").rounds.check()
    run = play(problem, tmp_path / "run")
    assert {e.kind for e in exchanged(run.entries)} == {"simulation"}
    sent = [e for e in run.entries if (e.message, e.field) == ("upload", "mean")]
    assert [e.bytes for e in sent] == [4 * problem.net.layout.size] * 3
    assert all(m["bytes_down"] == m["bytes_up"] == 0 for m in run.metrics)
    planned = plan(Problem.outline(problem.experiment, Pooled(), None), problem.rounds.schedule())
    assert planned.total("down") == planned.total("up") == 0
    assert list(planned.took_part) == [3]


@pytest.mark.parametrize("evaluate_on", ["test", "fold:2/4"])
def test_scores_by_client_are_of_the_clients_that_the_rows_come_from(evaluate_on: str) -> None:
    federated = built(FedAvg(), evaluate_on=evaluate_on).evaluation.label_shares
    pooled = built(Pooled(), evaluate_on=evaluate_on).evaluation.label_shares
    assert federated is not None
    assert pooled is not None
    assert len(pooled.shares) == 5
    assert np.array_equal(pooled.shares, federated.shares)
