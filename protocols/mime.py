"""Mime and MimeLite - Karimireddy et al. 2020 (arXiv:2008.03606), with SGD momentum as the server's
statistic.

    exchange 1   down x           up  g_k = gradient of lbar_k at x, over all its examples
    exchange 2   down c, m        up  y_k        c = sum_k N_k g_k / sum_k N_k
        client:  y <- x, then for every batch
                 y <- y - eta [ (1-beta) (grad f(y; z) - grad f(x; z) + c) + beta m ]        m stays fixed
    server:  x <- sum_k N_k y_k / sum_k N_k ;   m <- (1-beta) c + beta m

mimelite is the same without the correction, in one exchange.

Wire: P + 2P down, P + P up. A client remembers x between the two exchanges.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Context, Exchange, Task, weighted_mean
from fedsim.learning.gaussian import Point
from fedsim.learning.shards import QuadraticShard
from fedsim.learning.solvers.first_order import decayed
from fedsim.wire.schema import Gradient, Mean, Scalar, Statistic


@dataclass(frozen=True)
class LocalSGD:
    """Plain SGD; the learning rate in round r is lr * decay^(r-1)."""

    epochs: Annotated[int, Meta(ge=1)] = 5
    batch_size: Annotated[int, Meta(ge=1)] = 32
    lr: Annotated[float, Meta(gt=0)] = 0.1
    decay: Annotated[float, Meta(gt=0, le=1)] = 1.0


@dataclass(frozen=True)
class Server:
    """mean: x; momentum: m; control: c of this round, between its exchanges; (P,) float64."""

    mean: Tensor
    momentum: Tensor
    control: Tensor


@dataclass(frozen=True)
class Client:
    """x between the exchanges of a round, (P,) float32; else nothing."""

    anchor: Tensor | None = None


@dataclass(frozen=True)
class Ask:
    mean: Mean


@dataclass(frozen=True)
class Answer:
    gradient: Gradient


@dataclass(frozen=True)
class Correct:
    control: Gradient
    momentum: Statistic


@dataclass(frozen=True)
class Result:
    mean: Mean
    train_loss: Scalar


@dataclass(frozen=True)
class Mime(Algorithm[Server, Client, Any, Any]):
    beta: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    local: LocalSGD = LocalSGD()

    name: ClassVar[str] = "mime"
    paper: ClassVar[str] = "Karimireddy et al. 2020, Mime"
    default_model: ClassVar[str] = "mlp_small"
    server_type: ClassVar[type] = Server
    client_type: ClassVar[type] = Client

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return (Exchange(Ask, Answer), Exchange(Correct, Result))

    def server_init(self, ctx: Context) -> Server:
        return _start(ctx)

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client()

    def broadcast(self, server: Server, ctx: Context) -> Any:
        return Ask(server.mean) if ctx.exchange == 1 else Correct(server.control, server.momentum)

    def client_update(self, client: Client, down: Any, shard: AnyShard, task: Task) -> tuple[Client, Any]:
        if isinstance(down, Ask):
            return Client(down.mean.clone()), Answer(shard.gradient(down.mean) / shard.size)
        assert client.anchor is not None  # both exchanges of a round have the same participants
        step = (1 - self.beta) * down.control + self.beta * down.momentum
        y, loss = local_sgd(shard, client.anchor, self.local, task, 1 - self.beta, step, client.anchor)
        return Client(), Result(y, loss)

    def server_update(
        self, server: Server, down: Any, ups: Iterable[tuple[int, Any]], ctx: Context
    ) -> Server:
        if isinstance(down, Ask):
            control = weighted_mean(((k, up.gradient) for k, up in ups), ctx.sizes)
            return Server(server.mean, server.momentum, control)
        mean = weighted_mean(((k, up.mean) for k, up in ups), ctx.sizes)
        momentum = (1 - self.beta) * server.control + self.beta * server.momentum
        return Server(mean, momentum, torch.zeros_like(mean))

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.mean)


def _start(ctx: Context) -> Server:
    start = ctx.start.double()
    return Server(start, torch.zeros_like(start), torch.zeros_like(start))


def local_sgd(
    shard: AnyShard,
    start: Tensor,
    how: LocalSGD,
    task: Task,
    share: float,
    constant: Tensor,
    anchor: Tensor | None = None,
) -> tuple[Tensor, float]:
    """y <- y - eta [ share (grad f(y; z) - grad f(anchor; z)) + constant ] over all batches, from `start`;
    without an anchor its gradient is left out. Returns y (P,) and the mean loss of the last epoch.

    On a QuadraticShard an epoch is one step with exact gradients.
    """
    y, lr = start.clone(), decayed(how.lr, how.decay, task.round)
    if isinstance(shard, QuadraticShard):
        for _ in range(how.epochs):
            slope = shard.gradient(y) - (0.0 if anchor is None else shard.gradient(anchor))
            y = y - lr * (share * slope / shard.size + constant)
        return y, shard.loss(y)
    net, order, total = shard.net, task.rng.torch("batches"), 0.0
    with net.noise(task.rng.key("dropout")):
        for epoch in range(how.epochs):
            for inputs, targets in shard.batches(how.batch_size, order):
                net.module.train()
                slope = constant.to(y)
                for point, sign in ((anchor, -share), (y, share)):
                    if point is not None:
                        net.load(point)
                        loss = net.loss_gradient(inputs, targets, 1.0)
                        slope = slope + sign * net.grads
                y -= lr * slope
                if epoch == how.epochs - 1:
                    total += float(loss) * len(targets)
    return y, total / shard.size
