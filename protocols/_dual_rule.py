"""The update rule that all algorithms of the ADMM family share, in natural parameters.

    client:  q_k  <- argmin_q  E_q[l_k] - E_q[log cavity] - rho H(q),     cavity = q_g^rho / t_k
             t_k  <- t_k (q_k / q_g)^gamma                             the dual step
             z_k   = q_k^rho_server t_k                                what the server needs of client k
    server:  q_g   ~  prior * prod_k z_k                               over ALL K clients

The site t_k is client k's dual, written as a Gaussian factor; H is the entropy. To multiply factors, add
their natural parameters. With q = N(w, I), t_k = exp(v_k . w) and gamma = rho_server = rho the rule is ADMM:
v_k += rho (w_k - w_g), w_g = (sum v_k + rho sum w_k) / (delta + rho K). With a learned precision it is
Bayesian-ADMM. With rho_server = 0 the server does not average the q_k: this is AMA or, with a learned
precision and rho = 1, PVI. docs/family.md lists all members. Sources: Moellenhoff et al. v2, Eq. 5-7, 15-20,
39-41, 53-54 (arXiv:2506.13150); docs/references/equations.md#one-family.

Every product is over all K clients, also if only some take part in a round. The option `silent` defines q_k
for the other clients. `participants`: the mean q_k of this round's participants, as in FedDyn. `last`: the
client's last q_k, or the initial q_g before its first upload (protocols._last). A member gives its formulas
to protocols._site_algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import OverK
from fedsim.errors import TaskError
from fedsim.learning.gaussian import Gaussian, is_full, relative, times

Silent = Annotated[
    Literal["participants", "last"],
    Meta(description="what q_k of a client outside the round counts as: the participants' mean, or its last"),
]
Rho = Annotated[
    OverK, Meta(description="penalty of all clients: weight of the distance to the global posterior")
]
Damping = Annotated[
    Annotated[float, Meta(gt=0, le=1)] | Literal["1/K", "1/|S|"],
    Meta(description="exponent of the dual step: t_k <- t_k (q_k / q_g)^damping; |S|: clients asked"),
]
CapDual = Annotated[
    bool,
    Meta(description="clip a client's dual where its problem would have no minimum, and add it to q_k again"),
]

LEAST = 0.1
"""Lower bound of an uploaded precision, as a fraction of S_g; precisions in messages must be positive. It
applies where the client's unclipped problem has no minimum, or has a solution with a smaller precision."""


@dataclass(frozen=True)
class Dual:
    """Dual state of a client, float64. site: t_k. z: the server's z_k if silent = last, else None."""

    site: Gaussian
    z: Gaussian | None = None

    @property
    def mean(self) -> Tensor:
        """The mean (P,) of the client's last q_k, from z_k = q_k^rho_server t_k; only under silent = last."""
        assert self.z is not None
        return (self.z / self.site).mean


@dataclass(frozen=True)
class Consensus:
    """State of the server.

    q: the global posterior q_g. total: prod t_k over all K clients or, under silent = last, prod z_k;
    float64. dual_residual: that of the last server update. started: True after the first server update.
    """

    q: Gaussian
    total: Gaussian
    dual_residual: float = 0.0
    started: bool = False


@dataclass(frozen=True)
class MeanFactor:
    """The geometric mean (prod q_k)^(1/n) of the uploads of n = `count` participants, for server_step.

    The operator ** raises `product` to power / n in one step. Under silent = last the server's total already
    contains the q_k; `product` is then None, and every power is the factor 1.
    """

    product: Gaussian | None
    count: float

    def __pow__(self, power: float) -> Gaussian:
        if self.product is None:
            return Gaussian(torch.zeros((), dtype=torch.float64), 0.0)
        return self.product ** (power / self.count)


@dataclass(frozen=True)
class ClippedCavity:
    """The prior factor of a client's problem with a clipped dual.

    factor: cavity * correction. correction: the factor that clipping removes from the dual. slack: the
    smallest entry (or eigenvalue) of rho S_g - V_k. capped: the number of its negative entries (eigenvalues).
    """

    factor: Gaussian
    correction: Gaussian
    slack: float
    capped: int


