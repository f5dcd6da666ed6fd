"""MimeLite - Karimireddy et al. 2020 (arXiv:2008.03606), with SGD momentum as the server's statistic:
mime without the correction, and so in one exchange.

    client:  y <- x, then for every batch  y <- y - eta [ (1-beta) grad f(y; z) + beta m ]     m stays fixed
             g_k = gradient of lbar_k at x, over all its examples
    server:  x <- sum_k N_k y_k / sum_k N_k ;   m <- (1-beta) sum_k N_k g_k / sum_k N_k + beta m

Wire: 2P down, 2P up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Context, Exchange, Task, weighted_means
from fedsim.learning.gaussian import Point
from fedsim.wire.schema import Gradient, Mean, Scalar, Statistic
from protocols.mime import LocalSGD, local_sgd


@dataclass(frozen=True)
class Server:
    """mean: x; momentum: m; (P,) float64."""

    mean: Tensor
    momentum: Tensor


@dataclass(frozen=True)
class Client:
    """Stateless."""


@dataclass(frozen=True)
class Down:
    mean: Mean
    momentum: Statistic


@dataclass(frozen=True)
class Up:
    mean: Mean
    gradient: Gradient
    train_loss: Scalar


@dataclass(frozen=True)
class MimeLite(Algorithm[Server, Client, Down, Up]):
    beta: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    local: LocalSGD = LocalSGD()

    name: ClassVar[str] = "mimelite"
    paper: ClassVar[str] = "Karimireddy et al. 2020, MimeLite"
    default_model: ClassVar[str] = "mlp_small"
    server_type: ClassVar[type] = Server
    client_type: ClassVar[type] = Client

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return (Exchange(Down, Up),)

    def server_init(self, ctx: Context) -> Server:
        start = ctx.start.double()
        return Server(start, torch.zeros_like(start))

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client()

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(server.mean, server.momentum)

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        gradient = shard.gradient(down.mean) / shard.size
        y, loss = local_sgd(shard, down.mean, self.local, task, 1 - self.beta, self.beta * down.momentum)
        return client, Up(y, gradient, loss)

    def server_update(
        self, server: Server, down: Down, ups: Iterable[tuple[int, Up]], ctx: Context
    ) -> Server:
        mean, gradient = weighted_means(((k, (up.mean, up.gradient)) for k, up in ups), ctx.sizes)
        return Server(mean, (1 - self.beta) * gradient + self.beta * server.momentum)

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.mean)
