"""BregmanADMM - Wang & Banerjee 2014, as the baseline of Moellenhoff et al. (v2, App. C.2).
It is Bayesian-ADMM with a dual step in expectation parameters.

    client:  q_k <- argmin E_q[l_k + v_k . th - 1/2 th' V_k th] + rho KL(q || q_g)           (SUM loss)
             v_k <- v_k + c rho (mu1_k - mu1_g),        mu1 = m
             V_k <- V_k - 2 c rho (mu2_k - mu2_g),      mu2 = m m' + S^-1
    server:  as bayes_admm
    init:    v_k = 0, V_k = 0, q_g = N(0, I/delta)

The paper's rule is eta_k <- eta_k + rho (mu_k - mu_g). The factor -2 appears because the site
log t = v . th - th' V th / 2 has eta = (v, -V/2). With dual = release the step is that of the released code,
V_k + c rho (mu2_k - mu2_g), with another sign and factor. The option `damping` is c; the paper has c = 1. The
duals are not natural gradients, so one round is never exact.

Wire: 2P down, 2P up. covariance = full: P + P(P+1)/2 each way. A client that does not take part counts with
its t_k and the mean of this round's q_k. (The server could not derive the dual step from increments of z_k.)

Local training is VON, with L-BFGS steps of the mean. Nothing is carried over from task to task.

Differs: the default of damping is 0.1, because on digits q_g becomes improper with 1. Until the first server
update, local training starts from the shared random start. cap_dual is as in bayes_admm.

References:
    Wang and Banerjee 2014: https://arxiv.org/abs/1306.3203
    Möllenhoff et al. 2026: https://arxiv.org/abs/2506.13150
    docs/references/equations.md#bregmanadmm
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.hyperparameters import PriorPrecision
from fedsim.learning.gaussian import Gaussian, is_full
from protocols._local_solvers import VonTraining, by_von, check_samples
from protocols._site_algorithm import (
    At,
    CapDual,
    Covariance,
    LocalProblem,
    MeanFactor,
    Rho,
    SiteAlgorithm,
    SiteFit,
)


@dataclass(frozen=True)
class BregmanADMM(SiteAlgorithm):
    covariance: Covariance = "diagonal"
    delta: PriorPrecision = 1.0
    rho: Rho = 1.0
    damping: Annotated[float, Meta(gt=0, le=1, description="factor c of the dual step; 1 in the paper")] = 0.1
    dual: Annotated[Literal["paper", "release"], Meta(description="sign and factor of V_k's step")] = "paper"
    cap_dual: CapDual = True
    local: VonTraining = VonTraining()

    name: ClassVar[str] = "bregman_admm"
    paper: ClassVar[str] = "Wang & Banerjee 2014; Moellenhoff et al. v2, App. C.2"
    url: ClassVar[str] = "https://arxiv.org/abs/1306.3203"
    default_model: ClassVar[str] = "logistic_bias"
    eval_samples: ClassVar[int] = 32

    def check(self, params: int) -> None:
        check_samples(self.local.samples)

    def cavity(self, q_g: Gaussian, site: Gaussian, at: At) -> Gaussian:
        return q_g ** self.penalty(at) / site  # Eq. 15

    def dual_step(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        """Return the dual step c rho (mu_k - mu_g) as a factor (App. C.2)."""
        first, second = (a - b for a, b in zip(_expectations(q_k), _expectations(q_g), strict=True))
        scale = -2.0 if self.dual == "paper" else 1.0
        return Gaussian(first, scale * second) ** (self.damping * self.penalty(at))

    def server_step(self, prior: Gaussian, sites: Gaussian, mean_q: MeanFactor, at: At) -> Gaussian:
        rho, K = self.penalty(at), at.K
        return (prior * sites * mean_q ** (rho * K)) ** (1 / (1 + rho * K))  # Eq. 18-20

    def solve(self, problem: LocalProblem) -> SiteFit:
        rho, cavity = self.penalty(problem.at), self.cavity(problem.q, problem.site, problem.at)
        return by_von(problem, cavity, self.local, penalty=rho, cap_dual=self.cap_dual)


def _expectations(q: Gaussian) -> tuple[Tensor, Tensor]:
    """Return the expectation parameters E[th] and E[th th']; the latter is a diagonal unless q is full."""
    mean = q.mean
    if is_full(q.precision):
        return mean, torch.outer(mean, mean) + torch.linalg.inv(torch.as_tensor(q.precision))
    return mean, mean**2 + 1 / torch.as_tensor(q.precision)
