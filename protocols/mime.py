"""Mime and MimeLite - Karimireddy et al. 2020, with SGD momentum as the server's statistic.

    mime
    exchange 1   down x           up  g_k = gradient of lbar_k at x, over all its examples
    exchange 2   down c, m        up  y_k        c = sum_k N_k g_k / sum_k N_k
        client:  y <- x, then for every batch
                 y <- y - eta [ (1-beta) (grad f(y; z) - grad f(x; z) + c) + beta m ]        m stays fixed
    server:  x <- sum_k N_k y_k / sum_k N_k ;   m <- (1-beta) c + beta m

    mimelite is the same without the correction, in one exchange
        client:  y <- x, then for every batch  y <- y - eta [ (1-beta) grad f(y; z) + beta m ]
    server:  x <- sum_k N_k y_k / sum_k N_k ;   m <- (1-beta) sum_k N_k g_k / sum_k N_k + beta m

Differs: averages over clients are weighted by N_k; the paper has 1/|S|.

Wire of mime: P + 2P down, P + P up. A client keeps x between the exchanges. Wire of mimelite: 2P down, 2P up.

Local training is the SGD steps above, and nothing is carried over.

References:
    Karimireddy et al. 2020: https://arxiv.org/abs/2008.03606
    Al-Shedivat et al. 2021: https://arxiv.org/abs/2010.05273
    docs/references/equations.md#mime-and-mimelite
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Arrival, Context, Exchange, Task
from fedsim.hyperparameters import MomentumOfServer
from fedsim.learning.gaussian import Point
from fedsim.learning.solvers.first_order import LocalSGD, corrected_sgd
from fedsim.wire.schema import Gradient, Mean, Scalar, Statistic
from protocols._averaging import WeightedPair, WeightedSum


@dataclass(frozen=True)
class Server:
    """State of the server, (P,) float64. mean: x. momentum: m. control: c between the exchanges, else 0."""

    mean: Tensor
    momentum: Tensor
    control: Tensor


@dataclass(frozen=True)
class Client:
    """State of a client. anchor: x, (P,) float32, between the exchanges of a round, else None."""

    anchor: Tensor | None = None


@dataclass(frozen=True)
class Ask:
    """Exchange 1, down: x."""

    mean: Mean


@dataclass(frozen=True)
class Answer:
    """Exchange 1, up: g_k."""

    gradient: Gradient


@dataclass(frozen=True)
class Correct:
    """Exchange 2, down: c and m."""

    control: Gradient
    momentum: Statistic


@dataclass(frozen=True)
class Result:
    """Exchange 2, up: y_k."""

    mean: Mean
    train_loss: Scalar


@dataclass(frozen=True)
class Mime(Algorithm[Server, Client, Ask | Correct, Answer | Result]):
    """Wire: P + 2P down, P + P up. A client remembers x between the two exchanges."""

    beta: MomentumOfServer = 0.9
    local: LocalSGD = LocalSGD()

    name: ClassVar[str] = "mime"
    paper: ClassVar[str] = "Karimireddy et al. 2020, Mime"
    url: ClassVar[str] = "https://arxiv.org/abs/2008.03606"
    default_model: ClassVar[str] = "mlp_small"

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return (Exchange(Ask, Answer, WeightedSum), Exchange(Correct, Result, WeightedSum))

    def server_init(self, ctx: Context) -> Server:
        start = ctx.start.double()
        return Server(start, torch.zeros_like(start), torch.zeros_like(start))

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client()

    def broadcast(self, server: Server, ctx: Context) -> Ask | Correct:
        return Ask(server.mean) if ctx.exchange == 1 else Correct(server.control, server.momentum)

    def client_update(
        self, client: Client, down: Ask | Correct, shard: AnyShard, task: Task
    ) -> tuple[Client, Answer | Result]:
        if isinstance(down, Ask):
            return Client(down.mean.clone()), Answer(shard.gradient(down.mean) / shard.size)
        assert client.anchor is not None  # both exchanges of a round have the same participants
        fit = corrected_sgd(
            shard,
            client.anchor,
            how=self.local,
            rng=task.rng,
            round=task.round,
            share=1 - self.beta,
            constant=(1 - self.beta) * down.control + self.beta * down.momentum,
            anchor=client.anchor,
        )
        return Client(), Result(fit.weights, fit.loss)

    def add(self, sums: WeightedSum, a: Arrival, ctx: Context) -> WeightedSum:
        return sums.plus(a.up.gradient if isinstance(a.up, Answer) else a.up.mean, ctx.sizes[a.client])

    def from_sums(self, server: Server, down: Ask | Correct, sums: WeightedSum, ctx: Context) -> Server:
        mean = sums.into_mean()
        if isinstance(down, Ask):
            return Server(server.mean, server.momentum, mean)
        momentum = (1 - self.beta) * server.control + self.beta * server.momentum
        return Server(mean, momentum, torch.zeros_like(mean))

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.mean)


@dataclass(frozen=True)
class LiteServer:
    """State of the server, (P,) float64. mean: x. momentum: m."""

    mean: Tensor
    momentum: Tensor


@dataclass(frozen=True)
class LiteClient:
    """Empty state: the client keeps nothing."""


@dataclass(frozen=True)
class LiteDown:
    mean: Mean
    momentum: Statistic


@dataclass(frozen=True)
class LiteUp:
    mean: Mean
    gradient: Gradient
    train_loss: Scalar


@dataclass(frozen=True)
class MimeLite(Algorithm[LiteServer, LiteClient, LiteDown, LiteUp]):
    """Wire: 2P down, 2P up."""

    beta: MomentumOfServer = 0.9
    local: LocalSGD = LocalSGD()

    name: ClassVar[str] = "mimelite"
    paper: ClassVar[str] = "Karimireddy et al. 2020, MimeLite"
    url: ClassVar[str] = "https://arxiv.org/abs/2008.03606"
    default_model: ClassVar[str] = "mlp_small"

    def server_init(self, ctx: Context) -> LiteServer:
        start = ctx.start.double()
        return LiteServer(start, torch.zeros_like(start))

    def client_init(self, ctx: Context, k: int) -> LiteClient:
        return LiteClient()

    def broadcast(self, server: LiteServer, ctx: Context) -> LiteDown:
        return LiteDown(server.mean, server.momentum)

    def client_update(
        self, client: LiteClient, down: LiteDown, shard: AnyShard, task: Task
    ) -> tuple[LiteClient, LiteUp]:
        gradient = shard.gradient(down.mean) / shard.size
        fit = corrected_sgd(
            shard,
            down.mean,
            how=self.local,
            rng=task.rng,
            round=task.round,
            share=1 - self.beta,
            constant=self.beta * down.momentum,
        )
        return client, LiteUp(fit.weights, gradient, fit.loss)

    def add(self, sums: WeightedPair, a: Arrival, ctx: Context) -> WeightedPair:
        return sums.plus(a.up.mean, a.up.gradient, ctx.sizes[a.client])

    def from_sums(self, server: LiteServer, down: LiteDown, sums: WeightedPair, ctx: Context) -> LiteServer:
        mean, gradient = sums.into_means()
        return LiteServer(mean, (1 - self.beta) * gradient + self.beta * server.momentum)

    def model(self, server: LiteServer, ctx: Context) -> Point:
        return Point(server.mean)
