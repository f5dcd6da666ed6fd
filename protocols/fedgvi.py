"""FedGVI - Mildner, Hamelijnck, Giampouras, Damoulas 2025 (arXiv:2502.00846): PVI with a robust loss and a
Renyi divergence, for clients whose labels may be wrong. With loss = nll and alpha = 1 it is ivon_pvi.

    client:  q_k <- argmin E_q[L_k / tau] + D_alpha(q || q_g / t_k),           L_k the SUM of a robust loss
             t_k <- t_k (q_k / q_g)^damping
    server:  q_g  = prior * prod_k t_k                                         over ALL clients
    init:    t_k = 1, q_g = N(0, I/delta)

    D_alpha(q || p) = log( int q^alpha p^(1-alpha) ) / (alpha (alpha - 1)),    the KL(q || p) for alpha -> 1
    gce             (1 - p_y^c) / c,   c = power; y the label of an example
    density_power   (1 - p_y^c) / c + (sum_j p_j^(1+c) - 1) / (1+c)            over all classes j
    nll             -log p_y, to which both tend as c falls to 0

protocols._dual_rule with rho = 1, gamma = damping, rho_server = 0: the server's divergence is the KL, under
which sites multiply. An example pulls under gce with p_y^c times the gradient of nll, so that the model gives
up what it cannot fit; at the start that is everything, and learning is slower. alpha > 1 makes q_k narrower:
one much narrower than the cavity has alpha times the data's precision, and the cavity pulls its mean with a
force divided by alpha.

Wire: 2P down, 2P up. A silent client counts with its site.

Local training is IVON, whose momentum and step count live with the client over rounds (carry).

Differs: the clients' problem is solved by IVON (fedsim.learning.solvers.ivon), where the released code runs
Adam on (mean, log variance); both end at the same q_k. Where q would be wider than the cavity, D_alpha may be
infinite: the released code leaves it out there, here it pulls as if they were equally wide. The released
density-power loss has other exponents than its formula. train_loss is the robust loss. The released runs have
tau = 1 and, on FashionMNIST, alpha 2.5 with power 0.5 or 1. cap_dual, h0 and the start of training: as in
ivon_admm.

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
from torch import Tensor

from fedsim.hyperparameters import PriorPrecision, Tempering
from fedsim.learning.gaussian import Gaussian
from protocols._local_solvers import IvonTraining, LossName, by_ivon, robust_loss
from protocols._site_algorithm import (
    DIAGONAL,
    At,
    CapDual,
    Damping,
    ExponentialFamily,
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
    damping: Damping = "1/K"
    tau: Tempering = 0.1
    cap_dual: CapDual = True
    local: IvonTraining = IvonTraining()

    name: ClassVar[str] = "fedgvi"
    paper: ClassVar[str] = "Mildner et al. 2025, FedGVI"
    url: ClassVar[str] = "https://arxiv.org/abs/2502.00846"
    default_model: ClassVar[str] = "mlp_small"
    averages: ClassVar[bool] = False
    eval_samples: ClassVar[int] = 32

    @property
    def family(self) -> ExponentialFamily:
        return DIAGONAL

    def prior(self, like: Tensor) -> Gaussian:
        return DIAGONAL.isotropic(like, self.delta)

    def penalty(self, at: At) -> float:
        return 1.0

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
