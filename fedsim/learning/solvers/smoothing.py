"""A loss smoothed by a Gaussian of fixed precision, E_{N(w, I/s)}[l], by antithetic draws."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.learning.params import Net


@dataclass(frozen=True)
class Smoothing:
    """E[l(w + eps)] with eps from N(0, I/precision), as a mean over pairs w + eps and w - eps.

    A pair's gradient is exact for a quadratic loss, up to rounding: terms of odd order in eps cancel.
    """

    precision: float
    pairs: int

    def loss_gradient(
        self, net: Net, inputs: Tensor, targets: Tensor, weight: float | Tensor, draws: torch.Generator
    ) -> Tensor:
        """Write weight * grad E[mean loss] at net.weights into net.grads; return the mean loss (0-d).

        net.weights (P,) are as before afterwards. Every call draws new noise, on the device of `draws`.
        """
        centre, total = net.snapshot(), torch.zeros_like(net.grads)
        loss = torch.zeros((), device=net.device)
        for _ in range(self.pairs):
            eps = torch.randn(len(centre), generator=draws, device=draws.device) / self.precision**0.5
            for point in (centre + eps, centre - eps):
                net.load(point)
                loss += net.loss_gradient(inputs, targets, weight)
                total += net.grads
        net.load(centre)
        net.grads.copy_(total.div_(2 * self.pairs))
        return loss / (2 * self.pairs)
