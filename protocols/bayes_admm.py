"""Bayesian-ADMM - Moellenhoff, Swaroop, Doshi-Velez, Khan, "Federated ADMM from Bayesian Duality", v2,
Eq. 15-20, 53-54, App. D.2 (arXiv:2506.13150). It is fedadmm with a learned precision.

    client:  (m_k, S_k) <- argmin E_q[l_k + v_k . th - 1/2 th' V_k th] + rho KL(q || q_g)     (SUM loss)
             v_k <- v_k + rho (S_k m_k - S_g m_g) ;   V_k <- V_k + rho (S_k - S_g)
    server:  S_g     <- (1-a) mean S_k     + a (delta I + sum_k V_k),       a = 1 / (1 + rho K)
             S_g m_g <- (1-a) mean S_k m_k + a sum_k v_k
    init:    v_k = 0, V_k = 0, q_g = N(0, I/delta)

In natural parameters: t_k <- t_k (q_k/q_g)^rho and q_g = (prior prod_k q_k^rho t_k)^a. This is
protocols._dual_rule with gamma = rho_server = rho. With quadratic losses, full covariance and rho = 1/K, one
round is exact (v2, Prop. D.1). VON solves the client's problem (Khan & Rue, Eq. 12).

Wire: P + P(P+1)/2 down, P + P(P+1)/2 up. covariance = diagonal: 2P each way.
With silent = participants, the server's mean of the q_k is over the participants of the round. With
silent = last, it is over all clients; a client that does not take part counts with its last q_k, or with the
prior before its first upload. Uploads are then increments of the natural parameters of z_k = q_k^rho t_k.

Local training is VON, with L-BFGS steps of the mean. Nothing is carried over from task to task.

Differs: until the first server update, training starts from the shared random start. With cap_dual, the
default, the client replaces V_k by .5 rho S_g where it exceeds .9 rho S_g, because the paper's problem may
have no minimum. It undoes this change in q_k before the upload (docs/decisions/009). The metrics dual_slack
and capped are the smallest eigenvalue of rho S_g - V_k and the number of its negative eigenvalues.

References:
    Möllenhoff et al. 2026: https://arxiv.org/abs/2506.13150
    Khan and Rue 2023: https://arxiv.org/abs/2107.04562
    docs/references/equations.md#bayesian-admm
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedsim.hyperparameters import PriorPrecision
from fedsim.learning.gaussian import Gaussian
from protocols._local_solvers import VonTraining, by_von, check_samples
from protocols._site_algorithm import (
    At,
    CapDual,
    Covariance,
    LocalProblem,
    MeanFactor,
    Rho,
    Silent,
    SiteAlgorithm,
    SiteFit,
)


@dataclass(frozen=True)
class BayesADMM(SiteAlgorithm):
    covariance: Covariance = "full"
    delta: PriorPrecision = 1.0
    rho: Rho = 1.0
    silent: Silent = "participants"
    cap_dual: CapDual = True
    local: VonTraining = VonTraining()

    name: ClassVar[str] = "bayes_admm"
    paper: ClassVar[str] = "Moellenhoff et al. v2, Eq. 15-20 and App. D.2"
    url: ClassVar[str] = "https://arxiv.org/abs/2506.13150"
    default_model: ClassVar[str] = "logistic_bias"
    eval_samples: ClassVar[int] = 32

    def check(self, params: int) -> None:
        check_samples(self.local.samples)

    def cavity(self, q_g: Gaussian, site: Gaussian, at: At) -> Gaussian:
        return q_g ** self.penalty(at) / site  # Eq. 15

    def dual_step(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        return (q_k / q_g) ** self.penalty(at)  # Eq. 16-17

    def server_step(self, prior: Gaussian, sites: Gaussian, mean_q: MeanFactor, at: At) -> Gaussian:
        rho, K = self.penalty(at), at.K
        return (prior * sites * mean_q ** (rho * K)) ** (1 / (1 + rho * K))  # Eq. 18-20

    def exponents(self, at: At) -> tuple[float, float]:
        return self.penalty(at), self.penalty(at)

    def solve(self, problem: LocalProblem) -> SiteFit:
        rho, cavity = self.penalty(problem.at), self.cavity(problem.q, problem.site, problem.at)
        return by_von(problem, cavity, self.local, penalty=rho, cap_dual=self.cap_dual)
