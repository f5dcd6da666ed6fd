"""IVON-ADMM - Moellenhoff et al. v2, Algorithms 1 and 2, App. D.4 (docs/references/equations.md#ivon-admm):
Bayesian-ADMM for diagonal Gaussians, the client's problem solved by IVON at the price of SGD.

    client:  (m_k, s_k) <- argmin E_q[l_k / tau + v_k . th - 1/2 th' diag(u_k) th] + rho KL(q || q_g)
             v_k <- v_k + gamma (s_k m_k - s_g m_g) ;   u_k <- u_k + gamma (s_k - s_g)
    server:  s_g     <- (1-a) mean s_k     + a (delta + sum_k u_k),         a = 1 / (1 + rho_server K)
             s_g m_g <- (1-a) mean s_k m_k + a sum_k v_k
    init:    v_k = 0, u_k = 0, m_g = 0, s_g = delta

    IVON (Algorithm 2) gets the mean loss, lambda = N_k / (rho tau), v = tau v_k / N_k, u = tau u_k / N_k

protocols._dual_rule with gamma separate from rho; rho_server = rho, unless given. The released code's gamma
is its damping times rho. With rho = 1, rho_server = 0 and gamma = damping this is IVON-PVI.

Wire: 2P down, 2P up. The server derives both dual steps from (m_k, s_k) and its own broadcast, where
Algorithm 1 as printed gathers m_k, v_k, s_k, u_k (4P). silent: as in bayes_admm.

Differs: the problem above is bounded below only where H_k - u_k + rho s_g > 0, and the released
configuration diverges on one of three seeds; with cap_dual the client step uses min(u_k, rho s_g), and v_k
follows so that the gradient at m_g is what it was. What was held is put back into q_k before it goes up, and
its precision is at least s_g / 10 (docs/decisions/009); the stored dual is unchanged.
dual_slack in metrics is the round's least rho s_g - u_k, capped the number of coordinates below 0.
IVON's h starts at h0 until something has been folded and at 0 (the precision at s_g) after that; momentum
and step count live with the client (released code). Training starts from ctx.start until something has
been folded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import AnyShard, Task, step_size
from fedsim.learning.gaussian import Gaussian
from fedsim.learning.solvers.ivon import IvonMoments, IvonTraining, ivon
from protocols._dual_rule import DualRule, Silent
from protocols._site_algorithm import Client, LocalResult, SiteAlgorithm
from protocols._site_messages import DIAGONAL, ExponentialFamily
from protocols.fedadmm import Rho


@dataclass(frozen=True)
class IvonADMM(SiteAlgorithm):
    delta: Annotated[float, Meta(gt=0)] = 1.0
    rho: Rho = 1.0
    gamma: Annotated[float, Meta(gt=0)] = 0.1
    rho_server: Annotated[float, Meta(ge=0)] | Literal["rho"] = "rho"
    tau: Annotated[float, Meta(gt=0)] = 0.1
    cap_dual: bool = True
    silent: Silent = "participants"
    local: IvonTraining = IvonTraining()

    name: ClassVar[str] = "ivon_admm"
    paper: ClassVar[str] = "Moellenhoff et al. v2, Algorithms 1 and 2"
    default_model: ClassVar[str] = "mlp_small"
    eval_samples: ClassVar[int] = 32

    @property
    def family(self) -> ExponentialFamily:
        return DIAGONAL

    def rule(self, sizes: tuple[int, ...], k: int = 0) -> DualRule:
        rho = step_size(self.rho, k, sizes)
        rho_server = rho if self.rho_server == "rho" else self.rho_server
        return DualRule(len(sizes), rho, self.gamma, rho_server, self.silent)

    def prior(self, like: Tensor) -> Gaussian:
        return DIAGONAL.isotropic(like, self.delta)

    def solve(
        self, client: Client, q: Gaussian, start: Tensor, started: bool, shard: AnyShard, task: Task
    ) -> LocalResult:
        rule = self.rule(task.sizes)
        return by_ivon(rule, client, q, start, started, shard, task, self.local, self.tau, self.cap_dual)


def by_ivon(
    rule: DualRule,
    client: Client,
    q: Gaussian,
    start: Tensor,
    started: bool,
    shard: AnyShard,
    task: Task,
    how: IvonTraining,
    tau: float,
    cap_dual: bool,
) -> LocalResult:
    """Line 4 of Algorithm 1: the client's problem in Algorithm 2's units (App. D.4), solved by IVON."""
    assert client.moments is None or isinstance(client.moments, IvonMoments)
    cavity = rule.clipped_cavity(q, client.dual.site)
    s_g = torch.as_tensor(q.precision)
    fit = ivon(
        shard,
        start,
        how=how,
        rng=task.rng,
        round=task.round,
        prior_mean=q.mean,
        prior_precision=s_g,
        ess=shard.size / (rule.rho * tau),
        dual=(q**rule.rho / cavity.factor if cap_dual else client.dual.site) ** (tau / shard.size),
        h0=None if started else how.h0,
        moments=client.moments,
    )
    local = Gaussian.at(fit.mean, fit.precision)
    if cap_dual:
        local = rule.restored(local, cavity, q, fit.moved)
    scalars = {"dual_slack": cavity.slack, "capped": float(cavity.capped)}
    return LocalResult(local, fit.loss, fit.moments, scalars)
