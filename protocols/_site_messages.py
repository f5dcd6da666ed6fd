"""The exponential families of the ADMM and PVI members, and their messages.

    fixed      q = N(w, S^-1), S given: only means cross the wire      fedadmm, feddyn, ama, precond_admm
    diagonal   q = N(m, diag(s)^-1): mean and precision                ivon_admm, ivon_pvi, pvi, ...
    full       q = N(m, S^-1): mean and the triangle of S              bayes_admm, pvi, bregman_admm

A broadcast is q_g. An upload is q_k or, under silent = last, the
increment of z_k by its natural parameters, whose precision part may be negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import Exchange
from fedsim.errors import UsageError
from fedsim.learning.gaussian import Gaussian, identity, packed, times, unpacked
from fedsim.wire.schema import Delta, FullDelta, FullPrecision, Least, Mean, Norm, Precision, Scalar, Total
from protocols._dual_rule import Dual, Silent, residual
from protocols._site_sums import (
    DiagonalSum,
    DiagonalSums,
    PointSum,
    PointSums,
    TriangleSum,
    TriangleSums,
)


@dataclass(frozen=True)
class PointInfo:
    """primal_residual: |w_k - w_g|."""

    train_loss: Scalar
    primal_residual: Norm


@dataclass(frozen=True)
class PosteriorInfo:
    """dual_slack, capped: protocols._dual_rule.ClippedCavity; the others as in PointInfo."""

    train_loss: Scalar
    primal_residual: Norm
    dual_slack: Least
    capped: Total


@dataclass(frozen=True)
class PointDown:
    """w_g."""

    mean: Mean


@dataclass(frozen=True)
class PointUp:
    """w_k."""

    mean: Mean
    info: PointInfo


@dataclass(frozen=True)
class PointIncrement:
    z_shift: Delta
    info: PointInfo


@dataclass(frozen=True)
class DiagonalDown:
    mean: Mean
    precision: Precision


@dataclass(frozen=True)
class DiagonalUp:
    """q_k."""

    mean: Mean
    precision: Precision
    info: PosteriorInfo


@dataclass(frozen=True)
class DiagonalIncrement:
    z_shift: Delta
    z_precision: Delta
    info: PosteriorInfo


@dataclass(frozen=True)
class FullDown:
    mean: Mean
    precision: FullPrecision


@dataclass(frozen=True)
class FullUp:
    mean: Mean
    precision: FullPrecision
    info: PosteriorInfo


@dataclass(frozen=True)
class FullIncrement:
    z_shift: Delta
    z_precision: FullDelta
    info: PosteriorInfo


@dataclass(frozen=True)
class ExponentialFamily:
    """Between natural parameters in float64 and a member's message classes.

    S is the fixed precision of a `fixed` family, and of no meaning to the others.
    """

    kind: Literal["fixed", "diagonal", "full"]
    down: type[Any]
    up: type[Any]
    increment: type[Any]
    sums: tuple[type[Any], type[Any]]
    """What an edge server sends: the change of prod t_k or prod z_k, and with prod q_k."""

    def exchange(self, silent: Silent) -> Exchange:
        return Exchange(self.down, self.up if silent == "participants" else self.increment)

    def isotropic(self, like: Tensor, precision: float) -> Gaussian:
        """N(0, I/precision) for vectors like `like` (P,)."""
        zero = torch.zeros_like(like, dtype=torch.float64)
        if self.kind == "fixed":
            return Gaussian(zero, precision)
        return Gaussian(zero, identity(zero, precision, full=self.kind == "full"))

    def project(self, merged: Gaussian, S: Tensor | float) -> Gaussian:
        """The member of the family with the mean of `merged`: where the precision is learned, `merged`."""
        return Gaussian.at(merged.mean, S) if self.kind == "fixed" else merged

    def broadcast(self, q: Gaussian) -> Any:
        """q_g as a message."""
        return self.down(q.mean, *self._precision(q))

    def posterior(self, down: Any, S: Tensor | float) -> Gaussian:
        """q_g of a broadcast."""
        return Gaussian.at(down.mean, S if self.kind == "fixed" else self._matrix(down.precision))

    def upload(self, dual: Dual, sent: Gaussian, local: Gaussian, q: Gaussian, **scalars: float) -> Any:
        """The upload of q_k = `local`; sent: the increment of z_k where the client has one, else q_k."""
        info = (PointInfo if self.kind == "fixed" else PosteriorInfo)(
            primal_residual=residual(local, q), **scalars
        )
        if dual.z is None:
            return self.up(local.mean, *self._precision(local), info)
        return self.increment(sent.shift, *self._precision(sent), info)

    def factor(self, up: Any, S: Tensor | float) -> Gaussian:
        """The factor that an upload carries: q_k, or the increment of z_k."""
        if isinstance(up, self.up):
            return Gaussian.at(up.mean, S if self.kind == "fixed" else self._matrix(up.precision))
        fixed = self.kind == "fixed"
        return Gaussian(up.z_shift.double(), 0.0 if fixed else self._matrix(up.z_precision.double()))

    def sums_message(self, change: Gaussian, product: Gaussian | None, count: int) -> Any:
        """An edge server's sums, in natural parameters."""
        fields = (change.shift, *self._precision(change))
        if product is None:
            return self.sums[0](*fields)
        return self.sums[1](*fields, product.shift, *self._precision(product), count)

    def read_sums(
        self, sent: Any, S: Tensor | float, silent: Silent
    ) -> tuple[Gaussian, Gaussian | None, int]:
        """The change, the product and the number of its factors that an edge server has sent.

        A fixed S counted as 1 there, except in increments, which a client makes with it.
        """
        fixed, averages = self.kind == "fixed", isinstance(sent, self.sums[1])
        scale = S if fixed and silent == "participants" else 1.0
        change = Gaussian(times(scale, sent.shift), 0.0 if fixed else self._matrix(sent.precision))
        if not averages:
            return change, None, 0
        precision = sent.count * S if fixed else self._matrix(sent.product_precision)
        return change, Gaussian(times(scale, sent.product_shift), precision), int(sent.count)

    def _precision(self, q: Gaussian) -> tuple[Tensor, ...]:
        """The precision as a message's field has it."""
        if self.kind == "fixed":
            return ()
        precision = torch.as_tensor(q.precision)
        return (packed(precision) if self.kind == "full" else precision,)

    def _matrix(self, field: Tensor) -> Tensor:
        return unpacked(field) if self.kind == "full" else field


