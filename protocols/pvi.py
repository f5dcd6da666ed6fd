"""PVI - partitioned variational inference (Ashman et al. 2022, arXiv:2202.12275), with damping (Swaroop et
al. 2025, Eq. 5-6; Möllenhoff et al. 2026 v2, App. C.3). It is Bayesian-ADMM without rho in front of the KL
and without the averaging at the server.

    client:  q_k <- argmin_q E_q[l_k + log t_k] + KL(q || q_g)                 (SUM loss)
             t_k <- t_k (q_k / q_g)^damping
    server:  q_g  = prior * prod_k t_k                                        over ALL clients
    init:    t_k = 1, q_g = N(0, I/delta)

This is protocols._dual_rule with rho = 1, gamma = damping, rho_server = 0. damping = 1 is PVI as published.
It diverges if the changes of the clients' sites add up instead of cancelling; papers that compare with PVI
use damping = 1/K.

Wire: 2P down, 2P up. covariance = full: P + P(P+1)/2 each way. The server derives the change of t_k from the
upload and its own broadcast. The product includes the latest t_k of clients that do not take part.

Local training is VON, with L-BFGS steps for the mean. Nothing is carried over from task to task.

Differs: VON, a natural-gradient method, solves the client's problem; Ashman et al. run Adam on (mean, log
variance). Both have the same solution q_k. Until the first server update, training starts from the shared
random start. The precisions of sites may be negative, as in the paper's text. The run stops if q_g is not a
distribution; the released code clamps the precision of q_g instead. cap_dual is as in bayes_admm. By default
damping counts the clients asked in a round, 1/|S|, as rho of fedlap does.

References:
    Ashman et al. 2022: https://arxiv.org/abs/2202.12275
    Bui et al. 2018: https://arxiv.org/abs/1811.11206
    Swaroop et al. 2025: https://arxiv.org/abs/2501.17325
    Möllenhoff et al. 2026: https://arxiv.org/abs/2506.13150
    docs/references/equations.md#pvi
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
    Damping,
    LocalProblem,
    MeanFactor,
    SiteAlgorithm,
    SiteFit,
)


@dataclass(frozen=True)
class PVI(SiteAlgorithm):
    covariance: Covariance = "diagonal"
    delta: PriorPrecision = 1.0
    damping: Damping = "1/|S|"
    cap_dual: CapDual = True
    local: VonTraining = VonTraining()

    name: ClassVar[str] = "pvi"
    paper: ClassVar[str] = "Ashman et al. 2022, Algorithm 1; Swaroop et al. 2025, Eq. 5-6"
    url: ClassVar[str] = "https://arxiv.org/abs/2202.12275"
    default_model: ClassVar[str] = "logistic_bias"
    averages: ClassVar[bool] = False
    eval_samples: ClassVar[int] = 32

    def check(self, params: int) -> None:
        check_samples(self.local.samples)

    def cavity(self, q_g: Gaussian, site: Gaussian, at: At) -> Gaussian:
        return q_g / site  # FedLap paper, Eq. 5

    def dual_step(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        return (q_k / q_g) ** at.value(self.damping)  # FedLap paper, Eq. 6

    def server_step(self, prior: Gaussian, sites: Gaussian, mean_q: MeanFactor, at: At) -> Gaussian:
        return prior * sites  # Ashman et al., Algorithm 1

    def solve(self, problem: LocalProblem) -> SiteFit:
        rho, cavity = self.penalty(problem.at), self.cavity(problem.q, problem.site, problem.at)
        return by_von(problem, cavity, self.local, penalty=rho, cap_dual=self.cap_dual)
