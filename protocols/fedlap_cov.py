"""FedLap-Cov - Swaroop, Khan, Doshi-Velez 2025, Eq. 21.

    client:  w_k <- argmin l_k(w) + v_k . w - 1/2 w' V_k w + 1/2 ||w - w_g||^2_{S_g}    (SUM loss)
             S_k <- H_k(w_k) - V_k + S_g                                                (the OLD V_k)
             v_k <- v_k + rho (S_k w_k - S_g w_g)
             V_k <- (1 - rho) V_k + rho H_k(w_k)                     = V_k + rho (S_k - S_g)
    server:  S_g <- delta I + sum_k V_k ;   w_g <- S_g^-1 sum_k v_k               over ALL clients
    init:    v_k = 0, V_k = 0, w_g = 0, S_g = delta I

In natural parameters (S w, S): t_k = (v_k, V_k), q = N(0, I/delta) prod_k t_k, and the cavity is q / t_k. H_k
is the GGN of the summed loss, so S_k and S_g stay positive. By default it is diagonal, as in the experiments;
covariance = full uses all of it (Sec. 3.3). A network's posterior is too wide to sample from: w_g predicts.

Local training is Adam by default; each client keeps Adam's moments from round to round (option `carry`).

Wire: 2P down, 2P up. covariance = full: P + P(P+1)/2 each way. The server derives both dual steps itself.

Differs: until the first server update, local training starts from the shared random start. In round 1 the
released code has a received precision of 0; here it is delta. In exact arithmetic S_g and S_g - V_k are at
least delta; where rounding or a lossy codec violates this, they are raised to it, and the stored sums do not
change (`floored` in metrics.jsonl counts entries, or eigenvalues). The full form is exact. rho: see fedlap.

References:
    Swaroop et al. 2025: https://arxiv.org/abs/2501.17325
    docs/references/equations.md#fedlap-cov
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from msgspec import Meta

from fedsim.algorithm import Algorithm, AnyShard, Arrival, At, Context, Step, Task
from fedsim.hyperparameters import Covariance, GgnEstimator, PriorPrecision
from fedsim.learning.gaussian import Gaussian, Point, count_raised
from fedsim.learning.solvers.first_order import LocalTraining, Moments
from fedsim.wire.gaussian_messages import Posterior
from fedsim.wire.schema import Scalar


@dataclass(frozen=True)
class Server:
    """sites: prod_k t_k, with shift = sum v_k (P,), precision = sum V_k (P,) or (P, P), float64."""

    sites: Gaussian
    started: bool


@dataclass(frozen=True)
class Client:
    """site: t_k, with shift = v_k (P,), precision = V_k (P,) or (P, P), float64."""

    site: Gaussian
    moments: Moments | None = None


@dataclass(frozen=True)
class Up(Posterior):
    train_loss: Scalar


@dataclass(frozen=True)
class FedLapCov(Algorithm[Server, Client, Posterior, Up]):
    delta: PriorPrecision = 0.1
    rho: Annotated[Step, Meta(description="damping of the dual step; |S|: the clients asked")] = "1/|S|"
    curvature: GgnEstimator = "exact"
    covariance: Covariance = "diagonal"
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "fedlap_cov"
    paper: ClassVar[str] = "Swaroop, Khan, Doshi-Velez 2025, Eq. 21"
    url: ClassVar[str] = "https://arxiv.org/abs/2501.17325"
    default_model: ClassVar[str] = "mlp_small"
    duals: ClassVar[dict[str, str]] = {"site": "sites"}
    damped_by: ClassVar[str] = "rho"
    folds_stale: ClassVar[bool] = True

    def server_init(self, ctx: Context) -> Server:
        return Server(Gaussian.one(ctx.start, full=self.is_full), started=False)

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client(Gaussian.one(ctx.start, full=self.is_full))

    def posterior(self, sites: Gaussian) -> Gaussian:
        return (sites * Gaussian.isotropic(self.delta)).floored(self.delta)

    def broadcast(self, server: Server, ctx: Context) -> Posterior:
        q = self.posterior(server.sites)
        return Posterior.at(q.mean, q.precision)

    def client_update(
        self, client: Client, down: Posterior, shard: AnyShard, task: Task
    ) -> tuple[Client, Up]:
        cavity, start = (down / client.site).floored(self.delta), task.begin(down.mean)
        fit = task.minimise(
            shard, self.local, start, weight=shard.size, penalties=(cavity,), moments=client.moments
        )
        H = task.curvature(shard, fit.weights, self.curvature, full=self.is_full)
        return replace(client, moments=fit.carried), Up.at(fit.weights, cavity.precision_plus(H), fit.loss)

    def step(self, down: Posterior, up: Up, at: At) -> Gaussian:
        return (up / down) ** (at.value(self.rho) * at.weight)

    def client_commit(self, client: Client, down: Posterior, up: Up, task: Task) -> Client:
        return replace(client, site=client.site * self.step(down, up, task.at))

    def add(self, sites: Gaussian, a: Arrival, ctx: Context) -> Gaussian:
        return sites * self.step(a.down, a.up, a.at)

    def from_sums(self, server: Server, down: Posterior, sites: Gaussian, ctx: Context) -> Server:
        return Server(sites, started=True)

    def model(self, server: Server, ctx: Context) -> Point | Gaussian:
        return self.posterior(server.sites) if server.started else Point(ctx.start)

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        return {"floored": count_raised(server.sites, self.delta)}
