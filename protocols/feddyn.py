"""FedDyn - Acar et al. 2021 (arXiv:2111.04263), as in the FedLap paper: the mean form of ADMM
with a penalty alpha_k for each client and a weight decay in the local objective.

    client:  w_k <- argmin lbar_k(w) + v_k . w + (alpha_k/2) ||w - w_g||^2 + (wd/2) ||w||^2   (MEAN loss)
             v_k <- v_k + alpha_k (w_k - w_g)
    server:  w_g <- mean of this round's w_k + (1/K) sum_k h_k,   h_k = v_k / c_k,   over ALL clients
    init:    v_k = 0, w_g = the shared random start

    alpha_rule   alpha_k               c_k       source
    constant     alpha                 alpha     Swaroop et al. Eq. 2; fits the published FashionMNIST numbers
    paper        (alpha/N_k) (N/K)     alpha_k   Acar et al. and their code: the limit is argmin sum_k l_k
    release      alpha N_k/N           alpha     bayes-admm as intended; fits its MNIST numbers to round 50

With alpha_rule = constant and no weight decay this is fedadmm with form = mean. In general FedDyn is
protocols._dual_rule with q = N(w, I), rho_server = 1 and sites t_k = exp(h_k . w); h_k has the units of w.

Wire: P down, P up. A client that does not take part counts with its h_k and the participants' mean w_k.

Local training is Adam by default; each client keeps Adam's moments from round to round (option `carry`).

Differs: the released code (bayes-admm) leaves the server's h at 0 in round 1, starts w_g at 0 and, by an
aliasing defect, gives every client the alpha_k of the last client. Here round 1 is like every other round.
prox_norm = unsquared uses (alpha_k/2) ||w - w_g||, as in the released code.

References:
    Acar et al. 2021: https://arxiv.org/abs/2111.04263
    Swaroop et al. 2025: https://arxiv.org/abs/2501.17325
    docs/references/equations.md#feddyn
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
    SiteAlgorithm,
    SiteFit,
)


@dataclass(frozen=True)
class FedDyn(SiteAlgorithm):
    alpha: Annotated[float, Meta(gt=0, description="penalty that alpha_rule scales for each client")] = 0.1
    alpha_rule: Annotated[
        Literal["constant", "paper", "release"],
        Meta(description="a client's penalty: alpha, (alpha/N_k) (N/K), or alpha N_k/N"),
    ] = "constant"
    weight_decay: Annotated[float, Meta(ge=0, description="(wd/2) |w|^2 in the local objective")] = 1e-4
    prox_norm: ProxNorm = "squared"
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "feddyn"
    paper: ClassVar[str] = "Acar et al. 2021; Swaroop et al. 2025, Eq. 2 and App. D"
    url: ClassVar[str] = "https://arxiv.org/abs/2111.04263"
    default_model: ClassVar[str] = "mlp_small"

    @property
    def family(self) -> ExponentialFamily:
        return POINT

    def prior(self, like: Tensor) -> Gaussian:
        return POINT.isotropic(like, 0.0)

    def origin(self, start: Tensor) -> Gaussian:
        return Gaussian.at(start, 1.0)

    def penalty(self, at: At) -> float:
        return self.alpha

    def penalties(self, at: At) -> tuple[float, float]:
        """Return alpha_k and c_k, according to the table in the module's docstring."""
        if self.alpha_rule == "paper":
            alpha_k = self.alpha / at.sizes[at.k] * sum(at.sizes) / at.K
            return alpha_k, alpha_k
        if self.alpha_rule == "release":
            return self.alpha * at.sizes[at.k] / sum(at.sizes), self.alpha
        return self.alpha, self.alpha

    def cavity(self, q_g: Gaussian, site: Gaussian, at: At) -> tuple[Penalty, ...]:
        """Return the cavity q_g^alpha_k * decay / v as two factors, with v = t_k^c_k = exp(v_k . w)."""
        alpha_k, c_k = self.penalties(at)
        v, decay = site**c_k, POINT.isotropic(q_g.shift, self.weight_decay)
        return decay / v, q_g**alpha_k if self.prox_norm == "squared" else Distance(q_g.mean, alpha_k)

    def dual_step(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        alpha_k, c_k = self.penalties(at)
        return (q_k / q_g) ** (alpha_k / c_k)  # h_k += (alpha_k / c_k) (w_k - w_g)

    def server_step(self, prior: Gaussian, sites: Gaussian, mean_q: MeanFactor, at: At) -> Gaussian:
        return prior * sites * mean_q**at.K  # w_g = mean of w_k + (1/K) sum h_k; the prior is flat

    def solve(self, problem: LocalProblem) -> SiteFit:
        cavity = self.cavity(problem.q, problem.site, problem.at)
        return to_the_mode(problem, cavity, self.local, sum_loss=False)
