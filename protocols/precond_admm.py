"""Preconditioned ADMM - Bayesian-ADMM with a fixed precision S (Moellenhoff et al. v2, Table 3, Eq. 15-17
and 54; docs/references/equations.md#preconditioned-admm).

    client:  m_k <- argmin l_k(m) + v_k . m + (rho/2) ||m - m_g||_S^2        (SUM loss; E_q[l_k] ~ l_k(m))
             v_k <- v_k + rho S (m_k - m_g)
    server:  (delta I + rho K S) m_g = sum_k v_k + rho S sum_k m_k           prior N(0, I/delta)
    init:    v_k = 0, m_g = the shared random start

    S = (sum_k H_k + delta I) / K,   H_k the diagonal of the GGN of l_k at the start, or a given number.

S is found in a set-up before round 1: H_k goes up, S comes down. fedadmm with q = N(m, S^-1) in the
place of N(w, I); with preconditioner = 1 the two are the same.

Wire: P down, P up. Once: P down, P up (none for a given number). silent: as in fedadmm.

Differs: delta/K is added to the mean of the H_k, so that S is positive where no client has curvature: K S
is then the precision of the Laplace posterior at the start. m_g starts at the network's random start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import AnyShard, Context, Exchange, Task, step_size
from fedsim.learning.gaussian import Gaussian
from fedsim.learning.solvers.first_order import LocalTraining
from fedsim.wire.schema import Curvature, Precision
from protocols._dual_rule import Consensus, DualRule, Silent
from protocols._site_algorithm import Client, LocalResult, SiteAlgorithm
from protocols._site_messages import POINT, ExponentialFamily
from protocols.fedadmm import Rho, to_the_mode


@dataclass(frozen=True)
class Ask:
    """Set-up, first exchange: everybody knows the start, so there is nothing to send."""


@dataclass(frozen=True)
class Found:
    curvature: Curvature


@dataclass(frozen=True)
class Fixed:
    """Set-up, second exchange: S."""

    precision: Precision


@dataclass(frozen=True)
class Noted:
    """The answer to Fixed."""


@dataclass(frozen=True)
class PrecondADMM(SiteAlgorithm):
    delta: Annotated[float, Meta(gt=0)] = 0.1
    rho: Rho = 1.0
    preconditioner: Annotated[float, Meta(gt=0)] | Literal["curvature"] = "curvature"
    silent: Silent = "participants"
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "precond_admm"
    paper: ClassVar[str] = "Moellenhoff et al. v2, Table 3 and Eq. 54"
    default_model: ClassVar[str] = "mlp_small"

    @property
    def setup(self) -> tuple[Exchange, ...]:
        return (Exchange(Ask, Found), Exchange(Fixed, Noted)) if self.preconditioner == "curvature" else ()

    @property
    def family(self) -> ExponentialFamily:
        return POINT

    def rule(self, sizes: tuple[int, ...], k: int = 0) -> DualRule:
        rho = step_size(self.rho, k, sizes)
        return DualRule(len(sizes), rho, gamma=rho, rho_server=rho, silent=self.silent, fixed=True)

    def prior(self, like: Tensor) -> Gaussian:
        return POINT.isotropic(like, self.delta)

    def origin(self, start: Tensor) -> Gaussian:
        """With S = 1 until the set-up has found it."""
        return Gaussian.at(start, 1.0 if self.preconditioner == "curvature" else self.preconditioner)

    def solve(
        self, client: Client, q: Gaussian, start: Tensor, started: bool, shard: AnyShard, task: Task
    ) -> LocalResult:
        cavity = self.rule(task.sizes).cavity(q, client.dual.site)
        return to_the_mode(shard, start, (cavity,), self.local, client, task, sum_loss=True)

    # ---- the set-up, round 0

    def broadcast(self, server: Consensus, ctx: Context) -> Any:
        if ctx.round:
            return super().broadcast(server, ctx)
        return Ask() if ctx.exchange == 1 else Fixed(torch.as_tensor(server.q.precision))

    def client_update(self, client: Client, down: Any, shard: AnyShard, task: Task) -> tuple[Client, Any]:
        if isinstance(down, Ask):
            return client, Found(shard.curvature(task.start, "exact", task.rng))
        if isinstance(down, Fixed):
            q = Gaussian.at(task.start, down.precision)
            return replace(client, dual=self.rule(task.sizes).client_init(q), precision=q.precision), Noted()
        return super().client_update(client, down, shard, task)

    def client_commit(self, client: Client, down: Any, up: Any, task: Task) -> Client:
        return super().client_commit(client, down, up, task) if task.round else client

    def server_update(
        self, server: Consensus, down: Any, ups: Iterable[tuple[int, Any]], ctx: Context
    ) -> Consensus:
        if isinstance(down, Ask):
            total = torch.full_like(ctx.start, self.delta, dtype=torch.float64)
            for _, up in ups:
                total += up.curvature
            return self.rule(ctx.sizes).server_init(Gaussian.at(ctx.start, total / ctx.K))
        if isinstance(down, Fixed):  # S as everybody got it
            return self.rule(ctx.sizes).server_init(Gaussian.at(ctx.start, down.precision))
        return super().server_update(server, down, ups, ctx)
