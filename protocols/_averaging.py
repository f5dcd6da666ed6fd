"""Shared code of algorithms that average over clients: weighted means, the messages of FedAvg and FedProx,
and a base class for algorithms in which clients upload a delta and the server uses it as a gradient.

    client:  Delta_k <- CLIENTUPDATE(w_g)
    server:  Delta   <- sum_k N_k Delta_k / sum_k N_k        over the participants
             w_g     <- SERVERUPDATE(w_g, Delta)

SERVERUPDATE is any rule of fedsim.learning.solvers.server. Source: generalised federated optimisation
(Al-Shedivat et al. 2021, Algorithm 1; docs/references/equations.md#server-optimisers).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Arrival, Context, Task
from fedsim.asynchrony import DAMPING
from fedsim.learning.blocks import add_by_blocks
from fedsim.learning.gaussian import Point
from fedsim.learning.solvers import LocalFit
from fedsim.learning.solvers.first_order import Moments
from fedsim.learning.solvers.server import ServerMoments, ServerOptimiser, moments, step
from fedsim.wire.schema import Count, Delta, Mean, Scalar, Sum

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
    "WeightedPair",
    "WeightedSum",
    "add_weights",
    "mean_weights",
]


@dataclass(frozen=True)
class Server:
    """State of the server. mean: w_g, (P,) float64."""

    mean: Tensor


@dataclass(frozen=True)
class OptimiserServer:
    """State of the server. mean: w_g, (P,) float64. moments: the state of SERVERUPDATE."""

    mean: Tensor
    moments: ServerMoments


@dataclass(frozen=True)
class Client:
    """State of a client. moments: those of the local optimiser if it keeps them between tasks, else None."""

    moments: Moments | None = None


@dataclass(frozen=True)
class Down:
    mean: Mean


@dataclass(frozen=True)
class Up:
    """Upload of w_k in FedAvg and FedProx."""

    mean: Mean
    train_loss: Scalar


@dataclass(frozen=True)
class DeltaUp:
    """Upload of Delta_k, the initial weights minus the trained weights; it has the sign of a gradient."""

    delta: Delta
    train_loss: Scalar


@dataclass(frozen=True)
class WeightedSum:
    """Sums over clients. total: sum N_k x_k, (P,) float64. weight: sum N_k."""

    total: Sum
    weight: Count

    def plus(self, x: Tensor, weight: int) -> WeightedSum:
        """Add weight * x to `total` in place; x is (P,)."""
        add_by_blocks(self.total, x, weight)
        return WeightedSum(self.total, self.weight + weight)

    def into_mean(self) -> Tensor:
        """Return the mean, (P,) float64, which overwrites `total`; the caller must own the sum."""
        return self.total.div_(self.weight)


@dataclass(frozen=True)
class WeightedPair:
    """Sums over clients. first: sum N_k x_k, second: sum N_k y_k, (P,) float64 each. weight: sum N_k."""

    first: Sum
    second: Sum
    weight: Count

    def plus(self, x: Tensor, y: Tensor, weight: int) -> WeightedPair:
        """Add weight * x and weight * y to the sums in place; x and y are (P,)."""
        add_by_blocks(self.first, x, weight)
        add_by_blocks(self.second, y, weight)
        return WeightedPair(self.first, self.second, self.weight + weight)

    def into_means(self) -> tuple[Tensor, Tensor]:
        """Return the means, (P,) float64, which overwrite the sums; the caller must own the sums."""
        return self.first.div_(self.weight), self.second.div_(self.weight)


def add_weights(sums: WeightedSum, a: Arrival, ctx: Context) -> WeightedSum:
    """Add N_k w_k or, if uploads answer different broadcasts, N_k s_k (w_k - w_a); see `mean_weights`."""
    mean = a.at.weight * (a.up.mean.double() - a.down.mean.double()) if ctx.mixed else a.up.mean
    return sums.plus(mean, ctx.sizes[a.client])


def mean_weights(server_mean: Tensor, sums: WeightedSum, ctx: Context) -> Tensor:
    """Return sum N_k w_k / sum N_k or, if uploads answer different broadcasts,
    w_g + sum N_k s_k (w_k - w_a) / sum N_k, (P,) float64.

    s_k is the staleness weight of client k's upload. w_a is the broadcast from which client k computed w_k.
    Source: FedBuff, Nguyen et al. 2022, Algorithm 1, https://arxiv.org/abs/2106.06639, with a step size of 1.
    Differs: clients are weighted by their number of examples, as in FedAvg.
    """
    mean = sums.into_mean()
    return server_mean + mean if ctx.mixed else mean


class Pseudogradient(Algorithm[OptimiserServer, Client, Down, DeltaUp]):
    """Base class of algorithms whose server applies an optimiser to the mean of the clients' deltas."""

    fed_back: ClassVar[tuple[str, ...]] = ("delta",)

    folds_stale: ClassVar[bool] = True
    stale_damping: ClassVar[float] = DAMPING

    @property
    @abstractmethod
    def optimiser(self) -> ServerOptimiser: ...

    @abstractmethod
    def delta(self, client: Client, mean: Tensor, shard: AnyShard, task: Task) -> LocalFit[Tensor, Moments]:
        """Run CLIENTUPDATE from the broadcast `mean` (P,), and return Delta_k as the fit's solution."""

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

    def add(self, sums: WeightedSum, a: Arrival, ctx: Context) -> WeightedSum:
        delta = a.up.delta if a.at.weight == 1.0 else a.at.weight * a.up.delta.double()
        return sums.plus(delta, ctx.sizes[a.client])

    def from_sums(
        self, server: OptimiserServer, down: Down, sums: WeightedSum, ctx: Context
    ) -> OptimiserServer:
        return OptimiserServer(*step(self.optimiser, server.moments, server.mean, sums.into_mean()))

    def model(self, server: OptimiserServer, ctx: Context) -> Point:
        return Point(server.mean)
