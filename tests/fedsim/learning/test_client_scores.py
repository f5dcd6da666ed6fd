"""Scores per client against a test set whose rows are repeated as the client's classes are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from fedsim.learning.client_scores import MOST_LISTED, LabelShares
from fedsim.learning.likelihoods import LIKELIHOODS, Tally
from fedsim.learning.score_names import CLIENT_NUMBERS

CLASSES = 4
CATEGORICAL = LIKELIHOODS["categorical"]


def per_class(outputs: Tensor, targets: Tensor) -> Tally:
    assert CATEGORICAL.per_class is not None
    return CATEGORICAL.tally(outputs, targets)[CATEGORICAL.per_class]


def scored(outputs: Tensor, targets: Tensor) -> tuple[float, float]:
    numbers = CATEGORICAL.numbers(CATEGORICAL.tally(outputs, targets))
    return numbers["test_accuracy"] or 0.0, numbers["test_nll"] or 0.0


def problem(seed: int, clients: int) -> tuple[np.ndarray, list[np.ndarray], Tensor, Tensor]:
    """Training classes, the clients' rows, and outputs and classes of test rows, with one or more a class."""
    draws, g = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    train = draws.integers(0, CLASSES, 60)
    rows = [draws.permutation(60)[: draws.integers(1, 20)] for _ in range(clients)]
    targets = torch.cat([torch.arange(CLASSES), torch.randint(CLASSES, (20,), generator=g)])
    return train, rows, torch.randn(len(targets), CLASSES, generator=g).double(), targets


@given(st.integers(0, 999), st.integers(1, 6))
def test_a_clients_score_is_that_of_a_test_set_with_its_classes(seed: int, clients: int) -> None:
    """A test set of the client: for every row of it, all test rows of its class, equally often per class."""
    train, rows, outputs, targets = problem(seed, clients)
    counts = torch.bincount(targets, minlength=CLASSES)
    common = int(np.lcm.reduce(counts.numpy()))
    scores = []
    for mine in rows:
        places = [
            torch.where(targets == label)[0].repeat(common // int(counts[label])) for label in train[mine]
        ]
        scores.append(scored(outputs[torch.cat(places)], targets[torch.cat(places)]))
    accuracies, nlls = np.array(scores).T
    expected = (accuracies.mean(), accuracies.min(), accuracies.std(), nlls.mean(), nlls.max(), nlls.std())
    numbers = LabelShares.of(train, rows, CLASSES).scores(per_class(outputs, targets)).numbers()
    assert tuple(numbers) == CLIENT_NUMBERS
    assert tuple(numbers.values()) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_class_without_test_rows_is_left_out_and_so_is_a_client_of_no_other() -> None:
    train = np.array([0, 0, 0, 1, 2, 2])
    outputs = torch.tensor([[3.0, 0.0, 0.0], [0.0, 3.0, 0.0], [3.0, 0.0, 0.0]]).double()
    tally = per_class(outputs, torch.tensor([0, 1, 1]))  # class 0 is right, class 1 half of the time
    shares = LabelShares.of(train, [np.array([0, 1, 3, 4]), np.array([4, 5]), np.array([3])], 3)
    numbers = shares.scores(tally).numbers()
    each = np.array([(2 * 1.0 + 0.5) / 3, 0.5])  # shares 2/4, 1/4, 1/4 are 2/3, 1/3; nothing; 1
    assert numbers["client_accuracy_mean"] == pytest.approx(each.mean())
    assert numbers["client_accuracy_worst"] == pytest.approx(0.5)
    assert numbers["client_accuracy_spread"] == pytest.approx(each.std())
    assert sum(shares.scores(tally).histogram()) == 2
    assert LabelShares.of(train, [np.array([4, 5])], 3).scores(tally).numbers() == dict.fromkeys(
        CLIENT_NUMBERS
    )


def test_a_client_is_not_harmed_by_a_class_that_it_does_not_have() -> None:
    """A class whose nll is not finite counts for the clients that have it alone."""
    tally = (2.0, 2.0, 1.0, 2.0, 1.0, math.inf)
    shares = LabelShares(np.array([[1.0, 0.0], [0.5, 0.5]]))
    numbers = shares.scores(tally).numbers()
    assert math.isnan(numbers["client_nll_mean"] or 0.0) and math.isnan(numbers["client_nll_worst"] or 0.0)
    assert numbers["client_accuracy_mean"] == pytest.approx((0.5 + 0.75) / 2)
    own = LabelShares(np.array([[1.0, 0.0]]))
    assert own.scores(tally).numbers()["client_nll_worst"] == pytest.approx(0.5)


def test_the_scores_of_every_client_are_listed_in_its_place() -> None:
    tally = (3.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, math.inf, 0.0)  # class 2 has no test rows
    shares = LabelShares(np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.5, 0.5, 0.0]]))
    lists = shares.scores(tally).lists()
    assert lists == {"client_accuracies": [0.333333, None, 0.666667], "client_nlls": [0.333333, None, None]}


def test_of_many_clients_no_scores_are_listed() -> None:
    tally = (3.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0)
    share = np.array([[0.5, 0.5, 0.0]])
    assert len(LabelShares(share.repeat(MOST_LISTED, 0)).scores(tally).lists()["client_nlls"]) == MOST_LISTED
    assert LabelShares(share.repeat(MOST_LISTED + 1, 0)).scores(tally).lists() == {}
    assert LabelShares(np.array([[0.0, 0.0, 1.0]])).scores(tally).lists()["client_accuracies"] == [None]


def test_the_histogram_counts_every_client_once() -> None:
    tally = (10.0, 10.0, 10.0, 0.0, 5.0, 5.0)  # accuracies of the classes: 1 and 0
    shares = LabelShares(np.array([[1.0, 0.0], [0.0, 1.0], [0.51, 0.49], [0.52, 0.48]]))
    assert {place: n for place, n in enumerate(shares.scores(tally).histogram()) if n} == {0: 1, 10: 2, 19: 1}