def clipped_cavity(
    cavity: Gaussian, q: Gaussian, site: Gaussian, rho: float, keep: float = 0.0
) -> ClippedCavity:
    """Return the cavity q^rho / site with a clipped dual, for a learned precision.

    The client's problem is bounded below only if H_k - V_k + rho S_g > 0, which is not guaranteed
    (docs/references/curvature-and-solvers.md). Where rho S_g - V_k < (keep / 5) rho S_g, V_k is therefore
    replaced by (1 - keep) rho S_g, and v_k is changed so that the cavity's gradient at m_g stays the same.
    The client's stored dual does not change; `restored` undoes the clipping in q_k.
    """
    taken: Tensor
    if is_full(q.precision):
        slacks = torch.linalg.eigvalsh(torch.as_tensor(cavity.precision))
        slack, capped = float(slacks[0]), int((slacks < 0).sum())
        taken = _excess(q, site, rho, keep)
    else:
        room = torch.as_tensor(cavity.precision)
        whole = rho * torch.as_tensor(q.precision)
        taken = torch.where(room < keep / 5 * whole, keep * whole - room, 0.0)
        slack, capped = float(room.min()), int((room < 0).sum())
    correction = Gaussian(times(taken, q.mean), taken)
    return ClippedCavity(cavity * correction, correction, slack, capped)


def _excess(q: Gaussian, site: Gaussian, rho: float, keep: float) -> Tensor:
    """Return the part of a full V_k that clipping removes, (P, P), positive semi-definite."""
    whole, V = rho * torch.as_tensor(q.precision), torch.as_tensor(site.precision)
    if Gaussian(q.shift, (1 - keep / 5) * whole - V).is_proper:
        return torch.zeros_like(V)
    ratios, axes = relative(V, whole)
    excess: Tensor = (axes * torch.where(ratios > 1 - keep / 5, ratios - (1 - keep), 0.0)) @ axes.mT
    return excess


def restored(local: Gaussian, cavity: ClippedCavity, q: Gaussian, rho: float, moved: float = 1.0) -> Gaussian:
    """Return q_k of the unclipped problem, given the solution `local` of the problem with a clipped dual.

    `local` has the precision S_k with rho S_k = H_k + rho S_g - V_k + correction. Its dual step would add the
    correction to V_k in every round, so the correction is divided out. For gamma = rho the new V_k is then
    H_k: the dual is minus the natural gradient, and clipping does not change the fixed points. moved: the
    fraction of the way to its solution that the solver's precision has moved; it is below 1 for IVON, whose
    Hessian is a running mean. Where the resulting precision is below LEAST S_g, q_k is replaced by
    N(m_k, (LEAST S_g)^-1), which shrinks the dual. This can also happen where nothing was clipped.
    """
    free = local / cavity.correction ** (moved / rho)
    floor = LEAST * torch.as_tensor(q.precision)
    if not is_full(floor):
        lost = torch.as_tensor(free.precision) < floor
        shift = torch.where(lost, floor * local.mean, free.shift)
        return Gaussian(shift, torch.where(lost, floor, torch.as_tensor(free.precision)))
    if Gaussian(free.shift, free.precision - floor).is_proper:
        return free
    ratios, axes = relative(torch.as_tensor(free.precision), floor)
    return Gaussian.at(local.mean, (axes * ratios.clamp(min=1)) @ axes.mT)


def residual(local: Gaussian, q: Gaussian) -> float:
    """Return the client's primal residual |m_k - m_g|."""
    return float(torch.linalg.vector_norm(local.mean - q.mean))


def proper(q: Gaussian, what: str) -> Gaussian:
    """Return q if it is a distribution, else raise a TaskError. what: the name of q in the message."""
    precision = torch.as_tensor(q.precision)
    lost = int((~torch.isfinite(q.shift)).sum()) + int((~torch.isfinite(precision)).sum())
    if lost:
        raise TaskError(
            f"{what} has {lost} values that are not finite: the iteration diverges. Take smaller steps: "
            "lower gamma, damping or lr; in ama lower rho, elsewhere raise it"
        )
    if q.is_proper:
        return q
    if is_full(precision):
        where = "is not positive definite"
    else:
        bad, least = int((precision <= 0).sum()), float(precision.min())
        where = f"is not positive in {bad} of {precision.numel()} entries (smallest {least:g})"
    raise TaskError(
        f"the precision of {what} {where}. The duals have outgrown the prior: raise rho, lower gamma or "
        "damping, or raise delta; or a codec of a precision has too large a step"
    )
