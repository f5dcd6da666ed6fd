"""The ADMM family in natural parameters: one rule that applies the formulas of every member.

    client:  q_k  <- argmin_q  E_q[l_k] - E_q[log cavity] - rho H(q),     cavity = q_g^rho / t_k
             t_k  <- t_k (q_k / q_g)^gamma                             the dual step
             z_k   = q_k^rho_server t_k                                what the server needs of client k
    server:  q_g   ~  prior * prod_k z_k                               over ALL K clients

Multiplying factors adds their natural parameters. So with q = N(w, I), t_k = exp(v_k . w) and gamma =
rho_server = rho this is ADMM (v_k += rho (w_k - w_g), w_g = (sum v_k + rho sum w_k) / (delta + rho K)). With
a learned precision it is Bayesian-ADMM. rho_server = 0 removes the averaging and gives AMA and, with rho = 1,
PVI (docs/family.md has the table). Sources: Moellenhoff et al. v2, Eq. 5-7, 15-20, 39-41, 53-54
(arXiv:2506.13150); docs/references/equations.md#one-family.

Every product is over all K clients, although only some take part in a round. The option `silent` selects the
q_k of the other clients. `participants`: the average of this round's participants (as in FedDyn). `last`:
each client's last q_k, or the initial q_g before its first upload. Under `last` an upload is the increment
z_k' / z_k, because the server keeps only the product.
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
"""Lower bound of an uploaded precision, as a share of S_g: precisions in messages must be positive. It takes
effect where the client's unclipped problem has no minimum, or a solution with a smaller precision."""


@dataclass(frozen=True)
class Dual:
    """Dual state of a client, float64. site: t_k. z: z_k as the server knows it if silent = last, or None."""

    site: Gaussian
    z: Gaussian | None = None

    @property
    def mean(self) -> Tensor:
        """The mean (P,) of q_k in z_k = q_k^rho_server t_k; only under silent = last."""
        assert self.z is not None
        return (self.z / self.site).mean


@dataclass(frozen=True)
class Consensus:
    """State of the server.

    q: the global posterior q_g. total: prod t_k over all K clients (silent = participants), or prod z_k
    (last); float64. dual_residual: metric of the last server update. started: there was a server update.
    """

    q: Gaussian
    total: Gaussian
    dual_residual: float = 0.0
    started: bool = False


@dataclass(frozen=True)
class MeanFactor:
    """The factor (prod q_k)^(1/n) over n participants, as a server's formula uses it.

    The operator ** applies the single exponent power / n, not 1/n and then power. Under silent = last the z_k
    contain the q_k, so `product` is None and every power is the factor 1.
    """

    product: Gaussian | None
    count: float

    def __pow__(self, power: float) -> Gaussian:
        if self.product is None:
            return Gaussian(torch.zeros((), dtype=torch.float64), 0.0)
        return self.product ** (power / self.count)


@dataclass(frozen=True)
class DualRule:
    """A member's formulas for K clients, and the steps of a round that apply these formulas.

    step: computes the change of t_k from (k, q_k, q_g). server_step: computes q_g from the prior, prod t_k
    and the mean q_k. rho: the member's penalty, for metrics. exponents (silent = last): rho_server and gamma,
    the exponents in z_k and in the dual step. fixed: True if the family's precision is fixed; sites are then
    linear, log t_k = v_k . w.
    """

    K: int
    rho: float
    step: Callable[[int, Gaussian, Gaussian], Gaussian]
    server_step: Callable[[Gaussian, Gaussian, MeanFactor], Gaussian]
    silent: Silent = "participants"
    exponents: tuple[float, float] = (0.0, 0.0)
    fixed: bool = False

    def server_init(self, q: Gaussian) -> Consensus:
        """The initial state, in which every site is 1 and every client's q_k is q."""
        dual = self.client_init(q)
        return Consensus(q, (dual.z or dual.site) ** self.K)

    def client_init(self, q: Gaussian) -> Dual:
        one = self._linear(q / q)
        return Dual(one, q ** self.exponents[0] * one if self.silent == "last" else None)

    def dual_step(self, k: int, local: Gaussian, q: Gaussian) -> Gaussian:
        """The factor by which t_k changes."""
        return self._linear(self.step(k, local, q))

    def _linear(self, change: Gaussian) -> Gaussian:
        return Gaussian(change.shift, 0.0) if self.fixed else change

    def times_change(self, k: int, total: Gaussian, sent: Gaussian, q: Gaussian) -> Gaussian:
        """Multiply prod t_k, or prod z_k, by the change that an upload makes."""
        return total * (sent if self.silent == "last" else self.dual_step(k, sent, q))

    def upload(self, k: int, dual: Dual, local: Gaussian, q: Gaussian) -> Gaussian:
        """The factor to upload: q_k or, under silent = last, the increment of the client's z_k."""
        if dual.z is None:
            return local
        return local ** self.exponents[0] * dual.site * self.dual_step(k, local, q) / dual.z

    def commit(self, k: int, dual: Dual, sent: Gaussian, q: Gaussian) -> Dual:
        """Take the dual step with the decoded upload.

        Under `last`, the step uses the q_k that the server's new z_k implies. So site and z_k stay
        consistent under any codec.
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
        """Take the server's step, project(server_step), and check that the new q_g is a distribution.

        q: the decoded broadcast. total: prod t_k, or prod z_k, after the uploads. mean_q: the mean of the
        uploaded q_k. prior: the regulariser.
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
    """The prior factor of a client's problem, with the client's dual clipped.

    factor: cavity * correction. correction: the factor removed from the dual. slack: the smallest entry (or
    eigenvalue) of rho S_g - V_k. capped: the number of negative entries (or eigenvalues).
    """

    factor: Gaussian
    correction: Gaussian
    slack: float
    capped: int


def clipped_cavity(
    cavity: Gaussian, q: Gaussian, site: Gaussian, rho: float, keep: float = 0.0
) -> ClippedCavity:
    """Clip the dual in the cavity q^rho / site of a learned precision.

    Where rho S_g - V_k is less than keep / 5 of rho S_g, V_k is replaced by (1 - keep) rho S_g. The reason:
    the client's problem is bounded below only where H_k - V_k + rho S_g > 0, which is not guaranteed
    (docs/references/curvature-and-solvers.md). v_k is changed so that the cavity's gradient at m_g stays the
    same. The stored dual is unchanged; `restored` undoes the clipping in q_k.
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
    """Compute q_k of the unclipped problem from `local`, the solution of the problem with a clipped dual.

    `local` has rho S_k = H_k + rho S_g - V_k + correction, so its dual step would add the correction to V_k
    in every round. Without the correction, V_k' = H_k at gamma = rho: the dual is minus the natural gradient
    again, and fixed points do not change. moved: how far the solver's precision has moved towards that of
    the solution, as a fraction (IVON's Hessian is a running mean). Where the result would have a precision
    below LEAST S_g, q_k is replaced by N(m_k, (LEAST S_g)^-1), and the dual shrinks. This happens, clipped or
    not, where the unclipped problem has no minimum or a solution of such a small precision.
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
    """Return q after checking that it is a distribution."""
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
