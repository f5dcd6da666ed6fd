"""FedLap - Swaroop, Khan, Doshi-Velez 2025, Eq. 9.

    client:  w_k <- argmin l_k(w) + delta v_k . w + (delta/2) ||w - w_g||^2      (SUM loss)
             v_k <- v_k + rho (w_k - w_g)
    server:  w_g <- sum_k v_k                                                   over ALL clients
    init:    v_k = 0, w_g = 0

In natural parameters: q = N(w_g, I/delta), site t_k = exp(delta v_k . w), cavity q / t_k.

Wire: P down, P up. The server derives rho (w_k - w_g) from the upload and its own broadcast.

Local training is Adam by default; each client keeps Adam's moments from round to round (option `carry`).

Differs: until the first server update, training starts from the random start, as in the released code, while
the proximal centre is w_g = 0, as in the paper. prox_norm = unsquared is that code's (delta/2) ||w - w_g||.
rho is 1/|S|, where |S| clients are asked in a round; the paper, in which all K are, has 1/K (Sec. 4) or N_k/N
(App. E). With 1/K a round of few clients hardly moves the server (docs/participation.md#default-damping).

References:
    Swaroop et al. 2025: https://arxiv.org/abs/2501.17325
    docs/references/equations.md#fedlap
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Arrival, At, Context, Step, Task
from fedsim.hyperparameters import PriorPrecision, ProxNorm
from fedsim.learning.blocks import accumulating
from fedsim.learning.gaussian import Distance, Gaussian, Penalty, Point
from fedsim.learning.solvers.first_order import LocalTraining, Moments
from fedsim.wire.schema import Mean, Scalar


@dataclass(frozen=True)
class Server:
    dual: Tensor
    """sum_k v_k = w_g, (P,) float64."""
    started: bool
    """True after the first server update."""


@dataclass(frozen=True)
class Client:
    dual: Tensor
    """v_k (P,) float64."""
    moments: Moments | None = None


@dataclass(frozen=True)
class Down:
    mean: Mean


@dataclass(frozen=True)
class Up:
    mean: Mean
    train_loss: Scalar


@dataclass(frozen=True)
class FedLap(Algorithm[Server, Client, Down, Up]):
    delta: PriorPrecision = 0.1
    rho: Annotated[Step, Meta(description="damping of the dual step; |S|: the clients asked")] = "1/|S|"
    prox_norm: ProxNorm = "squared"
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "fedlap"
    paper: ClassVar[str] = "Swaroop, Khan, Doshi-Velez 2025, Eq. 9"
    url: ClassVar[str] = "https://arxiv.org/abs/2501.17325"
    default_model: ClassVar[str] = "mlp_small"
    duals: ClassVar[dict[str, str]] = {"dual": "dual"}
    damped_by: ClassVar[str] = "rho"
    folds_stale: ClassVar[bool] = True

    def server_init(self, ctx: Context) -> Server:
        return Server(torch.zeros_like(ctx.start, dtype=torch.float64), started=False)

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client(torch.zeros_like(ctx.start, dtype=torch.float64))

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(server.dual)

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        site = Gaussian(self.delta * client.dual, 0.0)
        penalties: tuple[Penalty, ...]
        if self.prox_norm == "squared":
            penalties = (Gaussian.at(down.mean, self.delta) / site,)
        else:
            penalties = (site**-1, Distance(down.mean, self.delta))
        fit = task.minimise(
            shard,
            self.local,
            task.begin(down.mean),
            weight=shard.size,
            penalties=penalties,
            moments=client.moments,
        )
        return Client(client.dual, fit.carried), Up(fit.weights, fit.loss)

    def client_commit(self, client: Client, down: Down, up: Up, task: Task) -> Client:
        return Client(self.dual_step(client.dual, down, up, at=task.at), client.moments)

    @accumulating
    def dual_step(self, dual: Tensor, down: Down, up: Up, *, at: At) -> Tensor:
        """Add client k's dual step to v_k, or to the sum of all v_k, (P,) float64."""
        return dual + at.value(self.rho) * at.weight * (up.mean.double() - down.mean.double())

    def add(self, dual: Tensor, a: Arrival, ctx: Context) -> Tensor:
        return self.dual_step(dual, a.down, a.up, at=a.at)

    def from_sums(self, server: Server, down: Down, dual: Tensor, ctx: Context) -> Server:
        return Server(dual, started=True)

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.dual if server.started else ctx.start)
