"""Data sets with wrong labels in the training rows, as in FedGVI's experiments.

    FEDSIM_DATA=DIR fedsim launch --dataset label_noise.py:fashion_mnist_40 --partition iid --algo pvi

A share of all training rows gets a wrong label, drawn uniformly from the other classes. The draws are the
same for every seed of a run, and the wrong labels of a smaller share are a subset of those of a larger one.
Test rows keep their labels; training rows that --evaluate-on holds out do not. A split by class divides the
rows by their wrong labels, so use iid, natural or rows:FILE.

Source: contaminate_labels in fedgvi_experiments/utils/helper_functions.py of
https://github.com/Terje-M/FedGVI (Mildner et al. 2025, arXiv:2502.00846).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from fedsim import Dataset, load_dataset


def noisy(name: str, share: float, seed: int = 0) -> Dataset:
    """Return a data set of fedsim, or of FILE.csv,label=COLUMN, with a share of its training labels wrong."""
    right = load_dataset(name)
    targets, draws = right.train_targets.copy(), np.random.default_rng(seed)
    wrong = draws.permutation(len(targets))[: round(share * len(targets))]
    steps = draws.integers(1, right.classes, len(targets))[: len(wrong)]
    targets[wrong] = (targets[wrong] + steps) % right.classes
    return replace(right, name=f"{name} with {share:.0%} wrong labels", train_targets=targets)


digits_20 = partial(noisy, "digits", 0.2)
fashion_mnist_20 = partial(noisy, "fashion_mnist", 0.2)
fashion_mnist_40 = partial(noisy, "fashion_mnist", 0.4)
