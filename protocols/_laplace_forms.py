"""The two forms of FedLap-Cov's precisions, a diagonal and a full matrix: its messages, its curvature, and
the floor that rounding makes necessary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsim.algorithm import AnyShard
from fedsim.hyperparameters import GgnEstimator
from fedsim.learning.blocks import by_blocks
from fedsim.learning.gaussian import Gaussian, identity, packed, unpacked
from fedsim.seeds import RandomStream
from fedsim.wire.schema import FullPrecision, Mean, Precision, Scalar
from protocols._site_messages import Covariance, check_covariance
from protocols._site_sums import DiagonalSum, TriangleSum

__all__ = ["Covariance", "Form", "check_covariance", "form"]


@dataclass(frozen=True)
class Down:
    mean: Mean
    precision: Precision


@dataclass(frozen=True)
class Up:
    mean: Mean
    precision: Precision
    train_loss: Scalar


@dataclass(frozen=True)
class FullDown:
    mean: Mean
    precision: FullPrecision


@dataclass(frozen=True)
class FullUp:
    mean: Mean
    precision: FullPrecision
    train_loss: Scalar


class Form(ABC):
    """Between precisions in float64 and a message's field. sums: of v_k and V_k, from an edge server."""

    down: type[Any]
    up: type[Any]
    sums: type[Any]
    full: bool

    def one(self, like: Tensor) -> Gaussian:
        """The factor 1 for vectors like `like` (P,)."""
        return Gaussian(torch.zeros_like(like, dtype=torch.float64), identity(like, 0.0, full=self.full))

    def posterior(self, sites: Gaussian, delta: float) -> Gaussian:
        """N(0, I/delta) times the product of all sites."""

        def times_prior(sites: Gaussian) -> Gaussian:
            prior = identity(sites.shift, delta, full=self.full)
            return self.floored(Gaussian(sites.shift, prior + sites.precision), delta)

        return by_blocks(times_prior, sites)

    @abstractmethod
    def field(self, precision: Tensor | float) -> Tensor:
        """A precision as a message has it."""

    @abstractmethod
    def matrix(self, message: Any) -> Tensor:
        """The precision of a message, float64."""

    def gaussian(self, message: Any) -> Gaussian:
        """The Gaussian of a message, float64."""
        return Gaussian.at(message.mean, self.matrix(message))

    @abstractmethod
    def natural(self, sums: Any) -> Gaussian:
        """The factor whose natural parameters an edge server has sent."""

    @abstractmethod
    def curvature(
        self, shard: AnyShard, weights: Tensor, estimator: GgnEstimator, rng: RandomStream
    ) -> Tensor:
        """H_k of the summed loss, in this form."""

    def floored(self, q: Gaussian, delta: float) -> Gaussian:
        """q with a precision of at least delta."""
        return Gaussian(q.shift, self.raised(torch.as_tensor(q.precision), delta))

    @abstractmethod
    def raised(self, precision: Tensor, delta: float) -> Tensor:
        """A precision of at least delta, which H_k >= 0 implies and rounding may not."""

    def local(self, delta: float, H: Tensor, down: Any, site: Gaussian) -> Tensor:
        """S_k, float64: H_k and the precision of the cavity."""
        return H + self.raised(self.matrix(down) - site.precision, delta)

    @abstractmethod
    def lost(self, sites: Gaussian, delta: float) -> int:
        """How many entries, or eigenvalues, of delta I + sum V_k are raised."""


class _Diagonal(Form):
    down, up, sums, full = Down, Up, DiagonalSum, False

    def field(self, precision: Tensor | float) -> Tensor:
        return torch.as_tensor(precision)

    def matrix(self, message: Any) -> Tensor:
        S: Tensor = message.precision
        return S.double()

    def natural(self, sums: DiagonalSum) -> Gaussian:
        return Gaussian(sums.shift, sums.precision)

    def curvature(
        self, shard: AnyShard, weights: Tensor, estimator: GgnEstimator, rng: RandomStream
    ) -> Tensor:
        return shard.curvature(weights, estimator, rng)

    def raised(self, precision: Tensor, delta: float) -> Tensor:
        return precision.clamp(min=delta)

    def lost(self, sites: Gaussian, delta: float) -> int:
        return int((torch.as_tensor(sites.precision) < 0).sum())


class _Full(Form):
    """Eigenvalues are raised to delta where one is below delta/2: directions that no data touch have delta,
    and a Cholesky factorisation tells the one from the other."""

    down, up, sums, full = FullDown, FullUp, TriangleSum, True

    def field(self, precision: Tensor | float) -> Tensor:
        return packed(torch.as_tensor(precision))

    def matrix(self, message: Any) -> Tensor:
        S: Tensor = message.precision
        return unpacked(S).double()

    def natural(self, sums: TriangleSum) -> Gaussian:
        return Gaussian(sums.shift, unpacked(sums.precision))

    def curvature(
        self, shard: AnyShard, weights: Tensor, estimator: GgnEstimator, rng: RandomStream
    ) -> Tensor:
        return shard.full_curvature(weights)

    def raised(self, precision: Tensor, delta: float) -> Tensor:
        if _above(precision, delta / 2):
            return precision
        values, axes = torch.linalg.eigh(precision)
        higher: Tensor = (axes * values.clamp(min=delta)) @ axes.mT
        return higher

    def lost(self, sites: Gaussian, delta: float) -> int:
        precision = torch.as_tensor(sites.precision)
        if _above(precision, -delta / 2):
            return 0
        return int((torch.linalg.eigvalsh(precision) < -delta / 2).sum())


def _above(precision: Tensor, least: float) -> bool:
    """Whether all eigenvalues of a full precision exceed `least`."""
    return Gaussian(precision[0], precision - identity(precision[0], least, full=True)).is_proper


def form(covariance: Covariance) -> Form:
    return _Full() if covariance == "full" else _Diagonal()