POINT = ExponentialFamily("fixed", PointDown, PointUp, PointIncrement, (PointSum, PointSums))
DIAGONAL = ExponentialFamily(
    "diagonal", DiagonalDown, DiagonalUp, DiagonalIncrement, (DiagonalSum, DiagonalSums)
)
FULL = ExponentialFamily("full", FullDown, FullUp, FullIncrement, (TriangleSum, TriangleSums))
Covariance = Annotated[
    Literal["diagonal", "full"],
    Meta(description="form of the Gaussians' precision: P numbers, or a P x P matrix"),
]
FixedPrecision = Annotated[
    Annotated[float, Meta(gt=0)] | Literal["curvature"],
    Meta(description="S: from the clients' curvature at the start, in a set-up, or this number everywhere"),
]


def gaussian(covariance: Covariance) -> ExponentialFamily:
    """The family with a learned precision of this form."""
    return FULL if covariance == "full" else DIAGONAL


MAX_FULL = 3000
"""The largest number of parameters of a full covariance."""


def check_covariance(params: int, covariance: Covariance, sibling: str) -> None:
    """Check that a model of `params` parameters is small enough for a covariance of this form.

    Raises:
        UsageError: for a full covariance of more than MAX_FULL parameters, naming the diagonal sibling.
    """
    if covariance == "full" and params > MAX_FULL:
        raise UsageError(
            f"a full covariance of P = {params:,} parameters is {2 * params * (params + 1):,} bytes per "
            f"client, round and direction; the limit is P = {MAX_FULL:,}. Use the diagonal sibling, "
            f"{sibling}, or a smaller model, such as --model logistic_bias"
        )
