"""FedAvg - McMahan et al. 2017, arXiv:1602.05629.

    client:  w_k <- E epochs of minibatch steps on lbar_k, started at w_g
    server:  w_g <- sum_k N_k w_k / sum_k N_k                    over the participants

Wire: P down, P up.

Local training is Adam by default; each client keeps Adam's moments from round to round (option `carry`), as
in the released code of the ADMM papers. McMahan et al. use SGD: --set optimiser=sgd.

References:
    McMahan et al. 2017: https://arxiv.org/abs/1602.05629
    docs/references/equations.md#fedavg
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedsim.algorithm import Algorithm, AnyShard, Arrival, Context, Task
from fedsim.learning.gaussian import Point
from fedsim.learning.solvers.first_order import LocalTraining
from protocols._averaging import DAMPING, Client, Down, Server, Up, WeightedSum, add_weights, mean_weights


@dataclass(frozen=True)
class FedAvg(Algorithm[Server, Client, Down, Up]):
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al. 2017, Algorithm 1"
    url: ClassVar[str] = "https://arxiv.org/abs/1602.05629"
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
        fit = task.minimise(shard, self.local, down.mean, moments=client.moments)
        return Client(fit.carried), Up(fit.weights, fit.loss)

    def add(self, sums: WeightedSum, a: Arrival, ctx: Context) -> WeightedSum:
        return add_weights(sums, a, ctx)

    def from_sums(self, server: Server, down: Down, sums: WeightedSum, ctx: Context) -> Server:
        return Server(mean_weights(server.mean, sums, ctx))

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.mean)
