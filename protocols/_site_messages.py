"""The exponential families and the messages of the ADMM and PVI algorithms.

    fixed      q = N(w, S^-1), S given: only means are sent            fedadmm, feddyn, ama, precond_admm
               scaled: every client has its own scalar S_k             fedadmm with rho_k
    diagonal   q = N(m, diag(s)^-1): mean and precision                ivon_admm, pvi, fedlap_cov, ...
    full       q = N(m, S^-1): mean and the triangle of S              bayes_admm, pvi, fedlap_cov, ...

A broadcast contains q_g. An upload contains q_k or, under silent = last, the natural parameters of the
increment of z_k. The precision of an increment may be negative.

An edge server (fedsim.tree) sums natural parameters, in float64:

    shift, precision                    the factor by which the uploads change the server's product
    product_shift, product_precision    prod q_k over the `count` uploads, for servers that average the q_k

A fixed precision is not sent; a scaled precision is sent as one number.
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import Exchange
from fedsim.learning.gaussian import Gaussian, identity
from fedsim.wire.gaussian_messages import Increment, Posterior, in_full
from fedsim.wire.schema import (
    Check,
    Count,
    Delta,
    FullSum,
    Least,
    Mean,
    Norm,
    Scalar,
    Sum,
    Total,
)
from protocols._dual_rule import Dual, Silent, residual


@dataclass(frozen=True)
class PointInfo:
    """Scalars of an upload. primal_residual: |w_k - w_g|."""

    train_loss: Scalar
    primal_residual: Norm


@dataclass(frozen=True)
class PosteriorInfo:
    """Scalars of an upload: PointInfo's, and slack and capped of protocols._dual_rule.ClippedCavity."""

    train_loss: Scalar
    primal_residual: Norm
    dual_slack: Least
    capped: Total


@dataclass(frozen=True)
class PointDown:
    """Broadcast of w_g."""

    mean: Mean


@dataclass(frozen=True)
class PointUp:
    """Upload of w_k."""

    mean: Mean
    info: PointInfo


@dataclass(frozen=True)
class PointIncrement:
    z_shift: Delta
    info: PointInfo


@dataclass(frozen=True)
class ScaledInfo:
    """Scalars of an upload: PointInfo's, and the number of epochs that the client trained."""

    train_loss: Scalar
    primal_residual: Norm
    epochs: Scalar


@dataclass(frozen=True)
class ScaledUp:
    """Upload of w_k."""

    mean: Mean
    info: ScaledInfo


@dataclass(frozen=True)
class ScaledIncrement:
    """Upload of the increment of z_k. z_precision: the change of the client's scalar precision."""

    z_shift: Delta
    z_precision: Check
    info: ScaledInfo


@dataclass(frozen=True)
class Down(Posterior):
    """Broadcast of q_g."""


@dataclass(frozen=True)
class Up(Posterior):
    """Upload of q_k."""

    info: PosteriorInfo


@dataclass(frozen=True)
class Change(Increment):
    """Upload of the increment of z_k."""

    info: PosteriorInfo


def _sums(*kinds: Any) -> tuple[type[Any], type[Any]]:
    """Create an edge server's messages, without and with prod q_k. kinds: of the shift and, if sent, of the
    precision."""
    change = [*zip(("shift", "precision"), kinds, strict=False)]
    product = [(f"product_{name}", kind) for name, kind in change]
    return (
        make_dataclass("SiteSum", change, frozen=True),
        make_dataclass("SiteSums", [*change, *product, ("count", Count)], frozen=True),
    )


@dataclass(frozen=True)
class ExponentialFamily:
    """An exponential family, with conversions between its natural parameters in float64 and its messages.

    The argument S of the methods is the precision of a `fixed` family; the other families ignore it.
    """

    kind: Literal["fixed", "diagonal", "full"]
    down: type[Any]
    up: type[Any]
    increment: type[Any]
    sums: tuple[type[Any], type[Any]]
    """The messages of an edge server: the change of prod t_k or z_k; the second also has prod q_k."""
    info: type[Any] = PosteriorInfo
    """The class of the scalars in an upload."""
    scaled: bool = False
    """True if every client has its own scalar S; increments then contain the change of S."""

    def exchange(self, silent: Silent = "participants", *, averages: bool) -> Exchange:
        """Return the exchange of a round. averages: True if the server uses the mean of the q_k."""
        up = self.up if silent == "participants" else self.increment
        return Exchange(self.down, up, self.sums[averages and silent == "participants"])

    def identity(self, like: Tensor, scale: float) -> Tensor:
        """Return scale * I as a learned precision, for vectors like `like` (P,)."""
        return identity(like, scale, full=self.kind == "full")

    def isotropic(self, like: Tensor, precision: float) -> Gaussian:
        """Return N(0, I/precision) for vectors like `like` (P,); if `precision` is 0, the factor 1."""
        zero = torch.zeros_like(like, dtype=torch.float64)
        return Gaussian(zero, precision if self.kind == "fixed" else self.identity(zero, precision))

    def project(self, merged: Gaussian, S: Tensor | float) -> Gaussian:
        """Replace the precision by S if the family has a fixed one; otherwise return `merged` itself."""
        return Gaussian.at(merged.mean, S) if self.kind == "fixed" else merged

    def broadcast(self, q: Gaussian) -> Any:
        """Return the broadcast of q_g = `q`."""
        return self.down(q.mean) if self.kind == "fixed" else self.down.at(q.mean, q.precision)

    def gaussian(self, message: Any, S: Tensor | float = 1.0) -> Gaussian:
        """Return the factor that a message contains: q_g, q_k, or the increment of z_k."""
        if self.kind != "fixed":
            return message.factor  # type: ignore[no-any-return]
        if isinstance(message, self.increment):
            return Gaussian(message.z_shift.double(), message.z_precision if self.scaled else 0.0)
        return Gaussian.at(message.mean, S)

    def upload(self, dual: Dual, sent: Gaussian, local: Gaussian, q: Gaussian, **scalars: float) -> Any:
        """Return the upload for q_k = `local`. sent: the increment of z_k if silent = last, else q_k."""
        info = self.info(primal_residual=residual(local, q), **scalars)
        if self.kind == "fixed":
            change = (sent.precision,) if self.scaled else ()
            return self.up(local.mean, info) if dual.z is None else self.increment(sent.shift, *change, info)
        if dual.z is None:
            return self.up.at(local.mean, local.precision, info)
        return self.increment.at(sent.shift, sent.precision, info)


POINT = ExponentialFamily("fixed", PointDown, PointUp, PointIncrement, _sums(Sum), PointInfo)
SCALED = ExponentialFamily(
    "fixed",
    PointDown,
    ScaledUp,
    ScaledIncrement,
    (_sums(Sum, Count)[0], POINT.sums[1]),
    ScaledInfo,
    scaled=True,
)
DIAGONAL = ExponentialFamily("diagonal", Down, Up, Change, _sums(Sum, Sum))
FULL = ExponentialFamily("full", in_full(Down), in_full(Up), in_full(Change), _sums(Sum, FullSum))
FixedPrecision = Annotated[
    Annotated[float, Meta(gt=0)] | Literal["curvature"],
    Meta(description="S: from the clients' curvature at the start, in a set-up, or this number everywhere"),
]
