"""FedLap-Cov - Swaroop, Khan, Doshi-Velez 2025, Eq. 21.

    client:  w_k <- argmin l_k(w) + v_k . w - 1/2 w' V_k w + 1/2 ||w - w_g||^2_{S_g}    (SUM loss)
             S_k <- H_k(w_k) - V_k + S_g                                                (the OLD V_k)
             v_k <- v_k + rho (S_k w_k - S_g w_g)
             V_k <- (1 - rho) V_k + rho H_k(w_k)                     = V_k + rho (S_k - S_g)
    server:  S_g <- delta I + sum_k V_k ;   w_g <- S_g^-1 sum_k v_k               over ALL clients
    init:    v_k = 0, V_k = 0, w_g = 0, S_g = delta I

All precisions are diagonal. In natural parameters (shift = S w, precision = S): site t_k = (v_k, V_k),
q = N(0, I/delta) * prod_k t_k, and the client solves against the cavity q / t_k.
H_k is the exact diagonal generalised Gauss-Newton matrix of the summed loss, which is positive
semi-definite, so S_k and S_g stay positive.

The posterior of a network is by default too wide to sample from (delta = 0.1 leaves weights that the data
do not touch a deviation of 3, and a Laplace approximation knows nothing of the curvature away from the
mean): predictions are those of the mean, w_g. On logistic regression its average is as good.

Wire: 2P down, 2P up. The server derives both dual steps from (w_k, S_k) and its own broadcast.

Local training is Adam by default, whose moments live with the client over rounds (carry).

Differs: local training starts from ctx.start until something has been folded. The released code has
received precision 0 in round 1; the paper's delta is used here. S_g and S_g - V_k are at least delta
in exact arithmetic; they are floored there, because the broadcast is rounded and V_k is not, and a lossy
codec on S_k may make V_k negative. The sums stay as they are; `floored` in metrics.jsonl counts the
entries of S_g.

References:
    Swaroop et al. 2025: https://arxiv.org/abs/2501.17325
    docs/references/equations.md#fedlap-cov
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta

from fedsim.algorithm import Algorithm, AnyShard, At, Context, Step, Task
from fedsim.hyperparameters import GgnEstimator, PriorPrecision
from fedsim.learning.gaussian import Gaussian, Point, product
from fedsim.learning.solvers.first_order import LocalTraining, Moments, minimise
from fedsim.wire.schema import Mean, Precision, Scalar


@dataclass(frozen=True)
class Server:
    sites: Gaussian
    """prod_k t_k: shift = sum v_k, precision = sum V_k, both (P,) float64."""
    started: bool


@dataclass(frozen=True)
class Client:
    site: Gaussian
    """t_k: shift = v_k, precision = V_k, both (P,) float64."""
    moments: Moments | None = None


@dataclass(frozen=True)
class Down:
    mean: Mean
    precision: Precision


@dataclass(frozen=True)
class Up:
    mean: Mean
    precision: Precision
    train_loss: Scalar


@dataclass(frozen=True)
class FedLapCov(Algorithm[Server, Client, Down, Up]):
    delta: PriorPrecision = 0.1
    rho: Annotated[Step, Meta(description="damping of the dual step; |S|: the clients asked")] = "1/K"
    curvature: GgnEstimator = "exact"
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "fedlap_cov"
    paper: ClassVar[str] = "Swaroop, Khan, Doshi-Velez 2025, Eq. 21"
    url: ClassVar[str] = "https://arxiv.org/abs/2501.17325"
    default_model: ClassVar[str] = "mlp_small"

    def server_init(self, ctx: Context) -> Server:
        return Server(Gaussian.one(ctx.start), started=False)

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client(Gaussian.one(ctx.start))

    def posterior(self, server: Server) -> Gaussian:
        """q = prior * prod_k t_k."""
        return self.floored(Gaussian(server.sites.shift, self.delta + server.sites.precision))

    def floored(self, q: Gaussian) -> Gaussian:
        """q with a precision of at least delta: H_k >= 0 says so, rounding may not."""
        return Gaussian(q.shift, torch.as_tensor(q.precision).clamp(min=self.delta))

    def broadcast(self, server: Server, ctx: Context) -> Down:
        q = self.posterior(server)
        return Down(q.mean, torch.as_tensor(q.precision))

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        cavity = self.floored(Gaussian.at(down.mean, down.precision) / client.site)
        fit = minimise(
            shard,
            down.mean if task.started else task.start,
            how=self.local,
            rng=task.rng,
            round=task.round,
            weight=shard.size,
            penalties=(cavity,),
            moments=client.moments,
        )
        hessian = shard.curvature(fit.weights, self.curvature, task.rng)
        return Client(client.site, fit.carried), Up(fit.weights, hessian + cavity.precision, fit.loss)

    def client_commit(self, client: Client, down: Down, up: Up, task: Task) -> Client:
        return Client(client.site * self.site_change(down, up, task.at), client.moments)

    def site_change(self, down: Down, up: Up, at: At) -> Gaussian:
        """(q_k / q_g)^rho: the steps of v_k and V_k, (P,) float64."""
        local, broadcast = Gaussian.at(up.mean, up.precision), Gaussian.at(down.mean, down.precision)
        return (local / broadcast) ** at.value(self.rho)

    def server_update(
        self, server: Server, down: Down, ups: Iterable[tuple[int, Up]], ctx: Context
    ) -> Server:
        sites = server.sites
        for k, up in ups:
            sites = sites * self.site_change(down, up, ctx.at(k))
        return Server(sites, started=True)

    def dual_mismatch(self, server: Server, clients: Iterable[Client]) -> float:
        return server.sites.mismatch(product(c.site for c in clients))

    def model(self, server: Server, ctx: Context) -> Point | Gaussian:
        return self.posterior(server) if server.started else Point(ctx.start)

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        """floored: entries where delta + sum V_k < delta, so that S_g is delta instead."""
        return {"floored": int((torch.as_tensor(server.sites.precision) < 0).sum())}
