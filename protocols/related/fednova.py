"""FedNova - Wang et al. 2020, arXiv:2007.07481: normalised averaging.

    client:  w_k <- T_k steps of SGD on lbar_k, started at w_g
             Delta_k = w_g - w_k = eta * sum_t a_kt g_kt,   a_k = sum_t a_kt = ||a_k||_1
    server:  w_g <- w_g - tau sum_k p_k Delta_k / a_k,      tau = sum_k p_k a_k
             p_k = N_k / sum_k N_k                          over the participants

a_kt is the weight of the gradient of step t in the client's total change. Without momentum a_kt = 1, so a_k
is the number of steps T_k; with momentum rho of SGD a_kt = (1 - rho^(T_k-t+1)) / (1 - rho), so

    a_k = [ T_k - rho (1 - rho^T_k) / (1 - rho) ] / (1 - rho)

FedAvg is the same algorithm with the weights p_k a_k / tau instead of p_k: clients with more steps have more
weight, and the fixed point is not the minimum of sum_k N_k lbar_k. If all a_k are equal, FedNova is FedAvg.
In metrics.jsonl, tau is `effective_steps`.

Wire: P down, P up. An upload also contains a_k, 8 bytes.

Local training is SGD, whose momentum begins at 0 in every round: nothing is carried over. Adam is refused,
because its a_k is not known. With the option `clip`, the g_kt are the clipped gradients.

References:
    Wang et al. 2020: https://arxiv.org/abs/2007.07481
    docs/references/equations.md#fednova
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

import fedsim
from fedsim import Algorithm, AnyShard, Arrival, Context, LocalTraining, Point, Task, Unsent, UsageError

Steps = Annotated[float, fedsim.FieldKind("scalar", (), positive=True, dtype="f64")]


@dataclass(frozen=True)
class Server:
    """State of the server. mean: w_g, (P,) float64."""

    mean: Tensor


@dataclass(frozen=True)
class Client:
    """Empty state: the client keeps nothing."""


@dataclass(frozen=True)
class Down:
    mean: fedsim.Mean


@dataclass(frozen=True)
class Up:
    """Upload of Delta_k, the initial minus the trained weights, and of a_k."""

    delta: fedsim.Delta
    effective_steps: Steps
    train_loss: fedsim.Scalar


@dataclass(frozen=True)
class Sums:
    """Sums over clients of N_k Delta_k / a_k, of N_k a_k and of N_k."""

    direction: fedsim.Sum
    effective_steps: fedsim.Count
    weight: fedsim.Count


@dataclass(frozen=True)
class FedNova(Algorithm[Server, Client, Down, Up]):
    local: LocalTraining = LocalTraining(optimiser="sgd", lr=0.05)

    name: ClassVar[str] = "fednova"
    paper: ClassVar[str] = "Wang et al. 2020, Eq. 6"
    url: ClassVar[str] = "https://arxiv.org/abs/2007.07481"
    default_model: ClassVar[str] = "mlp_small"
    fed_back: ClassVar[tuple[str, ...]] = ("delta",)

    def check(self, params: int) -> None:
        if self.local.optimiser != "sgd":
            raise UsageError("fednova: the normaliser is known for SGD only: optimiser=sgd")

    def unsent(self) -> Unsent:
        raise UsageError("+event: fednova's mean needs a_k, which only an upload tells")

    def effective_steps(self, examples: int) -> float:
        """Return a_k of a client with N_k = `examples`."""
        steps, rho = self.local.steps(examples), self.local.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    def server_init(self, ctx: Context) -> Server:
        return Server(ctx.start.double())

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client()

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(server.mean)

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        fit = task.minimise(shard, self.local, down.mean)
        delta = down.mean.double() - fit.weights.double()
        return client, Up(delta, self.effective_steps(shard.size), fit.loss)

    def add(self, sums: Sums, a: Arrival, ctx: Context) -> Sums:
        weight = ctx.sizes[a.client]
        direction = self.summed(sums.direction, a.up, weight=weight)
        return Sums(direction, sums.effective_steps + weight * a.up.effective_steps, sums.weight + weight)

    @fedsim.accumulating
    def summed(self, direction: Tensor, up: Up, *, weight: int) -> Tensor:
        """Add one client to sum N_k Delta_k / a_k, (P,) float64."""
        return direction.add(up.delta.double() / up.effective_steps, alpha=weight)

    def from_sums(self, server: Server, down: Down, sums: Sums, ctx: Context) -> Server:
        direction, tau = sums.direction / sums.weight, sums.effective_steps / sums.weight
        return Server(server.mean - tau * direction)

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.mean)
