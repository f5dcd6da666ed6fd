"""+noise:P: which labels are wrong, and that nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedsim.data.datasets import Dataset
from fedsim.data.label_noise import with_label_noise
from fedsim.errors import UsageError
from fedsim.experiment import Experiment
from fedsim.problem import Problem
from protocols import find


def dataset(targets: np.ndarray, classes: int) -> Dataset:
    inputs = np.zeros((len(targets), 1), np.float32)
    return Dataset("made", inputs, targets, inputs[:1], targets[:1], classes)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 7), st.integers(1, 5), st.floats(0, 1), st.floats(0, 1))
def test_a_share_of_each_clients_labels_is_wrong(
    seed: int, classes: int, clients: int, one: float, other: float
) -> None:
    draws = np.random.default_rng(seed)
    data = dataset(draws.integers(0, classes, 90), classes)
    split = np.array_split(draws.permutation(90)[:70], clients)
    small, large = (with_label_noise(data, split, share, seed) for share in sorted((one, other)))
    for share, noisy in zip(sorted((one, other)), (small, large), strict=True):
        wrong = noisy != data.train_targets
        assert [wrong[rows].sum() for rows in split] == [round(share * len(rows)) for rows in split]
        assert wrong.sum() == sum(wrong[rows].sum() for rows in split)  # none of another row
        assert noisy.min() >= 0 and noisy.max() < classes
    was_wrong = small != data.train_targets
    np.testing.assert_array_equal(small[was_wrong], large[was_wrong])


def test_wrong_labels_are_uniform_over_the_other_classes() -> None:
    data = dataset(np.full(40_000, 1), 5)
    noisy = with_label_noise(data, [np.arange(40_000)], 1.0, 3)
    counts = np.bincount(noisy, minlength=5)
    assert counts[1] == 0
    # chi-square of 3 degrees of freedom: above 16.3 once in a thousand
    assert ((counts[[0, 2, 3, 4]] - 10_000) ** 2 / 10_000).sum() < 16.3
    assert (noisy != with_label_noise(data, [np.arange(40_000)], 1.0, 4)).any()


def test_a_row_of_several_clients_has_one_label() -> None:
    data = dataset(np.arange(30) % 3, 3)
    noisy = with_label_noise(data, [np.arange(20), np.arange(10, 30)], 0.5, 0)
    wrong = noisy != data.train_targets
    assert (wrong[:20].sum(), wrong[20:].sum()) == (10, 5)


def built(partition: str, algo: str = "fedavg", **changes: object) -> Problem:
    named = {"algo": algo, "partition": partition, "clients": 3, "model": "logistic", **changes}
    return Problem.build(Experiment(**named), find(algo)(), None)  # type: ignore[arg-type]


def test_clients_see_wrong_labels_and_nobody_else_does() -> None:
    clean, none, noisy = (built(f"dirichlet:1{more}") for more in ("", "+noise:0", "+noise:40%"))
    assert clean.data_digest == none.data_digest != noisy.data_digest
    assert noisy.data_digest == built("dirichlet:1+noise:0.4").data_digest
    assert noisy.data_digest != built("dirichlet:1+noise:0.4", seed=1).data_digest
    for k, rows in enumerate(clean.clients):
        np.testing.assert_array_equal(rows, noisy.clients[k])
        wrong = (clean.shard(k).targets != noisy.shard(k).targets).sum()
        assert wrong == round(0.4 * len(rows))
    np.testing.assert_array_equal(clean.dataset.test_targets, noisy.dataset.test_targets)
    assert clean.label_shares is not None and noisy.label_shares is not None
    np.testing.assert_array_equal(clean.label_shares.shares, noisy.label_shares.shares)
    pooled = built("dirichlet:1+noise:0.4", "pooled")
    np.testing.assert_array_equal(pooled.shard(0).targets, noisy.targets[pooled.clients[0]])
    held = built("dirichlet:1+noise:0.4", evaluate_on="fold:1/3")
    clean_held = built("dirichlet:1", evaluate_on="fold:1/3")
    np.testing.assert_array_equal(held.dataset.test_targets, clean_held.dataset.test_targets)
    np.testing.assert_array_equal(held.targets, noisy.targets)


def test_targets_that_are_no_classes_have_no_noise() -> None:
    inputs, targets = np.zeros((4, 1), np.float32), np.zeros((4, 1), np.float32)
    data = Dataset("made", inputs, targets, inputs, targets, 1, likelihood="gaussian")
    with pytest.raises(
        UsageError, match=r"noise:0.1 replaces classes, and targets of this data set are gaussian"
    ):
        with_label_noise(data, [np.arange(4)], 0.1, 0)
