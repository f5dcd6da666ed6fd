"""The network of an experiment, on flat buffers."""

from __future__ import annotations

import torch

from fedsim.data.datasets import Dataset
from fedsim.experiment import Experiment
from fedsim.learning.frozen import freeze
from fedsim.learning.likelihoods import likelihood
from fedsim.learning.models.registry import build_model
from fedsim.learning.params import Net
from fedsim.seeds import seeded_torch


def network_of(experiment: Experiment, dataset: Dataset, device: torch.device) -> Net:
    """The network at the experiment's start."""
    shape = tuple(dataset.train_inputs.shape[1:])
    with seeded_torch(experiment.seed):
        module = build_model(experiment.model, shape, dataset.classes, dataset.likelihood)
        freeze(module, experiment.train, experiment.freeze)
        return Net(module, device, likelihood(dataset.likelihood))
