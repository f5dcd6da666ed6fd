"""Calibration of class predictions: expected calibration error, Brier score and the reliability table.

The predicted class of an example has the largest probability, which is the confidence. Examples are grouped
into 15 bins of equal width by confidence: bin m has the confidences in ((m-1)/15, m/15].

    ECE    sum over bins of n_m / n |accuracy_m - confidence_m|; both are means over the n_m examples of a bin
    Brier  mean over examples of the sum over classes of (p_c - [y = c])^2: between 0 and 2

The Brier score is the multi-class score of Brier (1950). For two classes it is twice the squared error of one
probability, which some libraries report. With several tags (bernoulli), every (example, tag) pair counts as
an example with two classes. With tokens, every token that has a target counts as an example.

A calibration tally has SIZE float64 sums over examples: first the Brier sum, then the number of examples in
each bin, then the sum of the confidences in each bin, then the number of correct examples in each bin. A nan
prediction is counted in the last bin and makes both scores nan.

References: Guo, Pleiss, Sun, Weinberger, On calibration of modern neural networks, ICML 2017,
https://arxiv.org/abs/1706.04599, Eq. 2-3; Brier, Verification of forecasts expressed in terms of probability,
Monthly Weather Review 78 (1950), https://doi.org/10.1175/1520-0493(1950)078<0001:VOFEIT>2.0.CO;2
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BINS = 15
SIZE = 1 + 3 * BINS
"""The length of a calibration tally."""
_EDGES = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)[1:-1]

ReliabilityTable = list[list[float]]
"""One row per bin: the number of examples, the sum of their confidences and the number of correct examples.
The rows are lists and not tuples, because JSON (metrics.jsonl) reads them back as lists."""


def of_classes(log_probabilities: Tensor, targets: Tensor) -> tuple[float, ...]:
    """Return the calibration tally of log-probabilities (n, C) float64 and target classes (n,)."""
    target = targets.unsqueeze(1)
    # expm1(log p) is p - 1 without loss of digits for a confident prediction
    missing = log_probabilities.gather(1, target).expm1()
    squared = log_probabilities.exp().scatter(1, target, missing).square().sum()
    predicted = log_probabilities.argmax(dim=1)
    confidence = log_probabilities.gather(1, predicted.unsqueeze(1)).squeeze(1).exp()
    return _tally(squared, confidence, predicted == targets)


def of_tags(outputs: Tensor, targets: Tensor) -> tuple[float, ...]:
    """Return the calibration tally of logits (n, C) float64 and 0/1 targets (n, C)."""
    applies = targets > 0
    error = torch.where(applies, -outputs, outputs).sigmoid()
    confidence = outputs.abs().sigmoid().flatten()
    return _tally(2 * error.square().sum(), confidence, ((outputs > 0) == applies).flatten())


def _tally(squared: Tensor, confidence: Tensor, correct: Tensor) -> tuple[float, ...]:
    # on the CPU, because it has a fixed order of summation
    confidence, correct = confidence.cpu(), correct.cpu().double()
    place = torch.bucketize(confidence, _EDGES)  # nan falls into the last bin
    counts = torch.bincount(place, minlength=BINS).double()
    sums = (torch.bincount(place, weights, minlength=BINS).double() for weights in (confidence, correct))
    return (float(squared), *torch.cat([counts, *sums]).tolist())


def _bins(tally: Sequence[float]) -> list[tuple[float, float, float]]:
    counts, confidences, corrects = (tally[1 + i * BINS : 1 + (i + 1) * BINS] for i in range(3))
    return list(zip(counts, confidences, corrects, strict=True))


def numbers(tally: Sequence[float]) -> dict[str, float | None]:
    """Return test_ece and test_brier of a calibration tally; they are None without examples."""
    bins = _bins(tally)
    examples = sum(count for count, _, _ in bins)
    if not examples:
        return {"test_ece": None, "test_brier": None}
    gaps = sum(abs(correct - confidence) for _, confidence, correct in bins)
    return {"test_ece": gaps / examples, "test_brier": tally[0] / examples}


def table(tally: Sequence[float]) -> ReliabilityTable | None:
    """Return the reliability table of a calibration tally, or None if a prediction is nan."""
    if not all(map(math.isfinite, tally)):
        return None
    return [[int(count), confidence, int(correct)] for count, confidence, correct in _bins(tally)]
