"""Wrong labels in the clients' training data: the modifier +noise:P of a partition.

A share P of each client's rows gets a wrong label. These rows are drawn without replacement, and their number
is rounded; the wrong label is drawn uniformly from all other classes. The draws come from the random stream
(seed, "label noise", client), so they depend only on the seed and the split. The wrong labels for a smaller P
are a subset of those for a larger P. A row that several clients have counts only for the first of them. Test
rows, and training rows on which a run is evaluated, keep their labels.

Source: the random contamination in FedGVI's experiments, Mildner et al. 2025, arXiv:2502.00846, in
contaminate_labels of https://github.com/Terje-M/FedGVI (fedgvi_experiments/utils/helper_functions.py).

Differs: FedGVI takes the share of all training rows before they are divided, and its draws are the same for
all seeds of a run.
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
    """Return the classes of all training rows, (n,), with a share of each client's labels made wrong.

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
