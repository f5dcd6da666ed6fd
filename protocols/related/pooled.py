"""Pooled training: a reference that is not federated. One client has the training rows of all K clients.

    every round:  w <- E epochs of minibatch steps on the mean loss of all rows, started at w

It is FedAvg (McMahan et al. 2017, arXiv:1602.05629) with a single client that has the rows of all K clients.
Federated algorithms are compared with it; if there are many rows, its accuracy is an upper bound. A round is
E passes over all data. With the same `clients` and `partition` as a federated run, it trains on the same
rows. The schedule and the virtual clock do not apply, so participation is always full.

Wire: 0 down, 0 up. There is no federation, so nothing counts as the algorithm's traffic. The worker still
sends the P weights for evaluation; the ledger books these bytes under the kind `simulation`.

Local training is Adam by default; Adam's moments are carried over from round to round, as in fedavg.

References:
    McMahan et al. 2017: https://arxiv.org/abs/1602.05629
    docs/references/equations.md#pooled-training
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

import fedsim
from fedsim import Algorithm, AnyShard, Arrival, Context, LocalTraining, Moments, Point, Task


@dataclass(frozen=True)
class Server:
    """State of the server. mean: w, (P,) float64."""

    mean: Tensor


@dataclass(frozen=True)
class Client:
    """State of the client. weights: w, (P,) float32."""

    weights: Tensor
    moments: Moments | None = None


@dataclass(frozen=True)
class Down:
    """Empty message: the client keeps its weights."""


@dataclass(frozen=True)
class Up:
    mean: fedsim.Mean
    train_loss: fedsim.Scalar


@dataclass(frozen=True)
class Pooled(Algorithm[Server, Client, Down, Up]):
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "pooled"
    paper: ClassVar[str] = "McMahan et al. 2017, with one client"
    url: ClassVar[str] = "https://arxiv.org/abs/1602.05629"
    default_model: ClassVar[str] = "mlp_small"
    centralised: ClassVar[bool] = True

    def server_init(self, ctx: Context) -> Server:
        return Server(ctx.start.double())

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client(ctx.start.clone())

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down()

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        fit = task.minimise(shard, self.local, client.weights, moments=client.moments)
        return Client(fit.weights, fit.carried), Up(fit.weights, fit.loss)

    def server_update(self, server: Server, down: Down, arrivals: Iterable[Arrival], ctx: Context) -> Server:
        (arrival,) = arrivals
        return Server(arrival.up.mean.double())

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.mean)
