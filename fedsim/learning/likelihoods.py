"""What a network's outputs say about the targets: the loss of one batch, by the name a data set gives it.

    categorical   outputs (n, C) logits,     targets (n,) int64 classes      cross-entropy
    bernoulli     outputs (n, C) logits,     targets (n, C) 0/1              summed over C tags
    tokens        outputs (n, T, C) logits,  targets (n, T) int64, -1: none  cross-entropy per token
    gaussian      outputs (n, C) means,      targets (n, C) float32          1/2 |y - f(x)|^2

Losses are MEANS over the examples of the batch (tokens: over its tokens), in nats; constants are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch.nn.functional as F
from torch import Tensor

from fedsim.errors import UsageError, unknown


@dataclass(frozen=True)
class Likelihood:
    """loss(outputs, targets): the batch's mean negative log-likelihood, 0-d."""

    name: str
    loss: Callable[[Tensor, Tensor], Tensor]

    def classes_only(self, what: str) -> None:
        """See below.

        Raises:
            UsageError: unless targets are classes, which `what` relies on.
        """
        if self.name != "categorical":
            raise UsageError(
                f"{what} is for targets that are classes; this data set's are {self.name}. Choose an "
                "algorithm that trains by gradients alone, such as fedavg, fedavgm, fedprox or fedpa"
            )


def _fits(outputs: Tensor, shape: tuple[int, ...], what: str) -> None:
    """See below.

    Raises:
        UsageError: where a loss would fail obscurely, or worse, broadcast.
    """
    if outputs.shape != shape:
        raise UsageError(
            f"the model gives outputs of shape {tuple(outputs.shape)} where {what} need {tuple(shape)}"
        )


def _bernoulli(outputs: Tensor, targets: Tensor) -> Tensor:
    _fits(outputs, targets.shape, "bernoulli targets")
    summed = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="sum")
    return summed / len(outputs)


def _tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    _fits(outputs, (*targets.shape, outputs.shape[-1]), "tokens")
    each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    return each / (targets >= 0).sum().clamp(min=1)


def _gaussian(outputs: Tensor, targets: Tensor) -> Tensor:
    _fits(outputs, targets.shape, "gaussian targets")
    return (outputs - targets).square().sum() / 2 / len(outputs)


CATEGORICAL = Likelihood("categorical", F.cross_entropy)

LIKELIHOODS: Mapping[str, Likelihood] = MappingProxyType(
    {
        created.name: created
        for created in (
            CATEGORICAL,
            Likelihood("bernoulli", _bernoulli),
            Likelihood("tokens", _tokens),
            Likelihood("gaussian", _gaussian),
        )
    }
)


def likelihood(name: str) -> Likelihood:
    """See below.

    Raises:
        UsageError: naming the nearest known one.
    """
    if name not in LIKELIHOODS:
        raise unknown("likelihood", name, LIKELIHOODS)
    return LIKELIHOODS[name]
