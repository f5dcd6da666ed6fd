"""FedADMM - both published forms (arXiv:2506.13150, Moellenhoff et al. v2, Eq. 5-7; Swaroop et al.
2025, Eq. 2).

    client:  w_k <- argmin l_k(w) + v_k . w + (rho/2) ||w - w_g||^2
             v_k <- v_k + rho (w_k - w_g)                         so that v_k = -grad l_k(w_k)
    server:  w_g <- (sum_k v_k + rho sum_k w_k) / (delta + rho K)
    init:    v_k = 0, w_g = the shared random start

form = regularised: l_k is the SUM loss and the server has the regulariser (delta/2) ||w||^2: the limit is
argmin sum_k l_k + (delta/2) ||w||^2. form = mean: l_k is the MEAN loss and there is no regulariser, so the
server is w_g = mean(w_k + v_k / rho), with rho for the paper's alpha: the limit is argmin sum_k lbar_k,
in which every client counts the same, whatever its N_k.

In natural parameters: q = N(w, I), site t_k = exp(v_k . w); protocols._dual_rule with gamma = rho_server =
rho. Bayesian-ADMM is the same three lines with a precision that is learned.

Wire: P down, P up. In v2, Sec. 1 and Fig. 1, clients send w_k and the gradient (2P); here the server
derives the change of v_k from w_k. silent = participants: w_k goes up, and the silent clients' w_k count as
the mean of this round's. silent = last: they count with their last w_k (the start, if never heard), and the
increment of z_k = v_k + rho w_k goes up.

Local training is Adam by default; each client keeps its moments from round to round (carry).

Differs: w_g starts at the network's random start, not at 0: a first prox centre of 0 would double the
weights in the first round. Option prox_norm = unsquared: (rho/2) ||w - w_g||, as in the released code.

References:
    Möllenhoff et al. 2026: https://arxiv.org/abs/2506.13150
    Swaroop et al. 2025: https://arxiv.org/abs/2501.17325
    Boyd et al. 2011: https://doi.org/10.1561/2200000016
    Gong et al. 2022: https://arxiv.org/abs/2204.03529
    Wang et al. 2022: https://arxiv.org/abs/2203.15104
    docs/references/equations.md#fedadmm
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta
from torch import Tensor

from fedsim.hyperparameters import ProxNorm
from fedsim.learning.gaussian import Distance, Gaussian, Penalty
from protocols._local_solvers import LocalTraining, to_the_mode
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
class FedADMM(SiteAlgorithm):
    form: Annotated[
        Literal["regularised", "mean"],
        Meta(description="summed losses and a regulariser, or mean losses: every client counts the same"),
    ] = "regularised"
    delta: Annotated[float, Meta(ge=0, description="regulariser (delta/2) |w|^2, of form regularised")] = 0.1
    rho: Rho = 10.0
    silent: Silent = "participants"
    prox_norm: ProxNorm = "squared"
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "fedadmm"
    paper: ClassVar[str] = "Moellenhoff et al. v2, Eq. 5-7; Swaroop et al. 2025, Eq. 2"
    url: ClassVar[str] = "https://arxiv.org/abs/2506.13150"
    default_model: ClassVar[str] = "mlp_small"

    @property
    def family(self) -> ExponentialFamily:
        return POINT

    def prior(self, like: Tensor) -> Gaussian:
        return POINT.isotropic(like, self.delta if self.form == "regularised" else 0.0)

    def origin(self, start: Tensor) -> Gaussian:
        return Gaussian.at(start, 1.0)

    def penalty(self, at: At) -> float:
        return at.value(self.rho)

    def cavity(self, q_g: Gaussian, site: Gaussian, at: At) -> tuple[Penalty, ...]:
        if self.prox_norm == "unsquared":
            return site**-1, Distance(q_g.mean, self.penalty(at))
        return (q_g ** self.penalty(at) / site,)  # Eq. 5

    def dual_step(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        return (q_k / q_g) ** self.penalty(at)  # Eq. 6

    def server_step(self, prior: Gaussian, sites: Gaussian, mean_q: MeanFactor, at: At) -> Gaussian:
        return prior * sites * mean_q ** (self.penalty(at) * at.K)  # Eq. 7

    def exponents(self, at: At) -> tuple[float, float]:
        return self.penalty(at), self.penalty(at)

    def solve(self, problem: LocalProblem) -> SiteFit:
        cavity = self.cavity(problem.q, problem.site, problem.at)
        return to_the_mode(problem, cavity, self.local, sum_loss=self.form == "regularised")
