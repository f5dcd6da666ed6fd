"""Offline Laplace - Liu & Zheng, Sec. 3.4 and 4.3, Eq. 14 (arXiv:2102.01936v1): the baseline of FOLA. It
computes the curvature once, after training.

    client:  theta_k <- training of  lbar_k + (lam/2) (theta - mu_S)' (P_S + gamma) (theta - mu_S)
             P_k     <- F_k, the mean squared gradient of all own examples at theta_k            (Eq. 14)
    server:  P_S  <- sum_k a_k P_k ;  mu_S <- (sum_k a_k (P_k + gamma) mu_k) / (P_S + gamma),  a_k = N_k / N
    init:    mu_S = the shared random start, P_S = 0

Near a client's optimum the gradients vanish, and each round uses only its own curvature. The accuracy
therefore goes up and down from round to round (the paper's Fig. 3). running_mean = true uses Eq. 17's mean
over rounds, P_k = (1/r) F_k + ((r-1)/r) P_S; FOLA uses this mean, too, and accumulates F_k during training.
protocols._gaussian_product has the server, and explains the units of P_S and the role of gamma.

Wire: 2P down, 2P up.

Local training is SGD by default, and nothing is carried over.

Differs: every P_k and P_S is sent. A round's product includes only the clients that take part.

References:
    Liu and Zheng 2021: https://arxiv.org/abs/2102.01936v1
    Liu et al. 2024: https://doi.org/10.1109/TPAMI.2023.3322743
    Daxberger et al. 2021: https://arxiv.org/abs/2106.14806
    docs/references/equations.md#offline-laplace
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import AnyShard, Task
from fedsim.learning.gaussian import Gaussian
from fedsim.learning.solvers.first_order import LocalTraining
from protocols._gaussian_product import (
    Aggregation,
    Down,
    Gamma,
    GaussianProduct,
    Lam,
    Posterior,
    running_mean,
)

RunningMean = Annotated[bool, Meta(description="P: Eq. 17's mean over rounds; false: of this round alone")]


@dataclass(frozen=True)
class LaplaceOffline(GaussianProduct):
    gamma: Gamma = 1e-8
    lam: Lam = 1.0
    aggregation: Aggregation = "product"
    running_mean: RunningMean = False
    posterior: Posterior = False
    local: LocalTraining = LocalTraining(optimiser="sgd", lr=0.1, clip=10.0)

    name: ClassVar[str] = "laplace_offline"
    paper: ClassVar[str] = "Liu & Zheng, Sec. 3.4, Eq. 14 (offline)"

    def train(self, down: Down, prior: Gaussian, shard: AnyShard, task: Task) -> tuple[Tensor, Tensor, float]:
        fit = task.minimise(shard, self.local, down.mean, penalties=(prior,))
        return fit.weights, shard.mean_fisher(fit.weights), fit.loss

    def precision(self, fisher: Tensor, down: Down, r: int) -> Tensor:
        return running_mean(fisher, down.curvature, r) if self.running_mean else fisher
