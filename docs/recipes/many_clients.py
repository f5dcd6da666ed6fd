"""A model and a data set for runs with many clients, of which few are ever asked.

    fedsim launch --workers 2 --algo fedlap --model docs/recipes/many_clients.py:Wide \\
        --dataset docs/recipes/many_clients.py:blobs --partition iid \\
        --clients 10000 --participation 10 --rounds 3

A client's initial state under fedlap is 636 KB, so the end of the run shows what clients cost that were
never heard.
"""

from __future__ import annotations

import math

import numpy as np
from torch import nn

from fedsim.data import Dataset

CLASSES, WIDTH, TRAINING, TEST = 10, 64, 20_000, 2_000


class Wide(nn.Sequential):
    """64-1060-10 on the data below: P = 79,510."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(math.prod(shape), 1060), nn.ReLU(), nn.Linear(1060, classes))


def blobs() -> Dataset:
    """Ten clouds in 64 dimensions, the same numbers in every process."""
    rng = np.random.Generator(np.random.Philox(key=7))
    labels = np.arange(TRAINING + TEST, dtype=np.int64) % CLASSES
    centres = rng.normal(size=(CLASSES, WIDTH))
    points = (centres[labels] + rng.normal(size=(len(labels), WIDTH))).astype(np.float32)
    return Dataset(
        "blobs", points[:TRAINING], labels[:TRAINING], points[TRAINING:], labels[TRAINING:], classes=CLASSES
    )
