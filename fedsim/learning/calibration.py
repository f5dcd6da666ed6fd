"""Calibration of class predictions: expected calibration error, Brier score and the reliability table.

The predicted class of an example has the largest probability; that probability is the confidence. The
examples are put into 15 bins of equal width by confidence: bin m has the confidences in ((m-1)/15, m/15].

    ECE    sum over bins of n_m / n |accuracy_m - confidence_m|, with the bin's mean accuracy and confidence
    Brier  mean over examples of the sum over classes of (p_c - [y = c])^2: between 0 and 2

The Brier score is the multi-class one, as Brier (1950) defines it; for two classes it is twice the square of
the error of one probability, which some libraries report. With several tags (bernoulli), every (example, tag)
pair counts as an example with two classes; with tokens, every token that has a target counts as an example.

A calibration tally has SIZE float64 sums over examples: the Brier sum, then the number of examples of each
bin, then the sums of their confidences, then the numbers of correct ones. A prediction that is not a number
is counted in the last bin and makes both scores nan.

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
"""Per bin: the number of examples, the sum of their confidences and the number of correct ones. These are
lists, as in JSON, so that reading a line of metrics.jsonl returns the value that was written."""


def of_classes(log_probabilities: Tensor, targets: Tensor) -> tuple[float, ...]:
    """The calibration tally of log-probabilities (n, C) float64 and their classes (n,)."""
    target = targets.unsqueeze(1)
    # p - 1 as expm1(log p), which keeps the digits of a confident prediction
    missing = log_probabilities.gather(1, target).expm1()
    squared = log_probabilities.exp().scatter(1, target, missing).square().sum()
    predicted = log_probabilities.argmax(dim=1)
    confidence = log_probabilities.gather(1, predicted.unsqueeze(1)).squeeze(1).exp()
    return _tally(squared, confidence, predicted == targets)


def of_tags(outputs: Tensor, targets: Tensor) -> tuple[float, ...]:
    """The calibration tally of logits (n, C) float64 and 0/1 targets (n, C): two classes per pair."""
    applies = targets > 0
    error = torch.where(applies, -outputs, outputs).sigmoid()
    confidence = outputs.abs().sigmoid().flatten()
    return _tally(2 * error.square().sum(), confidence, ((outputs > 0) == applies).flatten())


def _tally(squared: Tensor, confidence: Tensor, correct: Tensor) -> tuple[float, ...]:
    # on the CPU, where the order of summation is fixed
    confidence, correct = confidence.cpu(), correct.cpu().double()
    place = torch.bucketize(confidence, _EDGES)  # nan falls into the last bin
    counts = torch.bincount(place, minlength=BINS).double()
    sums = (torch.bincount(place, weights, minlength=BINS).double() for weights in (confidence, correct))
    return (float(squared), *torch.cat([counts, *sums]).tolist())


def _bins(tally: Sequence[float]) -> list[tuple[float, float, float]]:
    counts, confidences, corrects = (tally[1 + i * BINS : 1 + (i + 1) * BINS] for i in range(3))
    return list(zip(counts, confidences, corrects, strict=True))


def numbers(tally: Sequence[float]) -> dict[str, float | None]:
    """test_ece and test_brier of a calibration tally; None without examples."""
    bins = _bins(tally)
    examples = sum(count for count, _, _ in bins)
    if not examples:
        return {"test_ece": None, "test_brier": None}
    gaps = sum(abs(correct - confidence) for _, confidence, correct in bins)
    return {"test_ece": gaps / examples, "test_brier": tally[0] / examples}


def table(tally: Sequence[float]) -> ReliabilityTable | None:
    """The reliability table of a calibration tally; None if a prediction is not a number."""
    if not all(map(math.isfinite, tally)):
        return None
    return [[int(count), confidence, int(correct)] for count, confidence, correct in _bins(tally)]
