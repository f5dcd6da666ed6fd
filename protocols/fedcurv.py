"""FedCurv - Shoham et al. 2019, arXiv:1910.07796.

    client j:  w_j <- argmin lbar_j(w) + lam sum_{i != j} (w - w_i)' diag(F_i) (w - w_i), started at w_g
               F_j  = diagonal of the empirical Fisher at w_j, mean over its own examples
    server:    w_g <- sum_j N_j w_j / sum_j N_j   over the participants
               U   <- sum_i F_i ;  W <- sum_i F_i w_i   over ALL clients, with the last F_i and w_i of each

With U and W the penalty is, up to a constant, lam [ w' diag(U - F_j) w - 2 w . (W - F_j w_j) ]. A client
stores its last F_j and F_j w_j to subtract them. It sends w_j and the increments of F_j and F_j w_j, so the
server stores nothing per client. U and W keep the last F_j and F_j w_j of a client that does not take part.

Wire: 3P down, 3P up.

Local training is Adam by default; each client keeps Adam's moments from round to round (option `carry`).
fola uses SGD by default, so set the same optimiser to compare the two.

Differs: in the released code of the Gaussian-product paper, FedCurv's penalty has no gradient, is centred at
the server's mean and includes the client's own data.

References:
    Shoham et al. 2019: https://arxiv.org/abs/1910.07796
    Liu and Zheng 2021: https://arxiv.org/abs/2102.01936v1
    docs/references/equations.md#fedcurv
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Arrival, Context, Task
from fedsim.learning.gaussian import Gaussian, Point
from fedsim.learning.solvers.first_order import LocalTraining, Moments
from fedsim.wire.schema import Count, Curvature, Delta, Mean, Scalar, Shift, Sum


@dataclass(frozen=True)
class Server:
    """State of the server, float64. mean: w_g. fisher: the factor with precision U and shift W."""

    mean: Tensor
    fisher: Gaussian


@dataclass(frozen=True)
class Client:
    """State of a client. fisher: its last factor in U and W, precision F_j and shift F_j w_j, float64."""

    fisher: Gaussian
    moments: Moments | None = None


@dataclass(frozen=True)
class Down:
    mean: Mean
    curvature: Curvature
    shift: Shift


@dataclass(frozen=True)
class Up:
    """Upload of w_j. curvature, shift: the increments of F_j and F_j w_j."""

    mean: Mean
    curvature: Delta
    shift: Delta
    train_loss: Scalar


@dataclass(frozen=True)
class Sums:
    """Sums over clients of N_j w_j, of N_j, of F_j and of F_j w_j."""

    mean: Sum
    weight: Count
    curvature: Sum
    shift: Sum


@dataclass(frozen=True)
class FedCurv(Algorithm[Server, Client, Down, Up]):
    lam: Annotated[float, Meta(ge=0, description="weight of the penalty, whose metric is F_i")] = 1.0
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "fedcurv"
    paper: ClassVar[str] = "Shoham et al. 2019"
    url: ClassVar[str] = "https://arxiv.org/abs/1910.07796"
    duals: ClassVar[dict[str, str]] = {"fisher": "fisher"}
    default_model: ClassVar[str] = "mlp_small"

    def server_init(self, ctx: Context) -> Server:
        return Server(ctx.start.double(), Gaussian.one(ctx.start))

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client(Gaussian.one(ctx.start))

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(server.mean, torch.as_tensor(server.fisher.precision), server.fisher.shift)

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        everyone = Gaussian(down.shift.double(), down.curvature.double())
        others = (everyone / client.fisher) ** (2 * self.lam)
        fit = task.minimise(shard, self.local, down.mean, penalties=(others,), moments=client.moments)
        change = Gaussian.at(fit.weights, shard.mean_fisher(fit.weights)) / client.fisher
        up = Up(fit.weights, torch.as_tensor(change.precision), change.shift, fit.loss)
        return Client(client.fisher, fit.carried), up

    def client_commit(self, client: Client, down: Down, up: Up, task: Task) -> Client:
        return Client(client.fisher * _change(up), client.moments)

    def sums(self, server: Server, down: Down, ctx: Context) -> Sums:
        U = torch.as_tensor(server.fisher.precision).clone()
        return Sums(torch.zeros_like(server.mean), 0, U, server.fisher.shift.clone())

    def add(self, sums: Sums, a: Arrival, ctx: Context) -> Sums:
        mean = sums.mean.add_(a.up.mean, alpha=ctx.sizes[a.client])
        fisher = Gaussian(sums.shift, sums.curvature) * _change(a.up)
        return Sums(mean, sums.weight + ctx.sizes[a.client], torch.as_tensor(fisher.precision), fisher.shift)

    def from_sums(self, server: Server, down: Down, sums: Sums, ctx: Context) -> Server:
        return Server(sums.mean / sums.weight, Gaussian(sums.shift, sums.curvature))

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.mean)


def _change(up: Up) -> Gaussian:
    return Gaussian(up.shift.double(), up.curvature.double())
