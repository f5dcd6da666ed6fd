"""Wrong labels in the clients' training data, +noise:P behind a partition.

Of each client's rows a share P, rounded to whole rows and drawn without replacement, get another class, drawn
uniformly from all other classes. The draws are those of the stream (seed, "label noise", client), so they do
not depend on anything but the seed and the split; the wrong labels of a smaller P are a part of those of a
larger one. A row that several clients have gets its label with the first of them. Test rows, and training
rows on which a run is evaluated, keep their labels.

Source: the random contamination of FedGVI's experiments, Mildner et al. 2025, arXiv:2502.00846, in
contaminate_labels of https://github.com/Terje-M/FedGVI (fedgvi_experiments/utils/helper_functions.py).

Differs: there the share is of all training rows before they are divided, and the draws are the same for all
seeds of a run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedsim.data.datasets import Dataset
from fedsim.errors import UsageError
from fedsim.seeds import RandomStream


def with_label_noise(
    dataset: Dataset, split: Sequence[npt.NDArray[np.int64]], share: float, seed: int
) -> npt.NDArray[np.int64]:
    """The classes of all training rows, (n,), of which those of the clients' rows are wrong in part.

    Raises:
        UsageError: If targets are not classes.
    """
    if dataset.likelihood != "categorical":
        raise UsageError(
            f"--partition noise:{share:g} replaces classes, and targets of this data set are "
            f"{dataset.likelihood}"
        )
    targets, classes = dataset.train_targets, dataset.classes
    result, seen = targets.copy(), np.zeros(len(targets), dtype=bool)
    for client, rows in enumerate(split):
        own = rows[~seen[rows]]
        seen[own] = True
        draws = RandomStream(seed, "label noise", client=client)
        wrong = draws.numpy("rows").permutation(own)[: round(share * len(own))]
        steps = draws.numpy("classes").integers(1, classes, len(own))[: len(wrong)]
        result[wrong] = (targets[wrong] + steps) % classes
    result.setflags(write=False)
    return result
