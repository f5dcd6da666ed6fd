"""Preconditioned ADMM: Bayesian-ADMM with a fixed precision S (Moellenhoff et al. v2, Table 3, Eq. 54).

    client:  m_k <- argmin l_k(m) + v_k . m + (rho/2) ||m - m_g||_S^2        (SUM loss; E_q[l_k] ~ l_k(m))
             v_k <- v_k + rho S (m_k - m_g)
    server:  (delta I + rho K S) m_g = sum_k v_k + rho S sum_k m_k           prior N(0, I/delta)
    init:    v_k = 0, m_g = the shared random start
             S = (sum_k H_k + delta I) / K,  H_k: diagonal of the GGN of l_k at the start, or a given number

A set-up before round 1 computes S: clients send H_k, then the server sends S. The algorithm is fedadmm with
q = N(m, S^-1) instead of N(w, I); with preconditioner = 1 the two are the same.

Wire: P down, P up. Once: P down, P up (0 if S is a given number). The option `silent` is as in fedadmm.

Local training is Adam by default; each client keeps Adam's moments from round to round (option `carry`).

Differs: delta/K is added to the mean of the H_k, so S is positive where no client has curvature, and K S is
the precision of the Laplace posterior at the start. m_g starts at the network's random start.

References:
    Möllenhoff et al. 2026: https://arxiv.org/abs/2506.13150
    docs/references/equations.md#preconditioned-admm
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.algorithm import AnyShard, Arrival, Context, Exchange, Task
from fedsim.hyperparameters import PriorPrecision
from fedsim.learning.gaussian import Gaussian
from fedsim.wire.schema import Curvature, Precision
from protocols._local_solvers import LocalTraining, to_the_mode
from protocols._site_algorithm import (
    POINT,
    At,
    Client,
    Consensus,
    ExponentialFamily,
    FixedPrecision,
    LocalProblem,
    MeanFactor,
    Rho,
    SetUp,
    Silent,
    SiteAlgorithm,
    SiteFit,
)


@dataclass(frozen=True)
class CurvatureDown:
    """Set-up, first broadcast: empty, because every client knows the start."""


@dataclass(frozen=True)
class CurvatureUp:
    """Set-up, first upload: H_k."""

    curvature: Curvature


@dataclass(frozen=True)
class PreconditionerDown:
    """Set-up, second broadcast: S."""

    precision: Precision


@dataclass(frozen=True)
class PreconditionerUp:
    """Set-up, second upload: an empty acknowledgement of S."""


SetUpDown = CurvatureDown | PreconditionerDown
SetUpUp = CurvatureUp | PreconditionerUp


@dataclass(frozen=True)
class PrecondADMM(SiteAlgorithm):
    delta: PriorPrecision = 0.1
    rho: Rho = 1.0
    preconditioner: FixedPrecision = "curvature"
    silent: Silent = "participants"
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "precond_admm"
    paper: ClassVar[str] = "Moellenhoff et al. v2, Table 3 and Eq. 54"
    url: ClassVar[str] = "https://arxiv.org/abs/2506.13150"
    default_model: ClassVar[str] = "mlp_small"

    @property
    def family(self) -> ExponentialFamily:
        return POINT

    @property
    def set_up(self) -> SetUp[Consensus, Client] | None:
        return CurvatureSetUp(self) if self.preconditioner == "curvature" else None

    def origin(self, start: Tensor) -> Gaussian:
        """Return the initial q_g, with S = 1 until the set-up has computed S."""
        return Gaussian.at(start, 1.0 if self.preconditioner == "curvature" else self.preconditioner)

    def cavity(self, q_g: Gaussian, site: Gaussian, at: At) -> Gaussian:
        return q_g ** self.penalty(at) / site  # Eq. 15 with a fixed S

    def dual_step(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        return (q_k / q_g) ** self.penalty(at)  # Eq. 16-17

    def server_step(self, prior: Gaussian, sites: Gaussian, mean_q: MeanFactor, at: At) -> Gaussian:
        return prior * sites * mean_q ** (self.penalty(at) * at.K)  # Eq. 54

    def exponents(self, at: At) -> tuple[float, float]:
        return self.penalty(at), self.penalty(at)

    def solve(self, problem: LocalProblem) -> SiteFit:
        cavity = self.cavity(problem.q, problem.site, problem.at)
        return to_the_mode(problem, cavity, self.local, sum_loss=True)


@dataclass(frozen=True)
class CurvatureSetUp(SetUp[Consensus, Client]):
    """The set-up in round 0: clients send H_k, then the server sends S."""

    algorithm: PrecondADMM

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return (Exchange(CurvatureDown, CurvatureUp), Exchange(PreconditionerDown, PreconditionerUp))

    def broadcast(self, server: Consensus, ctx: Context) -> SetUpDown:
        if ctx.exchange == 1:
            return CurvatureDown()
        return PreconditionerDown(torch.as_tensor(server.q.precision))

    def client_update(
        self, client: Client, down: SetUpDown, shard: AnyShard, task: Task
    ) -> tuple[Client, SetUpUp]:
        if isinstance(down, CurvatureDown):
            return client, CurvatureUp(shard.curvature(task.start, "exact", task.rng))
        q = Gaussian.at(task.start, down.precision)
        dual = self.algorithm.initial_dual(q, task.at)
        return replace(client, dual=dual, precision=q.precision), PreconditionerUp()

    def server_update(
        self, server: Consensus, down: SetUpDown, arrivals: Iterable[Arrival], ctx: Context
    ) -> Consensus:
        if isinstance(down, PreconditionerDown):  # S as the clients received it
            return self.algorithm.consensus(Gaussian.at(ctx.start, down.precision), ctx.at())
        total = torch.full_like(ctx.start, self.algorithm.delta, dtype=torch.float64)
        for a in arrivals:
            total += a.up.curvature
        return self.algorithm.consensus(Gaussian.at(ctx.start, total / ctx.K), ctx.at())
