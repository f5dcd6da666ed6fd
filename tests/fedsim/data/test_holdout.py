"""Rows held out of training to choose hyperparameters on."""

from __future__ import annotations

import numpy as np
import pytest

from fedsim.data.holdout import hold_out
from fedsim.errors import DataError, UsageError
from fedsim.experiment import Experiment
from fedsim.problem import Problem
from protocols import find

CLIENTS = (np.arange(0, 40), np.arange(40, 50), np.arange(60, 90))


def test_folds_divide_the_clients_rows() -> None:
    held = []
    for fold in range(1, 6):
        kept, rows = hold_out(f"fold:{fold}/5", 100, CLIENTS, seed=3)
        assert rows is not None
        held.append(rows)
        for before, after in zip(CLIENTS, kept, strict=True):
            assert np.array_equal(after, np.setdiff1d(before, rows))
    assert np.array_equal(np.sort(np.concatenate(held)), np.sort(np.concatenate(CLIENTS)))
    assert {len(rows) for rows in held} == {16}


def test_unused_rows_are_no_clients() -> None:
    kept, rows = hold_out("unused:15", 100, CLIENTS, seed=3)
    assert rows is not None
    assert kept is CLIENTS and len(np.unique(rows)) == 15
    assert not np.isin(rows, np.concatenate(CLIENTS)).any()
    second = hold_out("unused:15", 100, CLIENTS, seed=3)[1]
    other = hold_out("unused:15", 100, CLIENTS, seed=4)[1]
    assert second is not None and other is not None
    assert np.array_equal(rows, second) and not np.array_equal(rows, other)


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ("fold:0/5", UsageError, "fold:1/5 to fold:5/5"),
        ("train", UsageError, "unused:N"),
        ("unused:x", UsageError, "write unused:N"),
        ("tets", UsageError, "did you mean 'test'"),
        ("unused:21", DataError, "leave 20 training rows unused"),
        ("fold:1/1000", DataError, "client 0"),
    ],
)
def test_what_does_not_fit_is_said(spec: str, error: type[Exception], says: str) -> None:
    clients = (*CLIENTS[:2], np.array([70]), *(CLIENTS[2:])) if "1000" in spec else CLIENTS
    if "1000" in spec:  # one row, one fold: the first
        clients, says = (np.array([0]),), "client 0"
    with pytest.raises(error, match=says):
        hold_out(spec, 100, clients, seed=0)


def test_a_problem_is_scored_on_the_fold() -> None:
    experiment = Experiment(algo="fedavg", model="logistic", clients=3, evaluate_on="fold:2/4")
    plain = Problem.build(Experiment(algo="fedavg", model="logistic", clients=3), find("fedavg")(), None)
    problem = Problem.build(experiment, find("fedavg")(), None)
    total = sum(plain.sizes)
    assert len(problem.dataset.test_targets) == pytest.approx(total / 4, abs=1)
    assert sum(problem.sizes) == total - len(problem.dataset.test_targets)
    assert len(problem.dataset.train_targets) == len(plain.dataset.train_targets)
