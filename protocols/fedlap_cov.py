"""FedLap-Cov - Swaroop, Khan, Doshi-Velez 2025, Eq. 21.

    client:  w_k <- argmin l_k(w) + v_k . w - 1/2 w' V_k w + 1/2 ||w - w_g||^2_{S_g}    (SUM loss)
             S_k <- H_k(w_k) - V_k + S_g                                                (the OLD V_k)
             v_k <- v_k + rho (S_k w_k - S_g w_g)
             V_k <- (1 - rho) V_k + rho H_k(w_k)                     = V_k + rho (S_k - S_g)
    server:  S_g <- delta I + sum_k V_k ;   w_g <- S_g^-1 sum_k v_k               over ALL clients
    init:    v_k = 0, V_k = 0, w_g = 0, S_g = delta I

In natural parameters (S w, S): t_k = (v_k, V_k), q = N(0, I/delta) prod_k t_k, and the cavity is q / t_k. H_k
is the generalised Gauss-Newton matrix of the summed loss. It is positive semi-definite, so S_k and S_g stay
positive. By default it is diagonal, as in the experiments; covariance = full uses all of it (Sec. 3.3).

By default a network's posterior is too wide to sample from; predictions use the mean, w_g.

Local training is Adam by default; each client keeps Adam's moments from round to round (option `carry`).

Wire: 2P down, 2P up. covariance = full: P + P(P+1)/2 each way. The server derives both dual steps itself.

Differs: until the first server update, local training starts from the shared random start. In round 1 the
released code has a received precision of 0; here it is the paper's delta. In exact arithmetic both S_g and
S_g - V_k are at least delta. Here they are raised to delta where rounding, or a lossy codec that makes V_k
negative, violates this bound; the stored sums do not change. `floored` in metrics.jsonl counts the raised
entries, or eigenvalues, of S_g. `curvature` is of the diagonal form; the full form is exact. rho: see fedlap.

References:
    Swaroop et al. 2025: https://arxiv.org/abs/2501.17325
    docs/references/equations.md#fedlap-cov
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Arrival, At, Context, Exchange, Step, Task
from fedsim.hyperparameters import GgnEstimator, PriorPrecision
from fedsim.learning.blocks import accumulating, elementwise
from fedsim.learning.gaussian import Gaussian, Point, count_raised, raised
from fedsim.learning.solvers.first_order import LocalTraining, Moments
from protocols._site_messages import Covariance, ExponentialFamily, check_covariance, laplace


@dataclass(frozen=True)
class Server:
    sites: Gaussian
    """prod_k t_k: shift = sum v_k, precision = sum V_k, both (P,) float64; a full precision is (P, P)."""
    started: bool


@dataclass(frozen=True)
class Client:
    site: Gaussian
    """t_k: shift = v_k, precision = V_k, both (P,) float64; a full precision is (P, P)."""
    moments: Moments | None = None


@dataclass(frozen=True)
class FedLapCov(Algorithm[Server, Client, Any, Any]):
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
    folds_stale: ClassVar[bool] = True

    @property
    def family(self) -> ExponentialFamily:
        return laplace(self.covariance)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return (self.family.exchange(averages=False),)

    def check(self, params: int) -> None:
        check_covariance(params, self.covariance, "fedlap_cov with --set covariance=diagonal")

    def server_init(self, ctx: Context) -> Server:
        return Server(self.family.isotropic(ctx.start, 0.0), started=False)

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client(self.family.isotropic(ctx.start, 0.0))

    def broadcast(self, server: Server, ctx: Context) -> Any:
        q = self.posterior(server.sites)
        return self.family.down(q.mean, self.family.field(q.precision))

    def client_update(self, client: Client, down: Any, shard: AnyShard, task: Task) -> tuple[Client, Any]:
        fit = task.minimise(
            shard,
            self.local,
            task.begin(down.mean),
            weight=shard.size,
            penalties=(self.cavity(down, client.site, like=shard.like),),
            moments=client.moments,
        )
        H = self.family.curvature(shard, fit.weights, self.curvature, task.rng)
        S = self.local_precision(H, down, client.site)
        return Client(client.site, fit.carried), self.family.up(fit.weights, self.family.field(S), fit.loss)

    @elementwise
    def cavity(self, down: Any, site: Gaussian, *, like: Tensor) -> Gaussian:
        return (self.family.gaussian(down) / site).floored(self.delta).to(like)

    @elementwise
    def local_precision(self, H: Tensor, down: Any, site: Gaussian) -> Tensor:
        S_g = self.family.matrix(down.precision).double()
        return H + raised(S_g - site.precision, self.delta)

    def client_commit(self, client: Client, down: Any, up: Any, task: Task) -> Client:
        return Client(self.dual_step(client.site, down, up, at=task.at), client.moments)

    def dual_damping(self, at: At) -> float:
        return at.value(self.rho)

    @accumulating
    def dual_step(self, sites: Gaussian, down: Any, up: Any, *, at: At) -> Gaussian:
        """Multiply t_k, or the product of all t_k, by client k's dual step (q_k / q_g)^rho; float64."""
        change = self.family.gaussian(up) / self.family.gaussian(down)
        return sites * change ** (at.value(self.rho) * at.weight)

    def add(self, sites: Gaussian, a: Arrival, ctx: Context) -> Gaussian:
        return self.dual_step(sites, a.down, a.up, at=a.at)

    def from_sums(self, server: Server, down: Any, sites: Gaussian, ctx: Context) -> Server:
        return Server(sites, started=True)

    @elementwise
    def posterior(self, sites: Gaussian) -> Gaussian:
        S_g = self.family.identity(sites.shift, self.delta) + sites.precision
        return Gaussian(sites.shift, S_g).floored(self.delta)

    def model(self, server: Server, ctx: Context) -> Point | Gaussian:
        return self.posterior(server.sites) if server.started else Point(ctx.start)

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        return {"floored": count_raised(torch.as_tensor(server.sites.precision), self.delta)}
