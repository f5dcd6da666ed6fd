"""FOLA and its offline variant - Liu & Zheng, Algorithm 1, Eq. 8-18 (arXiv:2102.01936v1): Gaussian product
aggregation with a Laplace approximation whose curvature is gathered during training.

    client:  theta <- mu_S ; F <- 0
             every batch:  F     <- F + squared gradients
                           theta <- theta - lr ( g + lam (P_S + gamma) (theta - mu_S) )
             F_k <- F per example and epoch ;   P_k <- (1/r) F_k + ((r-1)/r) P_S          (Eq. 15, 17)
    server:  P_S  <- sum_k a_k P_k ;  mu_S <- (sum_k a_k (P_k + gamma) mu_k) / (P_S + gamma),  a_k = N_k / N
    init:    mu_S = the shared random start, P_S = 0 ;  r = 1, 2, ... counts folded rounds

The precision of q_S is P_S + gamma: Eq. 18 has gamma I, which Eq. 17 does not produce, so it is added where
the precision is used. With gamma > 0 the weighted mean is defined where all P_k vanish, and there it is the
plain one (the released code shrinks such weights towards 0 by an eps in the denominator only).
squares = example: squares of per-example gradients (the paper); batch: |batch| times the square of the batch
mean's (the released code). aggregation = mixture: moments of the mixture sum_k a_k N(mu_k, (P_k + gamma)^-1)
(Eq. 5-6), for comparison. laplace_offline has F once, at the end of training, over all own examples.

Wire: 2P down, 2P up.

Local training is SGD by default, and nothing is carried over. fedcurv has Adam.

Differs: all P cross the wire. Silent clients do not count in a round's product.

References:
    Liu and Zheng 2021: https://arxiv.org/abs/2102.01936v1
    Liu et al. 2024: https://doi.org/10.1109/TPAMI.2023.3322743
    Daxberger et al. 2021: https://arxiv.org/abs/2106.14806
    docs/references/equations.md#gaussian-product-and-fola
    docs/references/equations.md#offline-laplace
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Context, Task
from fedsim.learning.curvature.fisher import mean_fisher, squared_gradients
from fedsim.learning.gaussian import Gaussian, Point
from fedsim.learning.shards import QuadraticShard
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.wire.schema import Curvature, Mean, Scalar

Aggregation = Annotated[Literal["product", "mixture"], Meta(description="of the clients' Gaussians")]
Squares = Annotated[
    Literal["example", "batch"], Meta(description="F: squares of single gradients, or batch means")
]
Gamma = Annotated[float, Meta(gt=0, description="precision that is added to every P")]
Lam = Annotated[float, Meta(ge=0, description="weight of the prior in the local objective")]


@dataclass(frozen=True)
class Server:
    """mean: mu_S; curvature: P_S without gamma; (P,) float64; folds: rounds folded."""

    mean: Tensor
    curvature: Tensor
    folds: int = 0


@dataclass(frozen=True)
class Client:
    """Stateless."""


@dataclass(frozen=True)
class Down:
    mean: Mean
    curvature: Curvature


@dataclass(frozen=True)
class Up:
    mean: Mean
    curvature: Curvature
    train_loss: Scalar


class _Product(Algorithm[Server, Client, Down, Up]):
    """The messages and the server that both share."""

    gamma: float
    lam: float
    aggregation: Aggregation
    local: LocalTraining

    default_model: ClassVar[str] = "mlp_small"

    def server_init(self, ctx: Context) -> Server:
        return Server(ctx.start.double(), torch.zeros_like(ctx.start, dtype=torch.float64))

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client()

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(server.mean, server.curvature)

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        prior = Gaussian.at(down.mean, self.lam * (down.curvature.double() + self.gamma))
        weights, fisher, loss = self.train(down, prior, shard, task)
        r = task.folds + 1
        return client, Up(weights, fisher / r + (r - 1) / r * down.curvature, loss)

    @abstractmethod
    def train(self, down: Down, prior: Gaussian, shard: AnyShard, task: Task) -> tuple[Tensor, Tensor, float]:
        """Weights, F_k and the training loss."""

    def server_update(
        self, server: Server, down: Down, ups: Iterable[tuple[int, Up]], ctx: Context
    ) -> Server:
        zero = torch.zeros_like(server.mean)
        total, curvature, mean, second, weight = zero, zero, zero, zero, 0
        for k, up in ups:
            a, P, mu = ctx.sizes[k], up.curvature.double(), up.mean.double()
            total, curvature = total + a * (P + self.gamma) * mu, curvature + a * P
            mean, second = mean + a * mu, second + a * (1 / (P + self.gamma) + mu**2)
            weight += a
        if self.aggregation == "product":
            P = curvature / weight
            return Server(total / weight / (P + self.gamma), P, server.folds + 1)
        mean, second = mean / weight, second / weight
        return Server(mean, (1 / (second - mean**2) - self.gamma).clamp(min=0), server.folds + 1)

    def model(self, server: Server, ctx: Context) -> Point | Gaussian:
        if not server.folds:
            return Point(server.mean)
        return Gaussian.at(server.mean, server.curvature + self.gamma)


@dataclass(frozen=True)
class FOLA(_Product):
    gamma: Gamma = 1e-8
    lam: Lam = 1.0
    squares: Squares = "example"
    aggregation: Aggregation = "product"
    local: LocalTraining = LocalTraining(optimiser="sgd", lr=0.1, clip=10.0)

    name: ClassVar[str] = "fola"
    paper: ClassVar[str] = "Liu & Zheng, Algorithm 1"
    url: ClassVar[str] = "https://arxiv.org/abs/2102.01936v1"

    def train(self, down: Down, prior: Gaussian, shard: AnyShard, task: Task) -> tuple[Tensor, Tensor, float]:
        if isinstance(shard, QuadraticShard):
            fit = minimise(
                shard, down.mean, how=self.local, rng=task.rng, round=task.round, penalties=(prior,)
            )
            return fit.weights, mean_fisher(shard, fit.weights), fit.loss
        gathered = torch.zeros_like(down.mean)

        def gather(inputs: Tensor, targets: Tensor) -> None:
            if self.squares == "batch":
                gathered.addcmul_(shard.net.grads, shard.net.grads, value=len(targets))
            else:
                gathered.add_(squared_gradients(shard.net, shard.net.weights, inputs, targets))

        fit = minimise(
            shard, down.mean, how=self.local, rng=task.rng, round=task.round, penalties=(prior,), watch=gather
        )
        return fit.weights, gathered / (shard.size * self.local.epochs), fit.loss


@dataclass(frozen=True)
class LaplaceOffline(_Product):
    gamma: Gamma = 1e-8
    lam: Lam = 1.0
    aggregation: Aggregation = "product"
    local: LocalTraining = LocalTraining(optimiser="sgd", lr=0.1, clip=10.0)

    name: ClassVar[str] = "laplace_offline"
    paper: ClassVar[str] = "Liu & Zheng, Sec. 3.4, Eq. 14 (offline)"
    url: ClassVar[str] = "https://arxiv.org/abs/2102.01936v1"

    def train(self, down: Down, prior: Gaussian, shard: AnyShard, task: Task) -> tuple[Tensor, Tensor, float]:
        fit = minimise(shard, down.mean, how=self.local, rng=task.rng, round=task.round, penalties=(prior,))
        return fit.weights, mean_fisher(shard, fit.weights), fit.loss
