"""FedLap-Func - Swaroop, Khan, Doshi-Velez 2025, Eq. 17 (arXiv:2501.17325): FedLap with additional sites in
function space, on a few memory inputs M_k per client.

    client:  w_k <- argmin l_k(w) + delta v_k . w + (delta/2) ||w - w_g||^2                  (SUM loss)
                      - sum_{i in M_k} tau_i l(yhat_i, w) + sum_k' sum_{i in M_k'} tau_i l(yhat_ig, w)
             v_k <- v_k + rho (w_k - w_g) ;   yhat_i <- soft labels of w_k on M_k
    server:  w_g <- argmin sum_k [ sum_{i in M_k} tau_i l(yhat_i, w) - delta v_k . w ] + (delta/2) ||w||^2
    init:    v_k = 0, w_g = 0

    yhat_ig = soft labels of w_g;  tau_i = tau N_kc / M_kc  (points of class c on client k, in its memory)

A client sends its memory inputs and first labels with its first upload. The server sends these inputs to each
other client in the next round in which that client takes part. Until the server has a client's inputs and
labels, no client has a term for this memory. The first round is therefore one of FedLap, as is every round
without memory points. A client that does not take part counts with its last v_k and its last labels.

Wire: P down, P + M C up. Once: M I + 2M down, M I + M up. M counts memory points: the client's own in
uploads, those of all other clients in broadcasts. C is the number of classes, I the size of an input. Clients
compute the labels of w_g. With send_global_labels the server sends them all, as in the paper: P + M C down.

Local training is Adam by default; each client keeps Adam's moments from round to round (option `carry`). The
server's Adam starts anew in every round.

Cost: O((N_k + M) P E) on a client with E epochs, as in the paper (Sec. 3.4): an epoch computes each memory
point's gradient once. The points are divided at random among the minibatches, so each step has an unbiased
estimate of the objective's gradient. (One gradient of all points at the start of each epoch costs the same
but becomes stale: on digits with lr = 0.01 accuracy stays at 0.58 instead of 0.92.) memory_gradient = batch
uses all points in every minibatch, O((N_k + ceil(N_k/B) M) P E), with less noise. It takes 0.39 s instead of
0.28 s (0.17 s without memory) for 600 examples, 85 points, 5 epochs of 19 batches, P = 178,110, one core.

Differs: the paper does not specify the server's optimiser (here Adam, full batch over memory, started at sum
v_k) or the rounds before labels exist (here: no terms). server_steps is 200; the paper's App. E has 5000 (UCI
credit, FashionMNIST), 3000 (MNIST) and 500 (CIFAR-10). rho is 1/|S|; the paper has N_k/N. Clients send
logits, whose softmax gives the soft labels. Until the first server update, training starts from the random
start.

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

from fedsim.algorithm import Algorithm, AnyShard, Arrival, At, Context, Exchange, Step, Task
from fedsim.learning.function_space import Held, MemoryGradient
from fedsim.learning.gaussian import Gaussian, Point
from fedsim.learning.solvers.first_order import LocalTraining, Moments
from protocols._memory import (
    AnyDown,
    Down,
    LabelledDown,
    NewMemory,
    OthersMemory,
    PointsPerClass,
    Registry,
    ServerLr,
    ServerSteps,
    Tau,
    Up,
    function_term,
    label,
    own_memory,
)


@dataclass(frozen=True)
class Server:
    """State of the server. dual: sum_k v_k, mean: w_g, (P,) float64. known: the record of all memory."""

    dual: Tensor
    mean: Tensor
    known: Registry


@dataclass(frozen=True)
class Client:
    """State of a client. dual: v_k, (P,) float64."""

    dual: Tensor
    known: OthersMemory
    moments: Moments | None = None


@dataclass(frozen=True)
class FedLapFunc(Algorithm[Server, Client, AnyDown, Up]):
    delta: Annotated[float, Meta(gt=0, description="precision of the prior N(0, I/delta)")] = 0.1
    rho: Annotated[Step, Meta(description="damping of the dual step; |S|: the clients asked")] = "1/|S|"
    tau: Tau = 1.0
    points_per_class: PointsPerClass = 1
    memory_gradient: MemoryGradient = "epoch"
    server_steps: ServerSteps = 200
    server_lr: ServerLr = 1e-3
    send_global_labels: Annotated[bool, Meta(description="send w_g's labels, as the paper has it")] = False
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "fedlap_func"
    paper: ClassVar[str] = "Swaroop, Khan, Doshi-Velez 2025, Eq. 17"
    url: ClassVar[str] = "https://arxiv.org/abs/2501.17325"
    duals: ClassVar[dict[str, str]] = {"dual": "dual"}
    default_model: ClassVar[str] = "mlp_small"

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return (Exchange(LabelledDown if self.send_global_labels else Down, Up),)

    def sizes_on_wire(self, clients: int, classes: int) -> Mapping[str, int]:
        return {"M": clients * classes * self.points_per_class}

    def server_init(self, ctx: Context) -> Server:
        zero = torch.zeros_like(ctx.start, dtype=torch.float64)
        return Server(zero, zero, Registry.empty(ctx.K))

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client(torch.zeros_like(ctx.start, dtype=torch.float64), OthersMemory(Held.nothing()))

    def broadcast(self, server: Server, ctx: Context) -> AnyDown:
        if not self.send_global_labels:
            return Down(server.mean)
        return LabelledDown(
            server.mean, ctx.net.logits(server.mean.float(), ctx.read(server.known.points.inputs))
        )

    def broadcast_to(self, server: Server, k: int, ctx: Context) -> NewMemory | None:
        return server.known.news_for(k)

    def client_update(self, client: Client, down: AnyDown, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        known, own = client.known.with_news(down.news), own_memory(shard, task, self.points_per_class)
        sent = down.logits if isinstance(down, LabelledDown) else None
        fit = task.minimise(
            shard,
            self.local,
            task.begin(down.mean),
            weight=shard.size,
            penalties=(Gaussian.at(down.mean, self.delta) / Gaussian(self.delta * client.dual, 0.0),),
            moments=client.moments,
            term=function_term(known, own, down.mean, sent, self.tau, shard, task.client),
            memory_gradient=self.memory_gradient,
        )
        logits, new = label(shard, fit.weights, known, own)
        return Client(client.dual, known, fit.carried), Up(fit.weights, logits, fit.loss, new)

    def client_commit(self, client: Client, down: AnyDown, up: Up, task: Task) -> Client:
        dual = client.dual + self.dual_step(down, up, task.at)
        return Client(dual, replace(client.known, logits=up.logits), client.moments)

    def dual_step(self, down: AnyDown, up: Up, at: At) -> Tensor:
        """Return the change of v_k, rho (w_k - w_g), (P,) float64."""
        step: Tensor = up.mean.double() - down.mean.double()
        return at.value(self.rho) * step

    def server_update(
        self, server: Server, down: AnyDown, arrivals: Iterable[Arrival], ctx: Context
    ) -> Server:
        dual, known = server.dual.clone(), server.known
        for a in arrivals:
            dual += self.dual_step(a.down, a.up, a.at)
            known = known.heard(a.client, a.up, ctx.round)
        return Server(dual, self.server_step(dual, known, ctx), known)

    def server_step(self, dual: Tensor, known: Registry, ctx: Context) -> Tensor:
        """Return w_g, (P,) float64; without memory it is sum v_k."""
        cavity = Gaussian(self.delta * dual, self.delta)
        return known.minimise(cavity, dual, self.tau, ctx, self.server_steps, self.server_lr)

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.mean if server.known.started else ctx.start)

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        return {"memory_points": float(len(server.known.points.weights))}
