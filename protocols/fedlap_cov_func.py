"""FedLap-Cov and FedLap-Func combined - Swaroop, Khan, Doshi-Velez 2025, App. C.2, from Eq. 17 and 21:
sites with a learned diagonal precision, and function terms on a few memory inputs M_k per client.

    client:  w_k <- argmin l_k(w) + v_k . w - 1/2 w' V_k w + 1/2 ||w - w_g||^2_{S_g}            (SUM loss)
                      - sum_{i in M_k} tau_i l(yhat_i, w) + sum_k' sum_{i in M_k'} tau_i l(yhat_ig, w)
             S_k <- H_k(w_k) - V_k + S_g                                                (the OLD V_k)
             v_k <- v_k + rho (S_k w_k - S_g w_g) ;   V_k <- V_k + rho (S_k - S_g)
             yhat_i <- soft labels of w_k on M_k
    server:  S_g <- delta I + sum_k V_k
             w_g <- argmin sum_k [ sum_{i in M_k} tau_i l(yhat_i, w) - v_k . w ] + 1/2 w' S_g w
    init:    v_k = 0, V_k = 0, w_g = 0, S_g = delta I

    yhat_ig = soft labels of w_g;  tau_i = tau N_kc / M_kc  (points of class c on client k, in its memory)

If w_k = w_g, the function terms have no gradient, so the fixed points are those of FedLap-Cov. Without memory
points the algorithm is FedLap-Cov. Memory is sent and enters the terms as in fedlap_func. As in fedlap_cov, a
network's posterior is by default too wide to sample from.

Wire: 2P down, 2P + M C up. Once: M I + 2M down, M I + M up. M, C and I are as in fedlap_func.

Cost: as for fedlap_func, plus one pass over the client's examples for H_k.

Local training is Adam by default; each client keeps Adam's moments from round to round (option `carry`).

Differs: the equations are combined here from Eq. 17 and 21. H_k is the curvature of l_k alone, because the
function terms of client and server cancel where both agree. The server's optimiser, the rounds before labels
exist, and the defaults are as in fedlap_func. The lower bounds of S_g and S_g - V_k are as in fedlap_cov. The
paper reports no results for the combination.

References:
    Swaroop et al. 2025: https://arxiv.org/abs/2501.17325
    docs/references/equations.md#fedlap-cov-with-func
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Arrival, At, Context, Step, Task
from fedsim.hyperparameters import GgnEstimator, PriorPrecision
from fedsim.learning.function_space import Held, MemoryGradient
from fedsim.learning.gaussian import Gaussian, Point
from fedsim.learning.solvers.first_order import LocalTraining, Moments
from protocols._memory import (
    CovDown,
    CovUp,
    NewMemory,
    OthersMemory,
    PointsPerClass,
    Registry,
    ServerLr,
    ServerSteps,
    Tau,
    function_term,
    label,
    own_memory,
)


@dataclass(frozen=True)
class Server:
    """State of the server. sites: prod_k t_k, mean: w_g, (P,) float64. known: the record of all memory."""

    sites: Gaussian
    mean: Tensor
    known: Registry


@dataclass(frozen=True)
class Client:
    """State of a client. site: t_k with shift = v_k and precision = V_k, both (P,) float64."""

    site: Gaussian
    known: OthersMemory
    moments: Moments | None = None


@dataclass(frozen=True)
class FedLapCovFunc(Algorithm[Server, Client, CovDown, CovUp]):
    delta: PriorPrecision = 0.1
    rho: Annotated[Step, Meta(description="damping of the dual step; |S|: the clients asked")] = "1/|S|"
    curvature: GgnEstimator = "exact"
    tau: Tau = 1.0
    points_per_class: PointsPerClass = 1
    memory_gradient: MemoryGradient = "epoch"
    server_steps: ServerSteps = 200
    server_lr: ServerLr = 1e-3
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "fedlap_cov_func"
    paper: ClassVar[str] = "Swaroop, Khan, Doshi-Velez 2025, App. C.2"
    url: ClassVar[str] = "https://arxiv.org/abs/2501.17325"
    duals: ClassVar[dict[str, str]] = {"site": "sites"}
    default_model: ClassVar[str] = "mlp_small"

    def sizes_on_wire(self, clients: int, classes: int) -> Mapping[str, int]:
        return {"M": clients * classes * self.points_per_class}

    def server_init(self, ctx: Context) -> Server:
        one = Gaussian.one(ctx.start)
        return Server(one, one.shift, Registry.empty(ctx.K))

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client(Gaussian.one(ctx.start), OthersMemory(Held.nothing()))

    def precision(self, sites: Gaussian) -> Tensor:
        """Return S_g, clamped to at least delta. H_k >= 0 implies this bound, but rounding may violate it."""
        return (self.delta + torch.as_tensor(sites.precision)).clamp(min=self.delta)

    def broadcast(self, server: Server, ctx: Context) -> CovDown:
        return CovDown(server.mean, self.precision(server.sites))

    def broadcast_to(self, server: Server, k: int, ctx: Context) -> NewMemory | None:
        return server.known.news_for(k)

    def client_update(
        self, client: Client, down: CovDown, shard: AnyShard, task: Task
    ) -> tuple[Client, CovUp]:
        known, own = client.known.with_news(down.news), own_memory(shard, task, self.points_per_class)
        cavity = (down / client.site).floored(self.delta)
        fit = task.minimise(
            shard,
            self.local,
            task.begin(down.mean),
            weight=shard.size,
            penalties=(cavity,),
            moments=client.moments,
            term=function_term(known, own, down.mean, None, self.tau, shard, task.client),
            memory_gradient=self.memory_gradient,
        )
        S_k = cavity.precision_plus(task.curvature(shard, fit.weights, self.curvature))
        logits, new = label(shard, fit.weights, known, own)
        return Client(client.site, known, fit.carried), CovUp(fit.weights, S_k, logits, fit.loss, new)

    def client_commit(self, client: Client, down: CovDown, up: CovUp, task: Task) -> Client:
        site = client.site * self.site_change(down, up, task.at)
        return Client(site, replace(client.known, logits=up.logits), client.moments)

    def site_change(self, down: CovDown, up: CovUp, at: At) -> Gaussian:
        """Return the factor (q_k / q_g)^rho, which contains the steps of v_k and V_k, (P,) float64."""
        return (up / down) ** at.value(self.rho)

    def server_update(
        self, server: Server, down: CovDown, arrivals: Iterable[Arrival], ctx: Context
    ) -> Server:
        sites, known = server.sites, server.known
        for a in arrivals:
            sites = sites * self.site_change(a.down, a.up, a.at)
            known = known.heard(a.client, a.up, ctx.round)
        return Server(sites, self.server_step(sites, known, ctx), known)

    def server_step(self, sites: Gaussian, known: Registry, ctx: Context) -> Tensor:
        """Return w_g, (P,) float64; without memory it is S_g^-1 sum v_k."""
        q = Gaussian(sites.shift, self.precision(sites))
        return known.minimise(q, q.mean, self.tau, ctx, self.server_steps, self.server_lr)

    def model(self, server: Server, ctx: Context) -> Point | Gaussian:
        if not server.known.started:
            return Point(ctx.start)
        return Gaussian.at(server.mean, self.precision(server.sites))

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        return {"memory_points": float(len(server.known.points.weights))}
