"""Robust losses of classifiers, which replace the negative log-likelihood -log p_y of the target class y.

    gce             (1 - p_y^c) / c                                                 generalised cross-entropy
    density_power   (1 - p_y^c) / c + (sum_j p_j^(1+c) - 1) / (1+c)                 over all classes j

As c falls to 0, both losses become -log p_y. The gradient of gce is p_y^c times the gradient of -log p_y, so
an example whose class has a small probability p_y has little influence.

Source: Mildner et al. 2025 (FedGVI), https://arxiv.org/abs/2502.00846, and its released code. gce is its
`robust_cross_entropy`. density_power is the formula above its `expected_beta_loss` with beta = 1 + c, up to a
constant; the function `expected_beta_loss` itself uses other exponents.
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
    """A function from outputs (n, C) and classes (n,) of a batch to its mean loss, 0-d.

    power: c, in (0, 1]. Equal instances compute equal losses, so a recording's key can contain an instance.
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
    """Return the loss of this name, or None for 'nll', the likelihood's own loss."""
    return None if name == "nll" else RobustLoss(name, power)
