"""Algorithms whose clients upload a delta that the server takes as a gradient: generalised federated
optimisation (Al-Shedivat et al. 2021, Algorithm 1; docs/references/equations.md#server-optimisers).

    client:  Delta_k <- CLIENTUPDATE(w_g)
    server:  Delta   <- sum_k N_k Delta_k / sum_k N_k        over the participants
             w_g     <- SERVERUPDATE(w_g, Delta)

This is a template, not an algorithm; SERVERUPDATE is any rule of fedsim.learning.solvers.server.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Context, Exchange, Task, weighted_mean
from fedsim.learning.gaussian import Point
from fedsim.learning.solvers.first_order import Moments
from fedsim.learning.solvers.server import ServerMoments, ServerOptimiser, moments, step
from fedsim.wire.schema import Delta, Mean, Scalar


@dataclass(frozen=True)
class Server:
    """mean: w_g (P,) float64."""

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
    delta: Delta
    train_loss: Scalar


@dataclass(frozen=True)
class Found:
    """A client's delta (P,), pointing uphill: start minus result."""

    delta: Tensor
    loss: float
    moments: Moments | None = None


class Pseudogradient(Algorithm[Server, Client, Down, Up]):
    """The methods of Algorithm in terms of a client's delta and a server optimiser."""

    server_type: ClassVar[type] = Server
    client_type: ClassVar[type] = Client
    fed_back: ClassVar[tuple[str, ...]] = ("delta",)

    @property
    @abstractmethod
    def optimiser(self) -> ServerOptimiser: ...

    @abstractmethod
    def delta(self, client: Client, mean: Tensor, shard: AnyShard, task: Task) -> Found:
        """CLIENTUPDATE at the broadcast `mean` (P,)."""

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return (Exchange(Down, Up),)

    def server_init(self, ctx: Context) -> Server:
        return Server(ctx.start.double(), moments(self.optimiser, ctx.start))

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client()

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(server.mean)

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        result = self.delta(client, down.mean, shard, task)
        return Client(result.moments), Up(result.delta, result.loss)

    def server_update(
        self, server: Server, down: Down, ups: Iterable[tuple[int, Up]], ctx: Context
    ) -> Server:
        delta = weighted_mean(((k, up.delta) for k, up in ups), ctx.sizes)
        return Server(*step(self.optimiser, server.moments, server.mean, delta))

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.mean)
