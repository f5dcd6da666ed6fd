"""Robust losses of classifiers, in the place of the negative log-likelihood -log p_y of the target class y.

    gce             (1 - p_y^c) / c                                                 generalised cross-entropy
    density_power   (1 - p_y^c) / c + (sum_j p_j^(1+c) - 1) / (1+c)                 over all classes j

As c falls to 0 both become -log p_y. An example's gradient of gce is p_y^c times that of -log p_y, so that
one to which the model gives a small probability pulls little.

Source: Mildner et al. 2025 (FedGVI), https://arxiv.org/abs/2502.00846, and its released code:
`robust_cross_entropy`, and the formula above `expected_beta_loss` with beta = 1 + c, up to a constant; that
function itself has other exponents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

LossName = Literal["nll", "gce", "density_power"]


@dataclass(frozen=True)
class RobustLoss:
    """The mean loss of a batch, from outputs (n, C) and classes (n,); 0-d.

    power: c, in (0, 1]. Equal ones compute the same, so that a recording of steps may have one in its key.
    """

    name: Literal["gce", "density_power"]
    power: float

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        log_p = outputs.log_softmax(dim=1)
        loss = -torch.expm1(-self.power * F.nll_loss(log_p, targets, reduction="none")) / self.power
        if self.name == "density_power":
            exponent = 1 + self.power
            loss = loss + ((exponent * log_p).exp().sum(dim=1) - 1) / exponent
        return loss.mean()


def robust_loss(name: LossName, power: float) -> RobustLoss | None:
    """The loss of this name; None: the likelihood's own."""
    return None if name == "nll" else RobustLoss(name, power)
