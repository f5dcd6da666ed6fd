"""The ADMM family in natural parameters: one rule, of which every member is a choice of constants.

    client:  q_k  <- argmin_q  E_q[l_k] - E_q[log pull] - rho H(q),     pull = q_g^rho / t_k
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
`last`, their last value, or q_g at the start for one that was never heard. Under `last` an upload is the
increment z_k' / z_k, because the server keeps only the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from fedsim.errors import TaskError
from fedsim.learning.gaussian import Gaussian, diagonal, is_full, relative, times

Silent = Literal["participants", "last"]

LEAST = 0.1
"""The share of S_g that an upload's precision has at least where the client's literal problem has no
minimum: precisions that cross the wire are positive."""


@dataclass(frozen=True)
class Dual:
    """A client's part. site: t_k; z: z_k as the server knows it (silent = last), else None; float64."""

    site: Gaussian
    z: Gaussian | None = None


@dataclass(frozen=True)
class Consensus:
    """The server's part.

    q: the global posterior q_g. total: prod t_k over all K clients (silent = participants), or prod z_k
    (last); float64. checks (K,): what every client's `sketch` should be. mismatch, dual_residual: of the
    last fold, for metrics. started: something has been folded.
    """

    q: Gaussian
    total: Gaussian
    checks: Tensor
    mismatch: float = 0.0
    dual_residual: float = 0.0
    started: bool = False


@dataclass(frozen=True)
class Cavity:
    """What a client's loss is balanced against, with its dual held in bounds.

    held: the factor taken out of the dual, factor = q_g^rho / t_k * held; slack: the least value (or
    eigenvalue) of rho S_g - V_k; capped: how many of them are negative.
    """

    factor: Gaussian
    correction: Gaussian
    slack: float
    capped: int


