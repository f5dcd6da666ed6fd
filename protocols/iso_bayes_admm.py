"""Isotropic Bayesian-ADMM - Moellenhoff et al. v2, Sec. 3.4, Eq. 21-22, 44-45 (arXiv:2506.13150):
Bayesian-ADMM with q = N(m, I/s), whose precision s is fixed, and with the expectation of the loss.

    client:  m_k <- argmin E_{N(m, I/s)}[l_k] + v_k . m + (rho s / 2) ||m - m_g||^2         (SUM loss)
             v_k <- v_k + rho s (m_k - m_g)                   so that v_k = -E_q[grad l_k] after an exact step
    server:  (delta + rho s K) m_g = sum_k v_k + rho s sum_k m_k                     prior N(0, I/delta)
    init:    v_k = 0, m_g = the shared random start

fedadmm (with rho s as its rho) and precond_admm (with S = s I) are the same algorithm with the delta method,
E_q[l_k] ~ l_k(m). The three are equal on quadratic losses only. On other losses, the limit here minimises
sum_k E_q[l_k] + (delta/2) ||m||^2. This loss, smoothed by a Gaussian, is related to sharpness-aware
minimisation (SAM). In the limit s -> infinity with rho s fixed, the algorithm is fedadmm.

The expectation is a mean over antithetic pairs m + eps, m - eps, drawn anew at every step. A step therefore
computes 2 * pairs gradients.

Local training is Adam by default; each client keeps Adam's moments from round to round (option `carry`).

Wire: P down, P up. The option `silent` is as in fedadmm.

Differs: the paper has s = 1; the default of 400 (a standard deviation of .05) suits a network's weights. m_g
starts at the network's random start. The model is evaluated at m_g alone.

References:
    Möllenhoff et al. 2026: https://arxiv.org/abs/2506.13150
    Foret et al. 2021: https://arxiv.org/abs/2010.01412
    docs/references/equations.md#isotropic-bayesian-admm
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta
from torch import Tensor

from fedsim.hyperparameters import PriorPrecision
from fedsim.learning.gaussian import Gaussian
from protocols._local_solvers import LocalTraining, Smoothing, to_the_mode
from protocols._site_algorithm import (
    POINT,
    At,
    ExponentialFamily,
    LocalProblem,
    MeanFactor,
    Rho,
    Silent,
    SiteAlgorithm,
    SiteFit,
)


@dataclass(frozen=True)
class IsoBayesADMM(SiteAlgorithm):
    delta: PriorPrecision = 0.1
    rho: Rho = 0.025
    precision: Annotated[float, Meta(gt=0, description="s, of every q = N(m, I/s)")] = 400.0
    pairs: Annotated[int, Meta(ge=1, description="antithetic pairs of draws of the weights per step")] = 1
    silent: Silent = "participants"
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "iso_bayes_admm"
    paper: ClassVar[str] = "Moellenhoff et al. v2, Sec. 3.4, Eq. 21-22"
    url: ClassVar[str] = "https://arxiv.org/abs/2506.13150"
    default_model: ClassVar[str] = "mlp_small"

    @property
    def family(self) -> ExponentialFamily:
        return POINT

    def origin(self, start: Tensor) -> Gaussian:
        return Gaussian.at(start, self.precision)

    def cavity(self, q_g: Gaussian, site: Gaussian, at: At) -> Gaussian:
        return q_g ** self.penalty(at) / site  # Eq. 15 with S = s I

    def dual_step(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        return (q_k / q_g) ** self.penalty(at)  # Eq. 16-17

    def server_step(self, prior: Gaussian, sites: Gaussian, mean_q: MeanFactor, at: At) -> Gaussian:
        return prior * sites * mean_q ** (self.penalty(at) * at.K)  # Eq. 54

    def exponents(self, at: At) -> tuple[float, float]:
        return self.penalty(at), self.penalty(at)

    def solve(self, problem: LocalProblem) -> SiteFit:
        cavity = self.cavity(problem.q, problem.site, problem.at)
        smoothing = Smoothing(self.precision, self.pairs)
        return to_the_mode(problem, cavity, self.local, sum_loss=True, smoothing=smoothing)
