"""ProxSkip for federated learning, Scaffnew - Mishchenko et al. 2022, Algorithm 2 (arXiv:2202.09357).

    every step:  x_k <- x_k - gamma (grad lbar_k(x_k) - h_k)             one minibatch, at all clients
                 then a coin, the same for all clients; with probability p they communicate:
                 x   <- mean of the x_k,   h_k <- h_k + (p/gamma) (x - x_k),   x_k <- x
    init:        x_k = x = the shared random start, h_k = 0

A round consists of the steps up to and including the one that communicates. The number of steps T is
geometric with mean 1/p. All clients draw it from the same random stream of the round; in metrics.jsonl it is
`local_steps`. A client therefore uploads once in T gradient steps, on average p times per step.

A client learns the new x only from the next broadcast. It stores s_k, with h_k = (p/gamma) (x + s_k). Client
and server compute

    client, server:  s_k <- s_k + x - x_k                  x: the broadcast, x_k: the upload
    server:          x   <- -(1/K) sum_k s_k               over ALL clients, so that sum_k h_k = 0

With full participation the new x is the mean of the x_k. The fixed point is the minimum of sum_k lbar_k, in
which all clients have equal weight, however different the clients are.

Wire: P down, P up.

Local training is plain SGD with a constant step gamma; none of its state is carried over to the next round.

Differs: in the paper all clients take part in every round. Here x_k = x for a client that does not take part,
so x moves by |S|/K of the participants' mean change. The fixed point is the same.

References:
    Mishchenko et al. 2022: https://arxiv.org/abs/2202.09357
    docs/references/equations.md#proxskip
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, ClassVar

from msgspec import Meta
from torch import Tensor

import fedsim
from fedsim import Algorithm, AnyShard, Arrival, Context, Point, RandomStream, Task


@dataclass(frozen=True)
class Server:
    """State of the server. dual: sum_k s_k over all clients, (P,) float64."""

    dual: Tensor


@dataclass(frozen=True)
class Client:
    """State of a client. dual: s_k, (P,) float64."""

    dual: Tensor


@dataclass(frozen=True)
class Down:
    mean: fedsim.Mean


@dataclass(frozen=True)
class Up:
    """Upload of x_k after the last step."""

    mean: fedsim.Mean
    train_loss: fedsim.Scalar


@dataclass(frozen=True)
class ProxSkip(Algorithm[Server, Client, Down, Up]):
    p: Annotated[float, Meta(gt=0, le=1, description="probability that a local step is the round's last")] = (
        0.04
    )
    lr: Annotated[float, Meta(gt=0, description="gamma, the step, the same in all rounds")] = 0.05
    batch_size: Annotated[
        int, Meta(ge=1, description="examples per local step; the last batch of a pass may have fewer")
    ] = 32

    name: ClassVar[str] = "proxskip"
    paper: ClassVar[str] = "Mishchenko et al. 2022, Algorithm 2"
    url: ClassVar[str] = "https://arxiv.org/abs/2202.09357"
    duals: ClassVar[dict[str, str]] = {"dual": "dual"}
    default_model: ClassVar[str] = "mlp_small"

    def steps(self, rng: RandomStream) -> int:
        """Draw the number of steps T of a round; all random streams of the round give the same number."""
        return int(rng.shared("coin").numpy("steps").geometric(self.p))

    def server_init(self, ctx: Context) -> Server:
        return Server(-ctx.K * ctx.start.double())

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client(-ctx.start.double())

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(self.model(server, ctx).mean)

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        x, total, seen = down.mean.clone(), 0.0, 0
        control = (self.p / self.lr * (down.mean.double() + client.dual)).to(x)
        with shard.noise(task.rng.key("dropout")):
            batches = fedsim.endless_batches(shard, self.batch_size, task.rng)
            for batch in islice(batches, self.steps(task.rng)):
                gradient, loss = batch.loss_gradient(x)
                x = x - self.lr * (gradient - control)
                total, seen = total + loss * batch.size, seen + batch.size
        return client, Up(x, total / seen)

    def client_commit(self, client: Client, down: Down, up: Up, task: Task) -> Client:
        return Client(self.dual_step(client.dual, down, up))

    @fedsim.accumulating
    def dual_step(self, dual: Tensor, down: Down, up: Up) -> Tensor:
        """Add client k's dual step to s_k, or to the sum of all s_k, (P,) float64."""
        return dual + (down.mean.double() - up.mean.double())

    def add(self, dual: Tensor, a: Arrival, ctx: Context) -> Tensor:
        return self.dual_step(dual, a.down, a.up)

    def from_sums(self, server: Server, down: Down, dual: Tensor, ctx: Context) -> Server:
        return Server(dual)

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(-server.dual / ctx.K)

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        return {"local_steps": float(self.steps(ctx.rng))}
