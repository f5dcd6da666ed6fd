"""BCM - the Bayesian committee machine, Tresp 2000, as in Swaroop et al. 2025, Eq. 3, with a Laplace
approximation at every client.

    client:  w_k <- argmin l_k(w) + (delta/2) ||w||^2 ;   S_k <- H_k(w_k) + delta I      (SUM loss)
             t_k <- p_k / p_0,   p_k = N(w_k, S_k^-1),  p_0 = N(0, I/delta)
    server:  p_g  = p_0 prod_k t_k        so  S_g = sum S_k - (K-1) delta I,  S_g w_g = sum_k S_k w_k

All precisions are diagonal. H_k is the diagonal GGN, exact by default (option `curvature`). The product is
over the clients that have uploaded so far. The t_k do not contain the prior, so p_0 counts once. By default
there is one round; further rounds are for clients that have not taken part yet. A client that takes part
again continues training from its own w_k, and its new t_k replaces the old one: the client stores the old t_k
and sends only the change.

Wire: 0 down, 2P up. Clients do not use the server's result, so nothing is broadcast.

Local training is Adam by default. Its moments are not kept, so `carry` has no effect.

Differs: the local posteriors are Laplace approximations.

References:
    Tresp 2000: https://doi.org/10.1162/089976600300014908
    Swaroop et al. 2025: https://arxiv.org/abs/2501.17325
    docs/references/equations.md#bayesian-committee-machine
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Arrival, Context, Task
from fedsim.hyperparameters import GgnEstimator, PriorPrecision
from fedsim.learning.gaussian import Gaussian, Point
from fedsim.learning.solvers.first_order import LocalTraining
from fedsim.wire.schema import Delta, Scalar
from protocols._dual_rule import proper


@dataclass(frozen=True)
class Server:
    sites: Gaussian
    """prod t_k over the clients that have uploaded, (P,) float64."""
    heard: Tensor
    """True for the clients that have uploaded, (K,) bool."""


@dataclass(frozen=True)
class Client:
    site: Gaussian
    """t_k in the server's product, (P,) float64."""
    weights: Tensor | None = None
    """w_k (P,) float32, or None before the first training."""


@dataclass(frozen=True)
class Down:
    """Empty message: every process knows the prior and the start."""


@dataclass(frozen=True)
class Up:
    """Upload of the natural parameters of (new t_k) / (old t_k); before a client's first upload t_k is 1."""

    shift: Delta
    precision: Delta
    train_loss: Scalar


@dataclass(frozen=True)
class BCM(Algorithm[Server, Client, Down, Up]):
    delta: PriorPrecision = 1.0
    curvature: GgnEstimator = "exact"
    local: LocalTraining = LocalTraining(epochs=20)

    name: ClassVar[str] = "bcm"
    paper: ClassVar[str] = "Tresp 2000; Swaroop et al. 2025, Eq. 3"
    url: ClassVar[str] = "https://doi.org/10.1162/089976600300014908"
    duals: ClassVar[dict[str, str]] = {"site": "sites"}
    default_model: ClassVar[str] = "logistic_bias"
    default_rounds: ClassVar[int] = 1

    def server_init(self, ctx: Context) -> Server:
        return Server(Gaussian.one(ctx.start), torch.zeros(ctx.K, dtype=torch.bool))

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client(Gaussian.one(ctx.start))

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down()

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        prior = Gaussian(torch.zeros_like(task.start), self.delta)
        start = task.start if client.weights is None else client.weights
        fit = task.minimise(shard, self.local, start, weight=shard.size, penalties=(prior,))
        local = Gaussian.at(fit.weights, self.delta + shard.curvature(fit.weights, self.curvature, task.rng))
        change = local / prior / client.site
        return Client(client.site, fit.weights), Up(change.shift, torch.as_tensor(change.precision), fit.loss)

    def client_commit(self, client: Client, down: Down, up: Up, task: Task) -> Client:
        return Client(client.site * _change(up), client.weights)

    def server_update(self, server: Server, down: Down, arrivals: Iterable[Arrival], ctx: Context) -> Server:
        sites, heard = server.sites, server.heard.clone()
        for a in arrivals:
            sites = sites * _change(a.up)
            heard[a.client] = True
        proper(self.posterior(sites), "the committee")
        return Server(sites, heard)

    def posterior(self, sites: Gaussian) -> Gaussian:
        """Return the posterior p_0 prod t_k."""
        return Gaussian(sites.shift, self.delta + sites.precision)

    def model(self, server: Server, ctx: Context) -> Point | Gaussian:
        return self.posterior(server.sites) if bool(server.heard.any()) else Point(ctx.start)

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        return {"heard": float(server.heard.sum())}


def _change(up: Up) -> Gaussian:
    return Gaussian(up.shift.double(), up.precision.double())
