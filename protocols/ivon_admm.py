"""IVON-ADMM - Moellenhoff et al. v2, Algorithms 1 and 2, App. D.4:
Bayesian-ADMM for diagonal Gaussians. IVON solves the client's problem at the cost of SGD.

    client:  (m_k, s_k) <- argmin E_q[l_k / tau + v_k . th - 1/2 th' diag(u_k) th] + rho KL(q || q_g)
             v_k <- v_k + gamma (s_k m_k - s_g m_g) ;   u_k <- u_k + gamma (s_k - s_g)
    server:  s_g     <- (1-a) mean s_k     + a (delta + sum_k u_k),         a = 1 / (1 + rho_server K)
             s_g m_g <- (1-a) mean s_k m_k + a sum_k v_k
    init:    v_k = 0, u_k = 0, m_g = 0, s_g = delta

    IVON (Algorithm 2) gets the mean loss, lambda = N_k / (rho tau), v = tau v_k / N_k, u = tau u_k / N_k

This is protocols._dual_rule with a gamma that may differ from rho; rho_server = rho by default. In the
released code gamma is damping * rho, with damping 0.1 (0.001 on FashionMNIST). The defaults here also have
gamma = 0.1 rho (docs/decisions/022). They decrease as 1/K, because the KL is relative to q_g, which contains
the likelihoods of all K clients. With rho = 1, rho_server = 0 and gamma = damping this is IVON-PVI. With full
participation and gamma = 1/K, the natural parameters of q_g are the mean of the clients' for any rho_server,
so rho = 1 gives IVON-PVI: the released S5 configuration (rho = 1, gamma = 0.1, K = 10) has damping 1/K.

Wire: 2P down, 2P up. The server derives both dual steps from (m_k, s_k) and its own broadcast; Algorithm 1 as
printed gathers m_k, v_k, s_k, u_k (4P). The option `silent` is as in bayes_admm.

Local training is IVON; each client keeps IVON's momentum and step count from round to round (`carry`).

Differs: the problem above is bounded below only if H_k - u_k + rho s_g > 0, and the released configuration
diverges on one of three seeds. With cap_dual the client's problem has min(u_k, rho s_g) instead of u_k, and
v_k is changed so that the gradient at m_g stays the same. The clipping is undone in q_k before the upload,
and the uploaded precision is at least s_g / 10 (docs/decisions/009). The stored dual is unchanged. In the
metrics, dual_slack is the round's smallest rho s_g - u_k, and capped counts the coordinates at which it is
negative. IVON's momentum is divided by 1 - beta1^t, as in the package ivon-opt and the released code; line 6
of Algorithm 2 as printed does not do this. Until the first server update, training starts from the shared
random start and IVON's h from h0. After that, h starts at 0, so the precision starts at s_g.

References:
    Möllenhoff et al. 2026: https://arxiv.org/abs/2506.13150
    Möllenhoff et al. 2025: https://arxiv.org/abs/2506.13150v1
    Shen et al. 2024: https://arxiv.org/abs/2402.17641
    docs/references/equations.md#ivon-admm
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from fedsim.algorithm import OverK
from fedsim.hyperparameters import PriorPrecision, Tempering
from fedsim.learning.gaussian import Gaussian
from protocols._local_solvers import IvonTraining, by_ivon
from protocols._site_algorithm import (
    At,
    CapDual,
    LocalProblem,
    MeanFactor,
    Rho,
    Silent,
    SiteAlgorithm,
    SiteFit,
)


@dataclass(frozen=True)
class IvonADMM(SiteAlgorithm):
    delta: PriorPrecision = 1.0
    rho: Rho = "20/K"
    gamma: Annotated[OverK, Meta(description="factor of the dual step")] = "2/K"
    rho_server: Annotated[
        Annotated[float, Meta(ge=0)] | Literal["rho"],
        Meta(description="penalty in the server's average; 0: the server does not average"),
    ] = "rho"
    tau: Tempering = 0.1
    cap_dual: CapDual = True
    silent: Silent = "participants"
    local: IvonTraining = IvonTraining()

    name: ClassVar[str] = "ivon_admm"
    paper: ClassVar[str] = "Moellenhoff et al. v2, Algorithms 1 and 2"
    url: ClassVar[str] = "https://arxiv.org/abs/2506.13150"
    default_model: ClassVar[str] = "mlp_small"
    eval_samples: ClassVar[int] = 32

    def cavity(self, q_g: Gaussian, site: Gaussian, at: At) -> Gaussian:
        return q_g ** self.penalty(at) / site  # Algorithm 1, line 4

    def dual_step(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        return (q_k / q_g) ** at.value(self.gamma)  # Algorithm 1

    def server_step(self, prior: Gaussian, sites: Gaussian, mean_q: MeanFactor, at: At) -> Gaussian:
        rho, K = self.exponents(at)[0], at.K
        return (prior * sites * mean_q ** (rho * K)) ** (1 / (1 + rho * K))  # Algorithm 1

    def exponents(self, at: At) -> tuple[float, float]:
        rho_server = self.penalty(at) if self.rho_server == "rho" else self.rho_server
        return rho_server, at.value(self.gamma)

    def solve(self, problem: LocalProblem) -> SiteFit:
        rho = self.penalty(problem.at)

        def cavity() -> Gaussian:
            return self.cavity(problem.q, problem.site, problem.at)

        return by_ivon(problem, cavity, self.local, penalty=rho, cap_dual=self.cap_dual, tau=self.tau)
