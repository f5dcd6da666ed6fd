"""IVON-PVI - PVI for diagonal Gaussians with IVON as the local solver, Moellenhoff et al. v2, Table 5.
It is IVON-ADMM with alpha = 1 at the server and rho = 1 at the client.

    client:  (m_k, s_k) <- argmin E_q[l_k / tau + v_k . th - 1/2 th' diag(u_k) th] + KL(q || q_g)
             v_k <- v_k + damping (s_k m_k - s_g m_g) ;   u_k <- u_k + damping (s_k - s_g)
    server:  s_g <- delta + sum_k u_k ;   s_g m_g <- sum_k v_k                 over ALL clients
    init:    v_k = 0, u_k = 0, m_g = 0, s_g = delta

This is protocols._dual_rule with rho = 1, gamma = damping, rho_server = 0.

Wire: 2P down, 2P up. The sums include the last site of a client that does not take part.

Local training is IVON; each client keeps IVON's momentum and step count from round to round (`carry`).

Differs: the paper does not give its damping; the default here is 1/|S|, as in pvi. cap_dual, h0 and the start
of training are as in ivon_admm.

References:
    Möllenhoff et al. 2026: https://arxiv.org/abs/2506.13150
    Ashman et al. 2022: https://arxiv.org/abs/2202.12275
    Shen et al. 2024: https://arxiv.org/abs/2402.17641
    docs/references/equations.md#ivon-pvi
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedsim.hyperparameters import PriorPrecision, Tempering
from fedsim.learning.gaussian import Gaussian
from protocols._local_solvers import IvonTraining, by_ivon
from protocols._site_algorithm import (
    At,
    CapDual,
    Damping,
    LocalProblem,
    MeanFactor,
    SiteAlgorithm,
    SiteFit,
)


@dataclass(frozen=True)
class IvonPVI(SiteAlgorithm):
    delta: PriorPrecision = 1.0
    damping: Damping = "1/|S|"
    tau: Tempering = 0.1
    cap_dual: CapDual = True
    local: IvonTraining = IvonTraining()

    name: ClassVar[str] = "ivon_pvi"
    paper: ClassVar[str] = "Moellenhoff et al. v2, Table 5"
    url: ClassVar[str] = "https://arxiv.org/abs/2506.13150"
    default_model: ClassVar[str] = "mlp_small"
    averages: ClassVar[bool] = False
    eval_samples: ClassVar[int] = 32

    def cavity(self, q_g: Gaussian, site: Gaussian, at: At) -> Gaussian:
        return q_g / site  # Table 5

    def dual_step(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        return (q_k / q_g) ** at.value(self.damping)  # Table 5

    def server_step(self, prior: Gaussian, sites: Gaussian, mean_q: MeanFactor, at: At) -> Gaussian:
        return prior * sites  # Table 5, alpha = 1

    def solve(self, problem: LocalProblem) -> SiteFit:
        rho = self.penalty(problem.at)

        def cavity() -> Gaussian:
            return self.cavity(problem.q, problem.site, problem.at)

        return by_ivon(problem, cavity, self.local, penalty=rho, cap_dual=self.cap_dual, tau=self.tau)
