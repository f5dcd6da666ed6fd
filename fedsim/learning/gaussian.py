"""Gaussians (and Gaussian factors) by their natural parameters, closed under *, / and **.

A factor is exp(shift . w - 1/2 w' S w) up to a constant, with S the precision: a float (S I,
isotropic) or a vector (P,) (diagonal). A site t_k, that is a dual, is such a factor too; its
precision may be zero or negative. Sign: the client's loss is l_k(w) + log t_k(w), so that the local
problem's prior is the cavity q / t_k (design section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Point:
    """A model without uncertainty."""

    mean: Tensor


@dataclass(frozen=True)
class Gaussian:
    """shift = S m (P,), precision = S: float (isotropic) or (P,) (diagonal)."""

    shift: Tensor
    precision: Tensor | float

    @staticmethod
    def at(mean: Tensor, precision: Tensor | float) -> Gaussian:
        """N(mean, S^-1), in float64: natural parameters are sums and differences of large numbers."""
        exact = precision.double() if isinstance(precision, Tensor) else precision
        return Gaussian(exact * mean.double(), exact)

    @property
    def mean(self) -> Tensor:
        return self.shift / self.precision

    def __mul__(self, other: Gaussian) -> Gaussian:
        return Gaussian(self.shift + other.shift, self.precision + other.precision)

    def __truediv__(self, other: Gaussian) -> Gaussian:
        return Gaussian(self.shift - other.shift, self.precision - other.precision)

    def __pow__(self, power: float) -> Gaussian:
        return Gaussian(power * self.shift, power * self.precision)

    def to(self, like: Tensor) -> Gaussian:
        """The same factor in the dtype and on the device of `like`."""
        precision = self.precision.to(like) if isinstance(self.precision, Tensor) else self.precision
        return Gaussian(self.shift.to(like), precision)

    def add_gradient(self, weights: Tensor, grads: Tensor) -> None:
        """grads += gradient of -log factor = S w - shift."""
        if isinstance(self.precision, Tensor):
            grads.addcmul_(self.precision, weights).sub_(self.shift)
        else:
            grads.add_(weights, alpha=self.precision).sub_(self.shift)


@dataclass(frozen=True)
class Distance:
    """The penalty (strength / 2) ||w - centre||, the norm NOT squared.

    This is what the released code of the FedLap paper computes where the paper has the squared norm
    (papers-and-code.md 2.2). Its gradient at w = centre, the first step of a round, is taken as 0.
    """

    centre: Tensor
    strength: float

    def to(self, like: Tensor) -> Distance:
        return Distance(self.centre.to(like), self.strength)

    def add_gradient(self, weights: Tensor, grads: Tensor) -> None:
        step = weights - self.centre
        length = torch.linalg.vector_norm(step)
        if length > 0:
            grads.add_(step / length, alpha=self.strength / 2)


Penalty = Gaussian | Distance
