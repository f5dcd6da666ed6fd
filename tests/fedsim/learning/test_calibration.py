"""ECE, Brier score and reliability tables against a computation of a few lines, whole and in chunks."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from fedsim.learning.calibration import BINS
from fedsim.learning.likelihoods import LIKELIHOODS, added

CATEGORICAL = LIKELIHOODS["categorical"]


def expected(p: np.ndarray, y: np.ndarray) -> tuple[float, float, list[tuple[int, float, int]]]:
    """ECE, Brier score and table of probabilities (n, C) and classes (n,): one example at a time."""
    bins = [(0, 0.0, 0)] * BINS
    for row, target in zip(p, y, strict=True):
        m = max(0, math.ceil(row.max() * BINS) - 1)
        count, confidence, correct = bins[m]
        bins[m] = (count + 1, confidence + row.max(), correct + int(row.argmax() == target))
    ece = sum(n / len(p) * abs(right / n - sure / n) for n, sure, right in bins if n)
    return ece, float(np.square(p - np.eye(p.shape[1])[y]).sum(axis=1).mean()), bins


def drawn(seed: int, n: int, classes: int, scale: float) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return scale * torch.randn(n, classes, generator=g).double(), torch.randint(classes, (n,), generator=g)


outputs = st.builds(
    drawn, st.integers(0, 999), st.integers(1, 60), st.integers(2, 7), st.sampled_from([0.1, 1.0, 4.0, 30.0])
)


@given(outputs, st.integers(1, 60))
def test_tallies_of_chunks_add_up_to_that_of_the_whole(example: tuple[Tensor, Tensor], rows: int) -> None:
    logits, targets = example
    whole = CATEGORICAL.tally(logits, targets)
    pieces = zip(torch.split(logits, rows), torch.split(targets, rows), strict=True)
    parts = reduce(added, (CATEGORICAL.tally(x, y) for x, y in pieces))
    np.testing.assert_allclose(parts, whole, rtol=1e-12)
    numbers, others = CATEGORICAL.numbers(whole), CATEGORICAL.numbers(parts)
    # a difference of sums: its rounding is relative to the sums, which are at most the number of examples
    assert others == pytest.approx(numbers, rel=1e-12, abs=1e-12)


@given(outputs)
def test_scores_and_table_are_those_of_the_definition(example: tuple[Tensor, Tensor]) -> None:
    logits, targets = example
    ece, brier, bins = expected(logits.softmax(dim=1).numpy(), targets.numpy())
    tally = CATEGORICAL.tally(logits, targets)
    numbers, table = CATEGORICAL.numbers(tally), CATEGORICAL.reliability(tally)
    assert numbers["test_ece"] == pytest.approx(ece, rel=1e-9, abs=1e-12)
    assert numbers["test_brier"] == pytest.approx(brier, rel=1e-9, abs=1e-12)
    assert table is not None
    np.testing.assert_allclose(np.array(table), np.array(bins), rtol=1e-12, atol=1e-12)


def test_a_confident_prediction_keeps_the_digits_of_its_small_error() -> None:
    logits, targets = torch.tensor([[50.0, 0.0]]).double(), torch.tensor([0])
    brier = CATEGORICAL.numbers(CATEGORICAL.tally(logits, targets))["test_brier"]
    assert brier == pytest.approx(2 * math.exp(-50) ** 2, rel=1e-12)


def test_tags_are_predictions_of_two_classes() -> None:
    g = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(40, 5, generator=g).double()
    targets = (torch.rand(40, 5, generator=g) < 0.3).to(torch.uint8)
    tags = LIKELIHOODS["bernoulli"]
    tally = tags.tally(logits, targets)
    pairs = torch.stack([torch.zeros(200), logits.flatten()], dim=1).double()
    ece, brier, bins = expected(pairs.softmax(dim=1).numpy(), targets.flatten().long().numpy())
    numbers = tags.numbers(tally)
    assert (numbers["test_ece"], numbers["test_brier"]) == pytest.approx((ece, brier), rel=1e-9)
    np.testing.assert_allclose(np.array(tags.reliability(tally)), np.array(bins), rtol=1e-12)


def test_tokens_without_a_target_do_not_count() -> None:
    logits, targets = drawn(2, 12, 20, 2.0)
    targets[::4] = -1
    tokens = LIKELIHOODS["token_classes"]
    result = tokens.numbers(tokens.tally(logits.reshape(3, 4, 20), targets.reshape(3, 4)))
    there = targets >= 0
    ece, brier, _ = expected(logits[there].softmax(dim=1).numpy(), targets[there].numpy())
    assert (result["test_ece"], result["test_brier"]) == pytest.approx((ece, brier), rel=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_prediction_that_is_no_number_makes_the_scores_nan_and_leaves_no_table(bad: float) -> None:
    logits, targets = drawn(0, 20, 3, 1.0)
    logits[4, 1] = bad
    tally = CATEGORICAL.tally(logits, targets)
    numbers = CATEGORICAL.numbers(tally)
    assert all(math.isnan(numbers[key] or 0.0) for key in ("test_nll", "test_ece", "test_brier"))
    assert CATEGORICAL.reliability(tally) is None


def test_numbers_as_targets_have_no_calibration() -> None:
    gaussian = LIKELIHOODS["gaussian"]
    tally = gaussian.tally(torch.zeros(3, 1).double(), torch.ones(3, 1))
    assert gaussian.reliability(tally) is None
    assert set(gaussian.numbers(tally)) == {"test_accuracy", "test_nll"}