@dataclass(frozen=True)
class DualRule:
    """The constants of a member: K clients, rho, gamma (dual step), rho_server, silent.

    fixed: the precision of the family is fixed, so that sites are linear, log t_k = v_k . w.
    """

    K: int
    rho: float
    gamma: float
    rho_server: float
    silent: Silent = "participants"
    fixed: bool = False

    def server_init(self, q: Gaussian) -> Consensus:
        """No site yet, and q_k = q for everyone."""
        dual = self.client_init(q)
        total = (dual.z or dual.site) ** self.K
        checks = torch.full((self.K,), fingerprint(dual.z or dual.site), dtype=torch.float64)
        return Consensus(q, total, checks)

    def client_init(self, q: Gaussian) -> Dual:
        one = self.dual_step(q, q)
        return Dual(one, q**self.rho_server * one if self.silent == "last" else None)

    def cavity(self, q: Gaussian, site: Gaussian) -> Gaussian:
        """What the client's loss is balanced against, on the scale of the loss."""
        return q**self.rho / site

    def clipped_cavity(self, q: Gaussian, site: Gaussian, keep: float = 0.0) -> Cavity:
        """The pull of a learned precision with V_k held at (1 - keep) rho S_g where less than keep / 5
        of rho S_g is left.

        The client's problem is bounded below only where H_k - V_k + rho S_g > 0, which nothing ensures
        (docs/references/curvature-and-solvers.md). Where V_k is held, v_k follows it, so that
        the pull's gradient at m_g is what it was. The stored dual is unchanged; `put_back` says what q_k
        then counts as.
        """
        free = self.cavity(q, site)
        taken: Tensor
        if is_full(q.precision):
            slacks = torch.linalg.eigvalsh(torch.as_tensor(free.precision))
            slack, capped = float(slacks[0]), int((slacks < 0).sum())
            taken = self._excess(q, site, keep)
        else:
            room = torch.as_tensor(free.precision)
            whole = self.rho * torch.as_tensor(q.precision)
            taken = torch.where(room < keep / 5 * whole, keep * whole - room, 0.0)
            slack, capped = float(room.min()), int((room < 0).sum())
        correction = Gaussian(times(taken, q.mean), taken)
        return Cavity(free * correction, correction, slack, capped)

    def _excess(self, q: Gaussian, site: Gaussian, keep: float) -> Tensor:
        """What a full V_k has too much, (P, P) and positive semi-definite."""
        whole, V = self.rho * torch.as_tensor(q.precision), torch.as_tensor(site.precision)
        if Gaussian(q.shift, (1 - keep / 5) * whole - V).is_proper:
            return torch.zeros_like(V)
        ratios, axes = relative(V, whole)
        excess: Tensor = (axes * torch.where(ratios > 1 - keep / 5, ratios - (1 - keep), 0.0)) @ axes.mT
        return excess

    def restored(self, local: Gaussian, cavity: Cavity, q: Gaussian, moved: float = 1.0) -> Gaussian:
        """q_k of the literal problem, from the solution `local` of the one with a held dual.

        The solution has rho S_k = H_k + rho S_g - V_k + held, so a dual step from it would add
        what is held to V_k every round, without end. With held put back, V_k' = H_k at gamma = rho: the
        dual is minus the natural gradient again, and fixed points stay. moved: the share of the way to
        that solution which the solver's precision has gone (IVON's Hessian is a running mean).
        Where the literal problem has no minimum, that is where less than LEAST S_g would be left, it counts
        as N(m_k, (LEAST S_g)^-1): the dual then shrinks.
        """
        free = local / cavity.correction ** (moved / self.rho)
        floor = LEAST * torch.as_tensor(q.precision)
        if not is_full(floor):
            lost = torch.as_tensor(free.precision) < floor
            shift = torch.where(lost, floor * local.mean, free.shift)
            return Gaussian(shift, torch.where(lost, floor, torch.as_tensor(free.precision)))
        if Gaussian(free.shift, free.precision - floor).is_proper:
            return free
        ratios, axes = relative(torch.as_tensor(free.precision), floor)
        return Gaussian.at(local.mean, (axes * ratios.clamp(min=1)) @ axes.mT)

    def dual_step(self, local: Gaussian, q: Gaussian) -> Gaussian:
        """(q_k / q_g)^gamma."""
        change = (local / q) ** self.gamma
        return Gaussian(change.shift, 0.0) if self.fixed else change

    def upload(self, dual: Dual, local: Gaussian, q: Gaussian) -> Gaussian:
        """What a client has to tell: q_k itself, or the increment of its z_k."""
        if dual.z is None:
            return local
        return local**self.rho_server * dual.site * self.dual_step(local, q) / dual.z

    def commit(
        self, dual: Dual, sent: Gaussian, q: Gaussian, step: Callable[[Gaussian, Gaussian], Gaussian]
    ) -> Dual:
        """The dual step, from the upload as decoded; `step` is dual_step, or what a member has instead.

        Under `last` the q_k that the server's new z_k stands for is solved for, so that site and z_k
        stay what the rule says under any codec.
        """
        if dual.z is None:
            return Dual(dual.site * step(sent, q))
        z = dual.z * sent
        local = (z / dual.site * q**self.gamma) ** (1 / (self.rho_server + self.gamma))
        return Dual(dual.site * step(local, q), z)

    def fold(
        self,
        server: Consensus,
        q: Gaussian,
        prior: Gaussian,
        ups: Iterable[tuple[int, Gaussian, float]],
        family: Callable[[Gaussian], Gaussian],
        dual_step: Callable[[int, Gaussian, Gaussian], Gaussian],
    ) -> Consensus:
        """The server's step from uploads (client, q_k or increment, the client's own sketch).

        q is the broadcast as decoded; `family` turns prior * prod z_k into the next q_g; dual_step is
        that of (client, q_k, q_g).

        Raises:
            TaskError: if q_g is no distribution.
        """
        total, checks, mismatch = server.total, server.checks.clone(), 0.0
        locals_sum, count = None, 0
        for k, sent, check in ups:
            change = sent if self.silent == "last" else dual_step(k, sent, q)
            mismatch = max(mismatch, abs(check - float(checks[k])))
            checks[k] += fingerprint(change)
            total = total * change
            locals_sum = sent if locals_sum is None else locals_sum * sent
            count += 1
        merged = prior * total
        if self.silent == "participants" and locals_sum is not None:
            merged = merged * locals_sum ** (self.rho_server * self.K / count)
        new = proper(family(merged), "the global posterior q_g")
        moved = times(new.precision, new.mean - q.mean)
        scale = max(float(checks.abs().max()), 1e-300)
        return Consensus(
            new,
            total,
            checks,
            mismatch / scale,
            self.rho * math.sqrt(self.K) * float(torch.linalg.vector_norm(moved)),
            started=True,
        )

    def averaged(self, merged: Gaussian) -> Gaussian:
        """prior * prod z_k to the power 1 / (1 + rho_server K): a family whose precision is learned."""
        return merged ** (1 / (1 + self.rho_server * self.K))


def fingerprint_of(dual: Dual) -> float:
    """The sketch of what server and client both know of this client: z_k, or else t_k."""
    return fingerprint(dual.z or dual.site)


def residual(local: Gaussian, q: Gaussian) -> float:
    """The client's primal residual |m_k - m_g|."""
    return float(torch.linalg.vector_norm(local.mean - q.mean))


def fingerprint(factor: Gaussian) -> float:
    """A fixed linear projection of a factor to one number, computed on the CPU in float64.

    Sent with an upload (8 bytes) it lets the server see whether a client's dual is what it has summed.
    """
    shift = factor.shift.detach().cpu().double()
    projection = _projection(len(shift))
    value = float(shift @ projection)
    if is_full(factor.precision):
        return value + float(projection @ (torch.as_tensor(factor.precision).cpu().double() @ projection))
    return value + float(diagonal(factor.precision, shift) @ projection)


@lru_cache(maxsize=4)
def _projection(size: int) -> Tensor:
    """Weights in (-1/2, 1/2) without a pattern that a defect could cancel in."""
    steps = torch.arange(1, size + 1, dtype=torch.float64) * ((math.sqrt(5) - 1) / 2)
    return steps - steps.floor() - 0.5


def proper(q: Gaussian, what: str) -> Gaussian:
    """q.

    Raises:
        TaskError: if it is no distribution, saying where and what to do.
    """
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
