"""FedPD - Zhang et al. 2020, Algorithm 1 (arXiv:2005.11418).

    every iteration, at all clients, with their own copy x_0k of the server's x_0:
        x_k <- argmin lbar_k(x) + lambda_k . (x - x_0k) + ||x - x_0k||^2 / (2 eta),     started at x_k
        lambda_k <- lambda_k + (x_k - x_0k) / eta
        z_k <- x_k + eta lambda_k
        then a coin, the same for all clients: with probability p they communicate,
            x_0 <- mean of the z_k,   x_0k <- x_0
        otherwise x_0k <- z_k
    init:  lambda_k = 0, x_k = x_0 = the shared random start

A round consists of the iterations up to and including the one that communicates. Their number is geometric
with mean 1/p. All clients draw it from the same random stream of the round; in metrics.jsonl it is
`local_iterations`. An iteration is one local training, so one upload costs that many trainings.

With p = 1 this is FedADMM of mean losses with rho = 1/eta (protocols/fedadmm.py, form = mean, silent = last).
Its limit is x*, the minimum of sum_k lbar_k, in which all clients have equal weight. With p < 1, x* is a
fixed point only if all gradients grad lbar_k(x*) are 0: after a skipped communication x_0k is x* + eta
lambda_k, with lambda_k = -grad lbar_k(x*). The limit therefore comes closer to x* as eta decreases.

Wire: P down, P up. Clients send the change of z_k, because the server keeps only the sum of all z_k.

Local training is Adam by default. Its moments are carried over from iteration to iteration and, with the
option `carry`, from round to round.

Differs: p is the probability of communicating; the paper's p is the probability of skipping, 1 - p here. In
the paper all clients take part in every round. Here a client that does not take part counts with its last
z_k, or with the start before its first upload.

References:
    Zhang et al. 2020: https://arxiv.org/abs/2005.11418
    docs/references/equations.md#fedpd
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from msgspec import Meta
from torch import Tensor

import fedsim
from fedsim import Algorithm, AnyShard, Arrival, Context, Gaussian, LocalTraining, Point, RandomStream, Task


@dataclass(frozen=True)
class Server:
    """State of the server. total: sum_k z_k over all clients, (P,) float64."""

    total: Tensor


@dataclass(frozen=True)
class Client:
    """State of a client, (P,). sent: the server's z_k, dual: lambda_k, float64. weights: x_k, float32."""

    sent: Tensor
    dual: Tensor
    weights: Tensor
    moments: fedsim.Moments | None = None


@dataclass(frozen=True)
class Down:
    mean: fedsim.Mean


@dataclass(frozen=True)
class Up:
    """Upload of the change of z_k."""

    delta: fedsim.Delta
    train_loss: fedsim.Scalar


@dataclass(frozen=True)
class FedPD(Algorithm[Server, Client, Down, Up]):
    p: Annotated[float, Meta(gt=0, le=1, description="probability that an iteration is the round's last")] = (
        0.5
    )
    eta: Annotated[float, Meta(gt=0, description="the penalty is |x - x_0|^2 / (2 eta)")] = 10.0
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "fedpd"
    paper: ClassVar[str] = "Zhang et al. 2020, Algorithm 1"
    url: ClassVar[str] = "https://arxiv.org/abs/2005.11418"
    duals: ClassVar[dict[str, str | None]] = {"sent": "total", "dual": None}
    default_model: ClassVar[str] = "mlp_small"

    def iterations(self, rng: RandomStream) -> int:
        """Draw the number of iterations of a round; all random streams of the round give the same number."""
        return int(rng.shared("coin").numpy("iterations").geometric(self.p))

    def server_init(self, ctx: Context) -> Server:
        return Server(ctx.K * ctx.start.double())

    def client_init(self, ctx: Context, k: int) -> Client:
        start = ctx.start.double()
        return Client(start, start.new_zeros(start.shape), ctx.start.clone())

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(server.total / ctx.K)

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        centre, dual, x = down.mean.double(), client.dual, client.weights
        within = replace(self.local, carry=True)  # within a round, Adam's moments are always carried over
        moments = client.moments if self.local.carry else None
        for i in range(self.iterations(task.rng)):
            fit = fedsim.minimise(
                shard,
                x,
                how=within,
                rng=task.rng.part(i),
                round=task.round,
                penalties=(Gaussian.at(centre, 1 / self.eta) * Gaussian(-dual, 0.0),),
                moments=moments,
            )
            x, moments = fit.weights, fit.carried
            dual = dual + (x.double() - centre) / self.eta
            centre = x.double() + self.eta * dual
        kept = moments if self.local.carry else None
        return Client(client.sent, dual, x, kept), Up(centre - client.sent, fit.loss)

    def client_commit(self, client: Client, down: Down, up: Up, task: Task) -> Client:
        return Client(self.changed(client.sent, up), client.dual, client.weights, client.moments)

    @fedsim.accumulating
    def changed(self, z: Tensor, up: Up) -> Tensor:
        """Add client k's upload, the change of z_k, to z_k or to the sum of all z_k."""
        return z + up.delta.double()

    def add(self, total: Tensor, a: Arrival, ctx: Context) -> Tensor:
        return self.changed(total, a.up)

    def from_sums(self, server: Server, down: Down, total: Tensor, ctx: Context) -> Server:
        return Server(total)

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.total / ctx.K)

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        return {"local_iterations": float(self.iterations(ctx.rng))}
