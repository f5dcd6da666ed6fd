"""Scores of the global model per client, from scores per class: nothing is sent or computed by a client.

Client k's score is the score on the test set with its classes weighted as in the client's training rows:

    accuracy_k = sum_c p_k(c) accuracy_c,    nll_k = sum_c p_k(c) nll_c

p_k(c) is the share of class c among the rows of client k, accuracy_c the accuracy on the test rows of class
c. A class without test rows is left out, and the other shares of a client are divided by their sum; a client
that has no other class has no score.

This measures label skew. It is the expected score on test rows that are drawn as the client's labels are, if
the inputs of a class are distributed alike at all clients: so for partitions by label. It does not measure
feature skew, such as hospitals with other devices or writers with another hand.

Mean, worst and spread (the population standard deviation) are over clients, each of which counts once,
whatever the number of its rows. The worst accuracy is the smallest, the worst nll the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

CLIENT_NUMBERS = (
    *("client_accuracy_mean", "client_accuracy_worst", "client_accuracy_spread"),
    *("client_nll_mean", "client_nll_worst", "client_nll_spread"),
)
"""Keys of metrics.jsonl."""

HISTOGRAM_BINS = 20
"""Of equal width, over accuracies from 0 to 1; a bin has its lower edge, the last one both."""


@dataclass(frozen=True)
class LabelShares:
    """p_k(c) as an array (K, C) float64 whose rows sum to 1."""

    shares: Values

    @staticmethod
    def of(targets: npt.NDArray[Any], clients: Sequence[npt.NDArray[Any]], classes: int) -> LabelShares:
        """Count labels.

        Args:
            targets: The classes of all training rows, (n,).
            clients: The training rows of every client.
            classes: C.
        """
        owner = np.repeat(np.arange(len(clients)), [len(rows) for rows in clients])
        cells = owner * classes + targets[np.concatenate(clients)]
        counts = np.bincount(cells, minlength=len(clients) * classes).reshape(-1, classes)
        return LabelShares(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))

    def averages(self, totals: Values, counts: Values) -> Values:
        """Scores per client (K,): nan without a tested class, or if a class has no finite score.

        Args:
            totals: Summed scores of the test rows of each class, (C,).
            counts: The number of test rows of each class, (C,).
        """
        tested = counts > 0
        shares, each = self.shares[:, tested], totals[tested] / counts[tested]
        finite = np.isfinite(each)
        # no BLAS: its order of additions may depend on the number of threads
        sums = (shares[:, finite] * each[finite]).sum(axis=1)
        covered = shares.sum(axis=1)
        unknown = (covered == 0) | (shares[:, ~finite] > 0).any(axis=1)
        return np.where(unknown, np.nan, sums / np.where(covered > 0, covered, 1))

    def numbers(self, tally: Sequence[float]) -> dict[str, float | None]:
        """CLIENT_NUMBERS of a tally per class: counts, correct ones and nll, each of C entries.

        None if no client has a score, nan if a score is not finite.
        """
        counts, correct, nll = np.array(tally, dtype=np.float64).reshape(3, -1)
        there = self.shares[:, counts > 0].any(axis=1)
        if not there.any():
            return dict.fromkeys(CLIENT_NUMBERS)
        values: list[float] = []
        for totals, worst in ((correct, np.min), (nll, np.max)):
            scores = self.averages(totals, counts)[there]
            values += [float(scores.mean()), float(worst(scores)), float(scores.std())]
        return dict(zip(CLIENT_NUMBERS, values, strict=True))

    def histogram(self, tally: Sequence[float]) -> list[int]:
        """How many clients have an accuracy in each of the HISTOGRAM_BINS."""
        counts, correct, _ = np.array(tally, dtype=np.float64).reshape(3, -1)
        scores = self.averages(correct, counts)
        scores = np.clip(scores[np.isfinite(scores)], 0, 1)  # a sum of shares may round to more than 1
        return [int(n) for n in np.histogram(scores, bins=HISTOGRAM_BINS, range=(0, 1))[0]]
