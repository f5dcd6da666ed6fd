"""Gaussian product aggregation (Liu & Zheng, Eq. 8-18, arXiv:2102.01936v1): the messages and the server
of fola and laplace_offline. The two algorithms differ in how a client computes its curvature.

    client:  theta <- training of  lbar_k + (lam/2) (theta - mu_S)' (P_S + gamma) (theta - mu_S)
             P_k   <- from F_k, the mean squared gradient of an example
    server:  P_S  <- sum_k a_k P_k ;  mu_S <- (sum_k a_k (P_k + gamma) mu_k) / (P_S + gamma),  a_k = N_k / N
    init:    mu_S = the shared random start, P_S = 0

The server's Gaussian has the precision P_S + gamma. Eq. 18 contains gamma I, but Eq. 17 does not produce it,
so gamma is added wherever the precision is used. Where all P_k are 0, the mean is then sum_k a_k mu_k. (The
released code adds an eps to the denominator only, which shrinks these weights towards 0.) For comparison,
aggregation = mixture takes the moments of the mixture sum_k a_k N(mu_k, (P_k + gamma)^-1) (Eq. 5-6).

Units: P_S is a mean over examples. The posterior of all data, prod_k p(D_k | theta) = exp(-N mean_k lbar_k),
has the precision N P_S. By default the model is the point mu_S, because gamma is no sensible prior: weights
that the data do not determine would have a standard deviation of 1/sqrt(N gamma), which is in the hundreds
and would ruin predictions from samples. With posterior = true the model is N(mu_S, (N (P_S + gamma))^-1), in
which N gamma is the prior's precision; choose gamma accordingly.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Arrival, Context, Task
from fedsim.learning.gaussian import Gaussian, Point
from fedsim.learning.solvers.first_order import LocalTraining
from fedsim.wire.schema import Count, Curvature, Mean, Scalar, Sum

Aggregation = Annotated[Literal["product", "mixture"], Meta(description="of the clients' Gaussians")]
Gamma = Annotated[float, Meta(gt=0, description="precision that is added to every P")]
Lam = Annotated[float, Meta(ge=0, description="weight of the prior in the local objective")]
Posterior = Annotated[
    bool, Meta(description="return N(mu, 1/(N (P + gamma))), to draw samples from, and not the point mu")
]


@dataclass(frozen=True)
class Server:
    """State of the server. mean: mu_S, curvature: P_S without gamma, (P,) float64. folds: server updates."""

    mean: Tensor
    curvature: Tensor
    folds: int = 0


@dataclass(frozen=True)
class Client:
    """Empty state: the client keeps nothing."""


@dataclass(frozen=True)
class Down:
    mean: Mean
    curvature: Curvature


@dataclass(frozen=True)
class Up:
    mean: Mean
    curvature: Curvature
    train_loss: Scalar


@dataclass(frozen=True)
class Sums:
    """Sums over clients. weight: N_k. first, second: N_k (P_k + gamma) mu_k and N_k P_k for the product;
    N_k mu_k and N_k (1 / (P_k + gamma) + mu_k^2) for the mixture."""

    first: Sum
    second: Sum
    weight: Count


class GaussianProduct(Algorithm[Server, Client, Down, Up]):
    """Base class of both algorithms. A subclass defines local training, and P_k as a function of F_k."""

    gamma: Gamma
    lam: Lam
    aggregation: Aggregation
    posterior: Posterior
    local: LocalTraining

    default_model: ClassVar[str] = "mlp_small"
    url: ClassVar[str] = "https://arxiv.org/abs/2102.01936v1"

    def server_init(self, ctx: Context) -> Server:
        return Server(ctx.start.double(), torch.zeros_like(ctx.start, dtype=torch.float64))

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client()

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(server.mean, server.curvature)

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        prior = Gaussian.at(down.mean, self.lam * (down.curvature.double() + self.gamma))
        weights, fisher, loss = self.train(down, prior, shard, task)
        return client, Up(weights, self.precision(fisher, down, task.folds + 1), loss)

    @abstractmethod
    def train(self, down: Down, prior: Gaussian, shard: AnyShard, task: Task) -> tuple[Tensor, Tensor, float]:
        """Train a client; return its weights (P,), F_k (P,) and its training loss."""

    @abstractmethod
    def precision(self, fisher: Tensor, down: Down, r: int) -> Tensor:
        """Return P_k (P,), given F_k = `fisher` (P,); r - 1 is the number of earlier server updates."""

    def add(self, sums: Sums, a: Arrival, ctx: Context) -> Sums:
        n, P, mu = ctx.sizes[a.client], a.up.curvature.double(), a.up.mean.double()
        if self.aggregation == "product":
            first, second = n * (P + self.gamma) * mu, n * P
        else:
            first, second = n * mu, n * (1 / (P + self.gamma) + mu**2)
        return Sums(sums.first + first, sums.second + second, sums.weight + n)

    def from_sums(self, server: Server, down: Down, sums: Sums, ctx: Context) -> Server:
        mean, second = sums.first / sums.weight, sums.second / sums.weight
        if self.aggregation == "product":
            return Server(mean / (second + self.gamma), second, server.folds + 1)
        return Server(mean, (1 / (second - mean**2) - self.gamma).clamp(min=0), server.folds + 1)

    def model(self, server: Server, ctx: Context) -> Point | Gaussian:
        if not server.folds or not self.posterior:
            return Point(server.mean)
        return Gaussian.at(server.mean, sum(ctx.sizes) * (server.curvature + self.gamma))


def running_mean(fisher: Tensor, before: Tensor, r: int) -> Tensor:
    """Return the running mean of Eq. 17, (1/r) F + ((r-1)/r) P_S, (P,)."""
    return fisher / r + (r - 1) / r * before
