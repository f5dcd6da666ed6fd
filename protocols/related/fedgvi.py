"""FedGVI - Mildner, Hamelijnck, Giampouras, Damoulas 2025 (arXiv:2502.00846): PVI with a robust loss and a
Renyi divergence, for clients whose labels may be wrong. With loss = nll and alpha = 1 it is ivon_pvi.

    client:  q_k <- argmin E_q[L_k / tau] + D_alpha(q || q_g / t_k),           L_k the SUM of a robust loss
             t_k <- t_k (q_k / q_g)^damping
    server:  q_g  = prior * prod_k t_k                                         over ALL clients
    init:    t_k = 1, q_g = N(0, I/delta)

    D_alpha(q || p) = log( int q^alpha p^(1-alpha) ) / (alpha (alpha - 1)),    KL(q || p) for alpha -> 1
    gce             (1 - p_y^c) / c,   c = power; y the label of an example
    density_power   (1 - p_y^c) / c + (sum_j p_j^(1+c) - 1) / (1+c)            over all classes j
    nll             -log p_y, the limit of both as c falls to 0

This is protocols._dual_rule with rho = 1, gamma = damping, rho_server = 0. The server's divergence is the KL,
for which q_g is the product of the prior and all sites. The gradient of gce is p_y^c times that of nll, so
examples that the model does not fit have little influence. At the start the model fits no example, so
learning is slower. alpha > 1 makes q_k narrower. If q_k is much narrower than the cavity, the precision that
the data add is multiplied by alpha, and the cavity's gradient in the mean is divided by alpha.

Wire: 2P down, 2P up. The product also contains the last site of a client that does not take part.

Local training is IVON; each client keeps IVON's momentum and step count from round to round (`carry`).

Differs: IVON (fedsim.learning.solvers.ivon) solves the client's problem; the released code runs Adam on
(mean, log variance). Both have the same solution q_k. D_alpha may be infinite if q is wider than the cavity.
In that case the released code omits D_alpha; here D_alpha is computed as if both were equally wide. The
exponents of the released density-power loss differ from the paper's formula. train_loss is the robust loss.
The released runs have tau = 1 and, on FashionMNIST, alpha 2.5 with power 0.5 or 1. cap_dual, h0 and the
start of training are as in ivon_admm, damping as in pvi.

References:
    Mildner et al. 2025: https://arxiv.org/abs/2502.00846
    Ashman et al. 2022: https://arxiv.org/abs/2202.12275
    Shen et al. 2024: https://arxiv.org/abs/2402.17641
    docs/references/equations.md#fedgvi
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fedsim import Gaussian
from fedsim.hyperparameters import PriorPrecision, Tempering
from protocols._local_solvers import IvonTraining, LossName, by_ivon, robust_loss
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
class FedGVI(SiteAlgorithm):
    loss: Annotated[LossName, Meta(description="of an example: robust, or the likelihood's own")] = "gce"
    power: Annotated[float, Meta(gt=0, le=1, description="c of a robust loss; near 0 it is nll")] = 0.5
    alpha: Annotated[float, Meta(gt=0, description="of the Renyi divergence; 1: the KL divergence")] = 2.5
    delta: PriorPrecision = 1.0
    damping: Damping = "1/|S|"
    tau: Tempering = 0.1
    cap_dual: CapDual = True
    local: IvonTraining = IvonTraining()

    name: ClassVar[str] = "fedgvi"
    paper: ClassVar[str] = "Mildner et al. 2025, FedGVI"
    url: ClassVar[str] = "https://arxiv.org/abs/2502.00846"
    default_model: ClassVar[str] = "mlp_small"
    averages: ClassVar[bool] = False
    eval_samples: ClassVar[int] = 32

    def cavity(self, q_g: Gaussian, site: Gaussian, at: At) -> Gaussian:
        return q_g / site

    def dual_step(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        return (q_k / q_g) ** at.value(self.damping)

    def server_step(self, prior: Gaussian, sites: Gaussian, mean_q: MeanFactor, at: At) -> Gaussian:
        return prior * sites

    def solve(self, problem: LocalProblem) -> SiteFit:
        def cavity() -> Gaussian:
            return self.cavity(problem.q, problem.site, problem.at)

        return by_ivon(
            problem,
            cavity,
            self.local,
            penalty=self.penalty(problem.at),
            cap_dual=self.cap_dual,
            tau=self.tau,
            loss=robust_loss(self.loss, self.power),
            alpha=self.alpha,
        )
