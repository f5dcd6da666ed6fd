"""The ADMM family in natural parameters: one rule that applies the formulas which every member states.

    client:  q_k  <- argmin_q  E_q[l_k] - E_q[log cavity] - rho H(q),     cavity = q_g^rho / t_k
             t_k  <- t_k (q_k / q_g)^gamma                             the dual step
             z_k   = q_k^rho_server t_k                                what the server needs of client k
    server:  q_g   ~  prior * prod_k z_k                               over ALL K clients

Natural parameters add where factors multiply, so with q = N(w, I), t_k = exp(v_k . w) and
gamma = rho_server = rho this is ADMM (v_k += rho (w_k - w_g), w_g = (sum v_k + rho sum w_k) /
(delta + rho K)); with a learned precision it is Bayesian-ADMM; rho_server = 0 leaves the averaging out
and gives AMA and, with rho = 1, PVI (docs/family.md has the table). Sources: Moellenhoff et al. v2,
Eq. 5-7, 15-20, 39-41, 53-54 (arXiv:2506.13150); docs/references/equations.md#one-family.

Every product is over all K clients, although only some take part in a round. The option `silent` says
what the others' q_k count as: `participants`, the average of this round's participants (as in FedDyn);
`last`, their last value, or q_g at the start for a client that has not been heard. Under `last` an upload
is the increment z_k' / z_k, because the server keeps only the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import OverK
from fedsim.errors import TaskError
from fedsim.learning.blocks import elementwise
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
"""The share of S_g that an upload's precision has at least: precisions that cross the wire are positive. It
acts where the client's literal problem has no minimum, and where its precision is smaller than that."""


@dataclass(frozen=True)
class Dual:
    """A client's part. site: t_k; z: z_k as the server knows it (silent = last), else None; float64."""

    site: Gaussian
    z: Gaussian | None = None

    @property
    def mean(self) -> Tensor:
        """The mean (P,) of q_k in z_k = q_k^rho_server t_k; only under silent = last."""
        assert self.z is not None
        return (self.z / self.site).mean


@dataclass(frozen=True)
class Consensus:
    """The server's part.

    q: the global posterior q_g. total: prod t_k over all K clients (silent = participants), or prod z_k
    (last); float64. dual_residual: of the last fold, for metrics. started: something has been folded.
    """

    q: Gaussian
    total: Gaussian
    dual_residual: float = 0.0
    started: bool = False


@dataclass(frozen=True)
class MeanFactor:
    """(prod q_k)^(1/n) over n participants, as a server's formula uses it.

    Its power multiplies by one exponent, power / n, and not by two. Under silent = last the q_k are part
    of the z_k, so that there is no product here and every power is the factor 1.
    """

    product: Gaussian | None
    count: float

    def __pow__(self, power: float) -> Gaussian:
        if self.product is None:
            return Gaussian(torch.zeros((), dtype=torch.float64), 0.0)
        return self.product ** (power / self.count)


