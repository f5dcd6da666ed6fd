"""What algorithms that average over their clients share: weighted means, the messages of FedAvg and FedProx,
and a template for clients that upload a delta which the server takes as a gradient.

    client:  Delta_k <- CLIENTUPDATE(w_g)
    server:  Delta   <- sum_k N_k Delta_k / sum_k N_k        over the participants
             w_g     <- SERVERUPDATE(w_g, Delta)

SERVERUPDATE is any rule of fedsim.learning.solvers.server. Source: generalised federated optimisation
(Al-Shedivat et al. 2021, Algorithm 1; docs/references/equations.md#server-optimisers).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Arrival, Context, Task
from fedsim.asynchrony import DAMPING
from fedsim.learning.blocks import add_by_blocks
from fedsim.learning.gaussian import Point
from fedsim.learning.solvers import LocalFit
from fedsim.learning.solvers.first_order import Moments
from fedsim.learning.solvers.server import ServerMoments, ServerOptimiser, moments, step
from fedsim.wire.schema import Delta, Mean, Scalar

__all__ = [
    "DAMPING",
    "Client",
    "DeltaUp",
    "Down",
    "LocalFit",
    "OptimiserServer",
    "Pseudogradient",
    "Server",
    "ServerOptimiser",
    "Up",
    "stale_mean",
    "weighted_mean",
    "weighted_means",
]


@dataclass(frozen=True)
class Server:
    """mean: w_g (P,) float64."""

    mean: Tensor


@dataclass(frozen=True)
class OptimiserServer:
    """mean: w_g (P,) float64; moments: the state of SERVERUPDATE."""

    mean: Tensor
    moments: ServerMoments


@dataclass(frozen=True)
class Client:
    """What the local optimiser carries over, if anything."""

    moments: Moments | None = None


@dataclass(frozen=True)
class Down:
    mean: Mean


@dataclass(frozen=True)
class Up:
    """w_k of FedAvg and FedProx."""

    mean: Mean
    train_loss: Scalar


@dataclass(frozen=True)
class DeltaUp:
    """Delta_k, which points uphill: start minus result."""

    delta: Delta
    train_loss: Scalar


def weighted_mean(ups: Iterable[tuple[int, Tensor]], sizes: tuple[int, ...]) -> Tensor:
    """sum N_k x_k / sum N_k over those who take part, summed in float64 in the order given: (P,)."""
    (mean,) = weighted_means(((k, (x,)) for k, x in ups), sizes)
    return mean


def stale_mean(server_mean: Tensor, arrivals: Iterable[Arrival], ctx: Context) -> Tensor:
    """w_g + sum N_k s_k (w_k - w_a) / sum N_k, s_k the weight of client k's staleness and w_a the broadcast
    that it answers: (P,) float64.

    Source: FedBuff, Nguyen et al. 2022, Algorithm 1, https://arxiv.org/abs/2106.06639, with a step size of 1.
    Differs: clients count by their examples, as in FedAvg.
    """
    steps = ((a.client, a.weight * (a.up.mean.double() - a.down.mean.double())) for a in arrivals)
    return server_mean + weighted_mean(steps, ctx.sizes)


def weighted_means(ups: Iterable[tuple[int, tuple[Tensor, ...]]], sizes: tuple[int, ...]) -> list[Tensor]:
    """The same of several tensors per upload, in one pass."""
    totals: list[Tensor] = []
    weight = 0
    for k, values in ups:
        totals = totals or [torch.zeros_like(x, dtype=torch.float64) for x in values]
        for total, x in zip(totals, values, strict=True):
            add_by_blocks(total, x, sizes[k])
        weight += sizes[k]
    if not totals:
        raise ValueError("nothing to average")
    return [total / weight for total in totals]


class Pseudogradient(Algorithm[OptimiserServer, Client, Down, DeltaUp]):
    """A template: the methods of Algorithm in terms of a client's delta and a server optimiser."""

    fed_back: ClassVar[tuple[str, ...]] = ("delta",)

    folds_stale: ClassVar[bool] = True
    stale_damping: ClassVar[float] = DAMPING

    @property
    @abstractmethod
    def optimiser(self) -> ServerOptimiser: ...

    @abstractmethod
    def delta(self, client: Client, mean: Tensor, shard: AnyShard, task: Task) -> LocalFit[Tensor, Moments]:
        """CLIENTUPDATE at the broadcast `mean` (P,); the solution is Delta_k."""

    def server_init(self, ctx: Context) -> OptimiserServer:
        return OptimiserServer(ctx.start.double(), moments(self.optimiser, ctx.start))

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client()

    def broadcast(self, server: OptimiserServer, ctx: Context) -> Down:
        return Down(server.mean)

    def client_update(
        self, client: Client, down: Down, shard: AnyShard, task: Task
    ) -> tuple[Client, DeltaUp]:
        result = self.delta(client, down.mean, shard, task)
        return Client(result.carried), DeltaUp(result.solution, result.loss)

    def server_update(
        self, server: OptimiserServer, down: Down, ups: Iterable[tuple[int, DeltaUp]], ctx: Context
    ) -> OptimiserServer:
        delta = weighted_mean(((k, up.delta) for k, up in ups), ctx.sizes)
        return OptimiserServer(*step(self.optimiser, server.moments, server.mean, delta))

    def stale_update(
        self, server: OptimiserServer, arrivals: Iterable[Arrival], ctx: Context
    ) -> OptimiserServer:
        delta = weighted_mean(((a.client, a.weight * a.up.delta.double()) for a in arrivals), ctx.sizes)
        return OptimiserServer(*step(self.optimiser, server.moments, server.mean, delta))

    def model(self, server: OptimiserServer, ctx: Context) -> Point:
        return Point(server.mean)
