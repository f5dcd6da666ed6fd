"""FedLap-Func on public inputs - Swaroop, Khan, Doshi-Velez 2025, Sec. 3.4 (arXiv:2501.17325): Eq. 17 with
one set U of M unlabelled inputs, which the server and all clients have, instead of the memory points M_k.

    client:  w_k <- argmin l_k(w) + delta v_k . w + (delta/2) ||w - w_g||^2                  (SUM loss)
                      + (tau/M) sum_{i in U} [ N_heard l(yhat_ig, w) - N_k l(yhat_ik, w) ]
             v_k <- v_k + rho (w_k - w_g) ;   yhat_ik <- soft labels of w_k on U
    server:  w_g <- argmin sum_k [ (tau/M) sum_{i in U} N_k l(yhat_ik, w) - delta v_k . w ] + (delta/2)||w||^2
    init:    v_k = 0, w_g = 0

    yhat_ig = soft labels of w_g;  N_heard = sum of N_k over the clients whose labels the server has

The weights of a client's points sum to tau N_k, as in fedlap_func. The term of client k is left out until the
server has its first labels. So the first round equals FedLap's, and with public = 0 or tau = 0 every round
does. A client that does not take part counts with its last v_k and its last labels.

U consists of `public` random training inputs, drawn from all clients' examples before round 1. They are
removed from the clients' data, and their labels are not used. No test input is used, and no bytes are sent
for U.

Wire: P down, P + M C up. C is the number of classes. The inputs are not sent.

Cost: O((N_k + M) P E) on a client, as in fedlap_func; the server keeps K M C labels.

Local training is Adam by default; each client keeps Adam's moments from round to round (option `carry`).

Differs: the paper suggests this set and reports no results for it. The server's optimiser and the defaults
are as in fedlap_func.

References:
    Swaroop et al. 2025: https://arxiv.org/abs/2501.17325
    docs/references/equations.md#fedlap-func
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Arrival, At, Context, Step, Task
from fedsim.hyperparameters import PriorPrecision
from fedsim.learning.function_space import FunctionTerm, MemoryGradient
from fedsim.learning.gaussian import Gaussian, Point
from fedsim.learning.solvers.first_order import LocalTraining, Moments, minimise_memory
from fedsim.wire.schema import Logits, Mean, Scalar
from protocols._memory import ServerLr, ServerSteps, Tau


@dataclass(frozen=True)
class Server:
    """State of the server. dual: sum_k v_k, mean: w_g, both (P,) float64. logits (K, M, C): the clients' last
    labels. heard (K,) int64: N_k of a client that has sent labels, else 0."""

    dual: Tensor
    mean: Tensor
    logits: Tensor
    heard: Tensor


@dataclass(frozen=True)
class Client:
    """State of a client. dual: v_k (P,) float64. logits (M, C): its last labels at the server, or None."""

    dual: Tensor
    logits: Tensor | None = None
    moments: Moments | None = None


@dataclass(frozen=True)
class Down:
    mean: Mean
    heard: Scalar


@dataclass(frozen=True)
class Up:
    mean: Mean
    logits: Logits
    train_loss: Scalar


@dataclass(frozen=True)
class FedLapFuncPublic(Algorithm[Server, Client, Down, Up]):
    delta: PriorPrecision = 0.1
    rho: Annotated[Step, Meta(description="damping of the dual step; |S|: the clients asked")] = "1/|S|"
    tau: Tau = 1.0
    public: Annotated[int, Meta(ge=0, description="training inputs that are taken away and public")] = 100
    memory_gradient: MemoryGradient = "epoch"
    server_steps: ServerSteps = 200
    server_lr: ServerLr = 1e-3
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "fedlap_func_public"
    paper: ClassVar[str] = "Swaroop, Khan, Doshi-Velez 2025, Sec. 3.4, Eq. 17"
    url: ClassVar[str] = "https://arxiv.org/abs/2501.17325"
    duals: ClassVar[dict[str, str]] = {"dual": "dual"}
    default_model: ClassVar[str] = "mlp_small"

    @property
    def public_inputs(self) -> int:
        return self.public

    def sizes_on_wire(self, clients: int, classes: int) -> Mapping[str, int]:
        return {"M": self.public}

    def server_init(self, ctx: Context) -> Server:
        zero = torch.zeros_like(ctx.start, dtype=torch.float64)
        return Server(zero, zero, torch.zeros(0), torch.zeros(ctx.K, dtype=torch.int64))

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client(torch.zeros_like(ctx.start, dtype=torch.float64))

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(server.mean, float(server.heard.sum()))

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        fit = task.minimise(
            shard,
            self.local,
            task.begin(down.mean),
            weight=shard.size,
            penalties=(Gaussian.at(down.mean, self.delta) / Gaussian(self.delta * client.dual, 0.0),),
            moments=client.moments,
            term=self.term(client, down, shard, task.public),
            memory_gradient=self.memory_gradient,
        )
        up = Up(fit.weights, shard.logits(fit.weights, task.public), fit.loss)
        return replace(client, moments=fit.carried), up

    def term(self, client: Client, down: Down, shard: AnyShard, public: Tensor) -> FunctionTerm | None:
        """Return the function term: N_heard times the soft labels of w_g, minus N_k times the client's."""
        if not down.heard or not len(public) or self.tau == 0:
            return None
        labels = down.heard * shard.logits(down.mean, public).softmax(dim=1)
        if client.logits is not None:
            labels = labels - shard.size * client.logits.softmax(dim=1)
        weights = labels.new_full((len(public),), self.tau / len(public))
        return FunctionTerm(shard.floats(public), labels, weights)

    def client_commit(self, client: Client, down: Down, up: Up, task: Task) -> Client:
        return Client(client.dual + self.dual_step(down, up, task.at), up.logits, client.moments)

    def dual_step(self, down: Down, up: Up, at: At) -> Tensor:
        """Return the change of v_k, rho (w_k - w_g), (P,) float64."""
        step: Tensor = up.mean.double() - down.mean.double()
        return at.value(self.rho) * step

    def server_update(self, server: Server, down: Down, arrivals: Iterable[Arrival], ctx: Context) -> Server:
        dual, heard, logits = server.dual.clone(), server.heard.clone(), server.logits.clone()
        for a in arrivals:
            dual += self.dual_step(a.down, a.up, a.at)
            logits = logits if len(logits) else torch.zeros(ctx.K, *a.up.logits.shape)
            logits[a.client], heard[a.client] = a.up.logits, ctx.sizes[a.client]
        return Server(dual, self.server_step(dual, logits, heard, ctx), logits, heard)

    def server_step(self, dual: Tensor, logits: Tensor, heard: Tensor, ctx: Context) -> Tensor:
        """Return w_g, (P,) float64; without public inputs it is sum v_k. The labels of all clients add up."""
        if not len(ctx.public) or self.tau == 0:
            return dual
        labels = (heard[:, None, None] * logits.softmax(dim=2)).sum(dim=0)
        inputs = ctx.read(ctx.public)
        term = FunctionTerm(inputs, labels, labels.new_full((len(inputs),), self.tau / len(inputs)))
        cavity = Gaussian(self.delta * dual, self.delta)
        return minimise_memory(
            ctx.net, dual.float(), term, cavity, steps=self.server_steps, lr=self.server_lr
        ).double()

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.mean if bool(server.heard.any()) else ctx.start)
