"""FedLap-Cov - Swaroop, Khan, Doshi-Velez 2025, Eq. 21.

    client:  w_k <- argmin l_k(w) + v_k . w - 1/2 w' V_k w + 1/2 ||w - w_g||^2_{S_g}    (SUM loss)
             S_k <- H_k(w_k) - V_k + S_g                                                (the OLD V_k)
             v_k <- v_k + rho (S_k w_k - S_g w_g)
             V_k <- (1 - rho) V_k + rho H_k(w_k)                     = V_k + rho (S_k - S_g)
    server:  S_g <- delta I + sum_k V_k ;   w_g <- S_g^-1 sum_k v_k               over ALL clients
    init:    v_k = 0, V_k = 0, w_g = 0, S_g = delta I

In natural parameters (S w, S): t_k = (v_k, V_k), q = N(0, I/delta) prod_k t_k, and the cavity is q / t_k. H_k
is the generalised Gauss-Newton matrix of the summed loss, positive semi-definite, so that S_k and S_g stay
positive: its diagonal, as in the experiments, or with covariance = full all of it (Sec. 3.3).

By default the posterior of a network is too wide to sample from: predictions are those of the mean, w_g.

Local training is Adam by default, whose moments live with the client over rounds (carry).

Wire: 2P down, 2P up. covariance = full: P + P(P+1)/2 each way. The server derives both dual steps itself.

Differs: local training starts from ctx.start until something has been folded. The released code has
received precision 0 in round 1; the paper's delta is used here. S_g and S_g - V_k are at least delta in
exact arithmetic; they are floored there, because the broadcast is rounded and a lossy codec on S_k may make
V_k negative; `floored` in metrics.jsonl counts the entries of S_g, or its eigenvalues. The sums stay as they
are. `curvature` is of the diagonal form; the full one is always exact.

References:
    Swaroop et al. 2025: https://arxiv.org/abs/2501.17325
    docs/references/equations.md#fedlap-cov
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from fedsim.algorithm import Algorithm, AnyShard, At, Context, Exchange, Step, Task
from fedsim.hyperparameters import GgnEstimator, PriorPrecision
from fedsim.learning.blocks import by_blocks
from fedsim.learning.gaussian import Gaussian, Point, product
from fedsim.learning.ownership import spent
from fedsim.learning.solvers.first_order import LocalTraining, Moments, minimise
from protocols._laplace_forms import Covariance, Form, check_covariance, form


@dataclass(frozen=True)
class Server:
    sites: Gaussian
    """prod_k t_k: shift = sum v_k, precision = sum V_k, both float64, (P,), V_k full (P, P)."""
    started: bool


@dataclass(frozen=True)
class Client:
    site: Gaussian
    """t_k: shift = v_k, precision = V_k, both float64, (P,), V_k full (P, P)."""
    moments: Moments | None = None


@dataclass(frozen=True)
class FedLapCov(Algorithm[Server, Client, Any, Any]):
    delta: PriorPrecision = 0.1
    rho: Annotated[Step, Meta(description="damping of the dual step; |S|: the clients asked")] = "1/K"
    curvature: GgnEstimator = "exact"
    covariance: Covariance = "diagonal"
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "fedlap_cov"
    paper: ClassVar[str] = "Swaroop, Khan, Doshi-Velez 2025, Eq. 21"
    url: ClassVar[str] = "https://arxiv.org/abs/2501.17325"
    default_model: ClassVar[str] = "mlp_small"
    folds_stale: ClassVar[bool] = True

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return (Exchange(self.form.down, self.form.up, self.form.sums),)

    @property
    def form(self) -> Form:
        return form(self.covariance)

    def check(self, params: int) -> None:
        check_covariance(params, self.covariance, "fedlap_cov with --set covariance=diagonal")

    def server_init(self, ctx: Context) -> Server:
        return Server(self.form.one(ctx.start), started=False)

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client(self.form.one(ctx.start))

    def broadcast(self, server: Server, ctx: Context) -> Any:
        q = self.form.posterior(server.sites, self.delta)
        return self.form.down(q.mean, self.form.field(q.precision))

    def client_update(self, client: Client, down: Any, shard: AnyShard, task: Task) -> tuple[Client, Any]:
        fit = minimise(
            shard,
            down.mean if task.started else task.start,
            how=self.local,
            rng=task.rng,
            round=task.round,
            weight=shard.size,
            penalties=(by_blocks(lambda *q: self.cavity(*q).to(shard.like), down, client.site),),
            moments=client.moments,
        )
        H = self.form.curvature(shard, fit.weights, self.curvature, task.rng)
        S = by_blocks(partial(self.form.local, self.delta), H, down, client.site)
        return Client(client.site, fit.carried), self.form.up(fit.weights, self.form.field(S), fit.loss)

    def cavity(self, down: Any, site: Gaussian) -> Gaussian:
        return self.form.floored(self.form.gaussian(down) / site, self.delta)

    def client_commit(self, client: Client, down: Any, up: Any, task: Task) -> Client:
        site = by_blocks(partial(self.stepped, task.at), client.site, down, up, out=spent(client.site))
        return Client(site, client.moments)

    def stepped(self, at: At, sites: Gaussian, down: Any, up: Any) -> Gaussian:
        """t_k, or the product of all, after client k's dual step (q_k / q_g)^rho; float64."""
        change = self.form.gaussian(up) / self.form.gaussian(down)
        return sites * change ** (at.value(self.rho) * at.weight)

    def sums(self, server: Server, down: Any, ctx: Context) -> Gaussian:
        return server.sites**1

    def no_sums(self, down: Any, ctx: Context) -> Gaussian:
        return self.form.one(ctx.start)

    def add(self, sums: Gaussian, down: Any, k: int, up: Any, ctx: Context) -> Gaussian:
        return by_blocks(partial(self.stepped, ctx.at(k)), sums, down, up, out=sums)

    def from_sums(self, server: Server, down: Any, sums: Gaussian, ctx: Context) -> Server:
        return Server(sums, started=True)

    def sums_message(self, sums: Gaussian) -> Any:
        return self.form.sums(sums.shift, self.form.field(sums.precision))

    def merged(self, sums: Gaussian, sent: Any) -> Gaussian:
        return sums * self.form.natural(sent)

    def dual_mismatch(self, server: Server, clients: Iterable[Client]) -> float:
        return server.sites.mismatch(product(c.site for c in clients))

    def model(self, server: Server, ctx: Context) -> Point | Gaussian:
        return self.form.posterior(server.sites, self.delta) if server.started else Point(ctx.start)

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        return {"floored": self.form.lost(server.sites, self.delta)}
