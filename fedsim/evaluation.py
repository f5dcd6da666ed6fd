"""Evaluation of models on the test set, in chunks that any worker may compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.data.datasets import Dataset
from fedsim.learning.client_scores import LabelShares, OwnTestRows
from fedsim.learning.gaussian import Model, Point, taken_apart
from fedsim.learning.likelihoods import LIKELIHOODS, Likelihood, Tally, added, by_client, classified
from fedsim.learning.params import Net
from fedsim.partition_specs import split_of
from fedsim.seeds import RandomStream

CHUNK = 2000
"""The number of examples in a chunk. It is constant, so that sums of floats do not depend on the number of
workers."""


class ChunkScore(NamedTuple):
    """The score of one test chunk.

    Attributes:
        tally: The tally of the predictions at the model's mean.
        ensemble: The tally of predictions averaged over posterior samples; empty without samples.
        clients: The sums over each client's own test rows (likelihoods.by_client); empty without such rows.
    """

    tally: Tally
    ensemble: Tally = ()
    clients: Tally = ()


@dataclass(frozen=True)
class Evaluation:
    """The test set of an experiment, and the evaluation of models on it.

    Attributes:
        read: Maps stored inputs to the network's inputs, on its device.
        seed: The seed of the experiment, from which posterior samples are drawn.
        requested_samples: The number of posterior samples that the experiment asks for.
        test_clients: The client of every test row, -1 for none; None if clients have no test rows.
        split: The training rows of each client.
        of_batch: The initial running statistics if every client keeps its own statistics, else None. If set,
            batch normalisation uses the statistics of each evaluated batch, as AdaBN does for unlabelled data
            (Li et al. 2016, https://arxiv.org/abs/1603.04779), and of_batch for a batch of one example.
    """

    net: Net
    dataset: Dataset
    read: Callable[[Tensor], Tensor]
    seed: int
    requested_samples: int
    test_clients: npt.NDArray[np.int64] | None = None
    split: tuple[npt.NDArray[np.int64], ...] = ()
    of_batch: Tensor | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks of the test set."""
        return -(-len(self.dataset.test_targets) // CHUNK)

    @property
    def measure(self) -> Likelihood:
        """The data set's likelihood, which defines the scores."""
        return LIKELIHOODS[self.dataset.likelihood]

    @property
    def samples(self) -> int:
        """The number of posterior samples over which predictions are averaged; 0 if they are not averaged."""
        return self.requested_samples if self.measure.averages else 0

    @cached_property
    def client_scoring(self) -> LabelShares | OwnTestRows | None:
        """The rule by which clients are scored; None without classes."""
        return self.label_shares if self.test_clients is None else OwnTestRows(len(self.split))

    @cached_property
    def label_shares(self) -> LabelShares | None:
        """The classes of every client's rows, for scores per client; None without classes.

        A centralised algorithm has one row per client of the split, too.
        """
        if self.measure.per_class is None:
            return None
        return LabelShares.of(self.dataset.train_targets, self.split, self.dataset.classes)

    def score(self, model: Model, chunk: int, round: int) -> ChunkScore:
        """Score one test chunk at the mean of `model`.

        If the model is a distribution and posterior samples are requested, the softmax is also averaged over
        samples: draws from a Gaussian, or the model's own samples. All chunks use the same samples.
        """
        scored = self._scored(model, chunk, round)
        self.net.restore()
        return scored

    def _scored(self, model: Model, chunk: int, round: int) -> ChunkScore:
        rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        inputs = torch.from_numpy(np.array(self.dataset.test_inputs[rows])).to(self.net.device)
        targets = torch.from_numpy(np.array(self.dataset.test_targets[rows])).to(self.net.device)
        floats = self.read(inputs)
        plain, statistics = taken_apart(model)
        if self.of_batch is not None:
            statistics = self.of_batch
        if statistics is not None:
            self.net.statistics.copy_(statistics)
        of_batch = self.of_batch is not None

        def logits(weights: Tensor, rows: Tensor) -> Tensor:
            return self.net.logits(weights.to(self.net.device), rows, of_batch).double()

        measure, mean = self.measure, plain.mean.to(self.net.device)
        pieces = zip(torch.split(floats, measure.rows), torch.split(targets, measure.rows), strict=True)
        own: Tally = ()
        if self.test_clients is None:
            tally = reduce(added, (measure.tally(logits(mean, x), y) for x, y in pieces))
        else:
            outputs = torch.cat([logits(mean, x) for x, _ in pieces])
            tally = measure.tally(outputs, targets)
            own = by_client(outputs, targets, torch.from_numpy(self.test_clients[rows]), len(self.split))
        if not self.samples or isinstance(plain, Point):
            return ChunkScore(tally, clients=own)
        rng = RandomStream(self.seed, "posterior", round)
        total = torch.full((len(targets), self.dataset.classes), -math.inf, dtype=torch.float64)
        total = total.to(floats.device)
        draws = 0
        for weights in plain.samples(self.samples, rng.torch("samples")):
            draws += 1
            # in logarithms, because a probability may underflow
            total = torch.logaddexp(total, logits(weights, floats).log_softmax(dim=1))
        return ChunkScore(tally, classified(total - math.log(draws), targets), own)


def own_test_rows(
    dataset: Dataset, partition: str, split: tuple[npt.NDArray[np.int64], ...]
) -> npt.NDArray[np.int64] | None:
    """Return the client of each test row, shape (n,), or -1; None if no client has test rows of its own.

    Clients have test rows if the data set assigns them, the partition is natural and targets are classes.
    """
    centres, tested = dataset.centres, dataset.test_centres
    classes = LIKELIHOODS[dataset.likelihood].per_class is not None
    if centres is None or tested is None or not classes or split_of(partition) != "natural":
        return None
    client_of = np.full(int(centres.max()) + 2, -1)  # the last entry is for index -1
    for client, rows in enumerate(split):
        client_of[centres[rows[0]]] = client
    result: npt.NDArray[np.int64] = client_of[tested]
    return result if (result >= 0).any() else None
