"""FOLA - Liu & Zheng, Algorithm 1, Eq. 8-18 (arXiv:2102.01936v1): Gaussian product aggregation with a Laplace
approximation whose curvature is accumulated during training.

    client:  theta <- mu_S ; F <- 0
             every batch:  F     <- F + squared gradients
                           theta <- theta - lr ( g + lam (P_S + gamma) (theta - mu_S) )
             F_k <- F per example and epoch ;   P_k <- (1/r) F_k + ((r-1)/r) P_S          (Eq. 15, 17)
    server:  P_S  <- sum_k a_k P_k ;  mu_S <- (sum_k a_k (P_k + gamma) mu_k) / (P_S + gamma),  a_k = N_k / N
    init:    mu_S = the shared random start, P_S = 0 ;  r = 1, 2, ... counts folded rounds

protocols._gaussian_product has the server, and explains the units of P_S and the role of gamma.
squares = example uses the squares of per-example gradients, as in the paper; squares = batch uses |batch|
times the square of the batch's mean gradient, as in the released code.

Wire: 2P down, 2P up.

Local training is SGD by default, and nothing is carried over. fedcurv uses Adam by default.

Differs: every P_k and P_S is sent. A round's product includes only the clients that take part.

References:
    Liu and Zheng 2021: https://arxiv.org/abs/2102.01936v1
    Liu et al. 2024: https://doi.org/10.1109/TPAMI.2023.3322743
    docs/references/equations.md#gaussian-product-and-fola
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import AnyShard, Task
from fedsim.learning.curvature.fisher import squared_gradients
from fedsim.learning.gaussian import Gaussian
from fedsim.learning.shards import QuadraticShard
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

Squares = Annotated[
    Literal["example", "batch"], Meta(description="F: squares of single gradients, or batch means")
]


@dataclass(frozen=True)
class FOLA(GaussianProduct):
    gamma: Gamma = 1e-8
    lam: Lam = 1.0
    squares: Squares = "example"
    aggregation: Aggregation = "product"
    posterior: Posterior = False
    local: LocalTraining = LocalTraining(optimiser="sgd", lr=0.1, clip=10.0)

    name: ClassVar[str] = "fola"
    paper: ClassVar[str] = "Liu & Zheng, Algorithm 1"

    def train(self, down: Down, prior: Gaussian, shard: AnyShard, task: Task) -> tuple[Tensor, Tensor, float]:
        if isinstance(shard, QuadraticShard):
            fit = task.minimise(shard, self.local, down.mean, penalties=(prior,))
            return fit.weights, shard.mean_fisher(fit.weights), fit.loss
        gathered = torch.zeros_like(down.mean)

        def gather(inputs: Tensor, targets: Tensor) -> None:
            if self.squares == "batch":
                gathered.addcmul_(shard.net.grads, shard.net.grads, value=len(targets))
            else:
                gathered.add_(squared_gradients(shard.net, shard.net.weights, inputs, targets))

        fit = task.minimise(shard, self.local, down.mean, penalties=(prior,), watch=gather)
        return fit.weights, gathered / (shard.size * self.local.epochs), fit.loss

    def precision(self, fisher: Tensor, down: Down, r: int) -> Tensor:
        return running_mean(fisher, down.curvature, r)
