"""Scores of the global model per client; clients neither send nor compute anything for these scores.

If the data set assigns test rows to clients, and the partition is by the same clients, client k is scored on
its own test rows, and a client without test rows has no score (OwnTestRows). Otherwise, client k's score is
the score on the whole test set with the classes weighted as in the client's training rows (LabelShares):

    accuracy_k = sum_c p_k(c) accuracy_c,    nll_k = sum_c p_k(c) nll_c

p_k(c) is the share of class c among the rows of client k; accuracy_c is the accuracy on the test rows of
class c. Classes without test rows are left out, and a client's other shares are divided by their sum. If all
classes of a client are left out, it has no score.

The weighted score measures label skew. It is the expected score on test rows with the client's distribution
of classes, if each class has the same inputs at all clients, as in partitions by label. It does not measure
feature skew, for example different devices in hospitals or different handwriting of writers. Scores on a
client's own test rows measure both.

Mean, worst and spread (the population standard deviation) are over clients, each counted once. The worst
accuracy is the smallest, the worst nll the largest. A centralised algorithm is scored on the K clients whose
rows it trains on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim.learning.score_names import CLIENT_LISTS, CLIENT_NUMBERS

Values = npt.NDArray[np.float64]

MOST_LISTED = 100
"""The largest number of clients for which metrics.jsonl lists the score of each client."""

HISTOGRAM_BINS = 20
"""The number of bins of equal width from 0 to 1; a bin includes its lower edge, the last bin both edges."""


@dataclass(frozen=True)
class LabelShares:
    """p_k(c) as an array (K, C) float64 whose rows sum to 1."""

    shares: Values

    @staticmethod
    def of(targets: npt.NDArray[Any], clients: Sequence[npt.NDArray[Any]], classes: int) -> LabelShares:
        """Count labels. targets: classes of all training rows, (n,). clients: training rows by client."""
        owner = np.repeat(np.arange(len(clients)), [len(rows) for rows in clients])
        cells = owner * classes + targets[np.concatenate(clients)]
        counts = np.bincount(cells, minlength=len(clients) * classes).reshape(-1, classes)
        return LabelShares(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))

    def scores(self, tally: Sequence[float]) -> ClientScores:
        """Return the scores of the clients that have a class with test rows.

        tally: 3 C entries: the number of test rows per class, then of correct ones, then the summed nll.
        """
        counts, correct, nll = np.array(tally, dtype=np.float64).reshape(3, -1)
        tested = counts > 0
        shares = self.shares[:, tested]
        scored: npt.NDArray[np.bool_] = np.any(shares, axis=1)
        shares = shares[scored]
        shares /= shares.sum(axis=1, keepdims=True)
        totals, counts = np.array([correct, nll])[:, tested], counts[tested]
        accuracy, nll = (_average(shares, total / counts) for total in totals)
        return ClientScores(accuracy, nll, scored)


@dataclass(frozen=True)
class OwnTestRows:
    """Scores on each client's own test rows. clients: K, the number of clients."""

    clients: int

    def scores(self, tally: Sequence[float]) -> ClientScores:
        """Return the scores of the clients that have test rows.

        tally: 3 K entries: the number of test rows per client, then of correct ones, then the summed nll.
        """
        counts, correct, nll = np.array(tally, dtype=np.float64).reshape(3, self.clients)
        scored = counts > 0
        accuracy, nll = (total[scored] / counts[scored] for total in (correct, nll))
        return ClientScores(accuracy, np.where(np.isfinite(nll), nll, np.nan), scored)


@dataclass(frozen=True)
class ClientScores:
    """The accuracy, and the nll per example in nats, of every client that has a score.

    A score is nan if it, or the score of one of the client's classes, is not finite. scored: (K,) bool, True
    for clients that have a score.
    """

    accuracy: Values
    nll: Values
    scored: npt.NDArray[np.bool_]

    def numbers(self) -> dict[str, float | None]:
        """Return the scores of CLIENT_NUMBERS: None if no client has a score, nan if a client's is nan."""
        if not len(self.accuracy):
            return dict.fromkeys(CLIENT_NUMBERS)
        values: list[float] = []
        for scores, worst in ((self.accuracy, np.min), (self.nll, np.max)):
            values += [float(scores.mean()), float(worst(scores)), float(scores.std())]
        return dict(zip(CLIENT_NUMBERS, values, strict=True))

    def lists(self) -> dict[str, list[float | None]]:
        """Return the scores by client id, with six significant digits; None if missing or not finite.

        The result is empty if there are more than MOST_LISTED clients.
        """
        if len(self.scored) > MOST_LISTED:
            return {}
        result: dict[str, list[float | None]] = {}
        for key, scores in zip(CLIENT_LISTS, (self.accuracy, self.nll), strict=True):
            there = (float(f"{score:.6g}") if np.isfinite(score) else None for score in scores)
            result[key] = [next(there) if has else None for has in self.scored]
        return result

    def histogram(self) -> list[int]:
        """Return the number of clients with an accuracy in each of the HISTOGRAM_BINS."""
        scores = np.clip(self.accuracy, 0, 1)  # a sum of shares may round to more than 1
        return [int(n) for n in np.histogram(scores, bins=HISTOGRAM_BINS, range=(0, 1))[0]]


def _average(shares: Values, scores: Values) -> Values:
    """Average the scores of classes (C,) with the shares of each client (K, C); shape (K,)."""
    finite = np.isfinite(scores)
    # einsum does not use BLAS here; the order of additions in BLAS may depend on the number of threads
    result: Values = np.einsum("kc,c->k", shares, np.where(finite, scores, 0.0))
    if not finite.all():
        result[(shares[:, ~finite] > 0).any(axis=1)] = np.nan
    return result
