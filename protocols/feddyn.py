"""FedDyn - Acar et al. 2021, as in the FedLap paper (arXiv:2111.04263): ADMM in its mean form with a
penalty alpha_k per client and a local weight decay.

    client:  w_k <- argmin lbar_k(w) + v_k . w + (alpha_k/2) ||w - w_g||^2 + (wd/2) ||w||^2   (MEAN loss)
             v_k <- v_k + alpha_k (w_k - w_g)
    server:  w_g <- mean of this round's w_k + (1/K) sum_k h_k,   h_k = v_k / c_k,   over ALL clients
    init:    v_k = 0, w_g = the shared random start

    alpha_rule   alpha_k               c_k       source
    constant     alpha                 alpha     Swaroop et al. Eq. 2; fits the published FashionMNIST numbers
    paper        (alpha/N_k) (N/K)     alpha_k   Acar et al. and their code: the limit is argmin sum_k l_k
    release      alpha N_k/N           alpha     bayes-admm as it was meant

With alpha_rule = constant and no weight decay this is fedadmm with form = mean. protocols._dual_rule with
q = N(w, I), rho_server = 1 and sites in units of w: t_k = exp(h_k . w).

Wire: P down, P up. A silent client's w_k counts as the mean of the participants', its h_k as it is.

Differs: the released code (bayes-admm) leaves the server's h at 0 in round 1, starts w_g at 0, and gives
every client the alpha_k of the last one by an aliasing defect; here round 1 is like every other round.
Option prox_norm = unsquared: (alpha_k/2) ||w - w_g||, as in that code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import AnyShard, Task
from fedsim.learning.gaussian import Distance, Gaussian, Penalty
from fedsim.learning.solvers.first_order import LocalTraining
from protocols._dual_rule import DualRule
from protocols._site_algorithm import Client, LocalResult, SiteAlgorithm
from protocols._site_messages import POINT, ExponentialFamily
from protocols.fedadmm import to_the_mode


@dataclass(frozen=True)
class FedDyn(SiteAlgorithm):
    alpha: Annotated[float, Meta(gt=0)] = 0.1
    alpha_rule: Literal["constant", "paper", "release"] = "constant"
    weight_decay: Annotated[float, Meta(ge=0)] = 1e-4
    prox_norm: Literal["squared", "unsquared"] = "squared"
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "feddyn"
    paper: ClassVar[str] = "Acar et al. 2021; Swaroop et al. 2025, Eq. 2 and App. D"
    default_model: ClassVar[str] = "mlp_small"

    @property
    def family(self) -> ExponentialFamily:
        return POINT

    def penalty(self, k: int, sizes: tuple[int, ...]) -> tuple[float, float]:
        """alpha_k and c_k of the table above."""
        if self.alpha_rule == "paper":
            alpha_k = self.alpha / sizes[k] * sum(sizes) / len(sizes)
            return alpha_k, alpha_k
        if self.alpha_rule == "release":
            return self.alpha * sizes[k] / sum(sizes), self.alpha
        return self.alpha, self.alpha

    def rule(self, sizes: tuple[int, ...], k: int = 0) -> DualRule:
        """h_k += (alpha_k / c_k) (w_k - w_g)."""
        alpha_k, c_k = self.penalty(k, sizes)
        return DualRule(len(sizes), self.alpha, gamma=alpha_k / c_k, rho_server=1.0, fixed=True)

    def prior(self, like: Tensor) -> Gaussian:
        return POINT.isotropic(like, 0.0)

    def origin(self, start: Tensor) -> Gaussian:
        return Gaussian.at(start, 1.0)

    def solve(
        self, client: Client, q: Gaussian, start: Tensor, started: bool, shard: AnyShard, task: Task
    ) -> LocalResult:
        alpha_k, c_k = self.penalty(task.client, task.sizes)
        v, decay = client.dual.site**c_k, POINT.isotropic(start, self.weight_decay)
        prox: Penalty = q**alpha_k if self.prox_norm == "squared" else Distance(q.mean, alpha_k)
        return to_the_mode(shard, start, (decay / v, prox), self.local, client, task, sum_loss=False)