@dataclass(frozen=True)
class DualRule:
    """A member's formulas for K clients, and what is done with them in every round.

    step: the change of t_k from (k, q_k, q_g). server_step: from the prior, prod t_k and the mean q_k.
    rho: the member's penalty, for metrics. exponents (silent = last): rho_server and gamma, of which z_k
    and the dual step are powers. fixed: the family's precision is fixed, so that sites are linear,
    log t_k = v_k . w.
    """

    K: int
    rho: float
    step: Callable[[int, Gaussian, Gaussian], Gaussian]
    server_step: Callable[[Gaussian, Gaussian, MeanFactor], Gaussian]
    silent: Silent = "participants"
    exponents: tuple[float, float] = (0.0, 0.0)
    fixed: bool = False

    def server_init(self, q: Gaussian) -> Consensus:
        """There is no site yet, and every client's q_k is q."""
        dual = self.client_init(q)
        return Consensus(q, (dual.z or dual.site) ** self.K)

    def client_init(self, q: Gaussian) -> Dual:
        one = self._linear(q / q)
        return Dual(one, q ** self.exponents[0] * one if self.silent == "last" else None)

    def dual_step(self, k: int, local: Gaussian, q: Gaussian) -> Gaussian:
        """The change of t_k."""
        return self._linear(self.step(k, local, q))

    def _linear(self, change: Gaussian) -> Gaussian:
        return Gaussian(change.shift, 0.0) if self.fixed else change

    def times_change(self, k: int, total: Gaussian, sent: Gaussian, q: Gaussian) -> Gaussian:
        """prod t_k, or prod z_k, with what an upload changes."""
        return total * (sent if self.silent == "last" else self.dual_step(k, sent, q))

    def upload(self, k: int, dual: Dual, local: Gaussian, q: Gaussian) -> Gaussian:
        """q_k itself, or the increment of the client's z_k."""
        if dual.z is None:
            return local
        return local ** self.exponents[0] * dual.site * self.dual_step(k, local, q) / dual.z

    def commit(self, k: int, dual: Dual, sent: Gaussian, q: Gaussian) -> Dual:
        """The dual step, from the upload as decoded.

        Under `last` the q_k that the server's new z_k stands for is solved for, so that site and z_k
        stay what the rule says under any codec.
        """
        if dual.z is None:
            return Dual(dual.site * self.dual_step(k, sent, q))
        rho_server, gamma = self.exponents
        z = dual.z * sent
        local = (z / dual.site * q**gamma) ** (1 / (rho_server + gamma))
        return Dual(dual.site * self.dual_step(k, local, q), z)

    def stepped(
        self,
        q: Gaussian,
        total: Gaussian,
        mean_q: MeanFactor,
        prior: Gaussian,
        project: Callable[[Gaussian], Gaussian] = lambda merged: merged,
    ) -> Consensus:
        """The server's step, project(server_step), after which q_g must be a distribution.

        q: the broadcast as decoded. total: prod t_k, or prod z_k, with what the uploads have changed. mean_q:
        the mean of their q_k. prior: the regulariser.
        """
        new = proper(project(self._merged(prior, total, mean_q)), "the global posterior q_g")
        length = float(torch.linalg.vector_norm(self._moved(new, q)))
        return Consensus(new, total, self.rho * math.sqrt(self.K) * length, started=True)

    @elementwise
    def _merged(self, prior: Gaussian, total: Gaussian, mean_q: MeanFactor) -> Gaussian:
        return self.server_step(prior, total, mean_q)

    @elementwise
    def _moved(self, new: Gaussian, q: Gaussian) -> Tensor:
        return times(new.precision, new.mean - q.mean)


@dataclass(frozen=True)
class ClippedCavity:
    """The factor against which a client's loss is balanced, with its dual held in bounds.

    correction: the factor taken out of the dual, factor = cavity * correction; slack: the least value (or
    eigenvalue) of rho S_g - V_k; capped: how many of them are negative.
    """

    factor: Gaussian
    correction: Gaussian
    slack: float
    capped: int


def clipped_cavity(
    cavity: Gaussian, q: Gaussian, site: Gaussian, rho: float, keep: float = 0.0
) -> ClippedCavity:
    """The cavity q^rho / site of a learned precision, with V_k held at (1 - keep) rho S_g where less than
    keep / 5 of rho S_g is left.

    The client's problem is bounded below only where H_k - V_k + rho S_g > 0, which nothing ensures
    (docs/references/curvature-and-solvers.md). Where V_k is held, v_k follows it, so that the cavity's
    gradient at m_g is what it was. The stored dual is unchanged; `restored` says what q_k then counts as.
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
    """The excess of a full V_k over its bound, (P, P) and positive semi-definite."""
    whole, V = rho * torch.as_tensor(q.precision), torch.as_tensor(site.precision)
    if Gaussian(q.shift, (1 - keep / 5) * whole - V).is_proper:
        return torch.zeros_like(V)
    ratios, axes = relative(V, whole)
    excess: Tensor = (axes * torch.where(ratios > 1 - keep / 5, ratios - (1 - keep), 0.0)) @ axes.mT
    return excess


def restored(local: Gaussian, cavity: ClippedCavity, q: Gaussian, rho: float, moved: float = 1.0) -> Gaussian:
    """q_k of the literal problem, from the solution `local` of the one with a clipped dual.

    The solution has rho S_k = H_k + rho S_g - V_k + correction, so a dual step from it would add the
    correction to V_k every round, without end. With the correction put back, V_k' = H_k at gamma = rho: the
    dual is minus the natural gradient again, and fixed points stay. moved: the share of the way to that
    solution which the solver's precision has gone (IVON's Hessian is a running mean). Where less than
    LEAST S_g would be left it counts as N(m_k, (LEAST S_g)^-1), and the dual shrinks: wherever the literal
    problem has no minimum, and also where it has one of such a small precision, clipped or not.
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
    """The client's primal residual |m_k - m_g|."""
    return float(torch.linalg.vector_norm(local.mean - q.mean))


def proper(q: Gaussian, what: str) -> Gaussian:
    """q, after a check that it is a distribution."""
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
        "damping, or raise delta"
    )
