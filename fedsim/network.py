"""The network of an experiment, on flat buffers, and its copies in lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fedsim.data.datasets import Dataset
from fedsim.experiment import Experiment
from fedsim.learning.frozen import freeze
from fedsim.learning.likelihoods import likelihood
from fedsim.learning.models.registry import build_model
from fedsim.learning.params import Net
from fedsim.learning.stacked import check_lanes
from fedsim.seeds import seeded_torch

if TYPE_CHECKING:
    from fedsim.learning.lanes import Lanes


def network_of(experiment: Experiment, dataset: Dataset, device: torch.device) -> Net:
    """The network at the experiment's start.

    Raises:
        UsageError: If there is no such model, nothing of it is trained, or lanes cannot compute it.
    """
    shape = tuple(dataset.train_inputs.shape[1:])
    with seeded_torch(experiment.seed):
        module = build_model(experiment.model, shape, dataset.classes, dataset.likelihood)
        freeze(module, experiment.train, experiment.freeze)
        net = Net(module, device, likelihood(dataset.likelihood))
    check_lanes(net, experiment.lanes, experiment.threads)
    return net


def lanes_of(net: Net, lanes: int, sizes: Sequence[int]) -> Lanes | None:
    """Where several clients are computed at once; None for one lane, which is `net`. sizes: N_k."""
    if lanes == 1:
        return None
    from fedsim.learning.lanes import Lanes  # with greenlet, which other runs need not load

    return Lanes(net, lanes, max(sizes))
