"""FedProx - Li et al. 2020 (arXiv:1812.06127), as in the FedLap paper, Eq. 2 with v_k = 0.

    client:  w_k <- argmin lbar_k(w) + (delta/2) ||w - w_g||^2          (mean-loss scale)
    server:  w_g <- sum_k N_k w_k / sum_k N_k                           over the participants

Wire: P down, P up.

Local training is Adam by default; each client keeps Adam's moments from round to round (option `carry`).

Differs: the server of Eq. 2 with v_k = 0 takes the unweighted mean; here the mean is weighted by N_k, as in
the FedLap paper's released code. That code has no proximal term in round 1; here the proximal centre is the
broadcast in every round, in round 1 the initial model. prox_norm = unsquared uses (delta/2) ||w - w_g||, as
in that code.

References:
    Li et al. 2020: https://arxiv.org/abs/1812.06127
    Swaroop et al. 2025: https://arxiv.org/abs/2501.17325
    docs/references/equations.md#fedprox
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fedsim.algorithm import Algorithm, AnyShard, Arrival, Context, Task
from fedsim.hyperparameters import ProxNorm
from fedsim.learning.gaussian import Distance, Gaussian, Point
from fedsim.learning.solvers.first_order import LocalTraining
from protocols._averaging import DAMPING, Client, Down, Server, Up, WeightedSum, add_weights, mean_weights


@dataclass(frozen=True)
class FedProx(Algorithm[Server, Client, Down, Up]):
    delta: Annotated[float, Meta(ge=0, description="weight of the proximal term; 0: FedAvg")] = 0.01
    prox_norm: ProxNorm = "squared"
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "fedprox"
    paper: ClassVar[str] = "Li et al. 2020; FedLap paper, Eq. 2 with v_k = 0"
    url: ClassVar[str] = "https://arxiv.org/abs/1812.06127"
    default_model: ClassVar[str] = "mlp_small"
    folds_stale: ClassVar[bool] = True
    stale_damping: ClassVar[float] = DAMPING

    def server_init(self, ctx: Context) -> Server:
        return Server(ctx.start.double())

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client()

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(server.mean)

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        squared = self.prox_norm == "squared"
        prox = Gaussian.at(down.mean, self.delta) if squared else Distance(down.mean, self.delta)
        fit = task.minimise(shard, self.local, down.mean, penalties=(prox,), moments=client.moments)
        return Client(fit.carried), Up(fit.weights, fit.loss)

    def add(self, sums: WeightedSum, a: Arrival, ctx: Context) -> WeightedSum:
        return add_weights(sums, a, ctx)

    def from_sums(self, server: Server, down: Down, sums: WeightedSum, ctx: Context) -> Server:
        return Server(mean_weights(server.mean, sums, ctx))

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.mean)
