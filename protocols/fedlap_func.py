"""FedLap-Func - Swaroop, Khan, Doshi-Velez 2025, Eq. 17 (arXiv:2501.17325): FedLap whose sites also
are in function space, on a few memory inputs M_k per client.

    client:  w_k <- argmin l_k(w) + delta v_k . w + (delta/2) ||w - w_g||^2                  (SUM loss)
                      - sum_{i in M_k} tau_i l(yhat_i, w) + sum_k' sum_{i in M_k'} tau_i l(yhat_ig, w)
             v_k <- v_k + rho (w_k - w_g) ;   yhat_i <- soft labels of w_k on M_k
    server:  w_g <- argmin sum_k [ sum_{i in M_k} tau_i l(yhat_i, w) - delta v_k . w ] + (delta/2) ||w||^2
    init:    v_k = 0, w_g = 0

    yhat_ig = soft labels of w_g;  tau_i = tau N_kc / M_kc  (points of class c on client k, in its memory)

A client's inputs and first labels go up with its first upload; the server passes inputs on to the clients
that lack them, each with the next round in which it takes part. Until a client's inputs and labels are there,
no client has a term for its memory; so the first round is FedLap's, and without memory
points every round is. A silent client counts with its last v_k and its last labels.

Wire: P down, P + M C up. Once: M I + 2M down, M I + M up. M is the number of memory points: a client's own
going up, everyone else's coming down. The labels of w_g are computed by the client from w_g; with
send_global_labels they are sent, as the paper has it: P + M C down, M all points.

Local training is Adam by default, whose moments live with the client over rounds (carry). The server's Adam
begins anew in every round.

Differs: the paper leaves open the server's optimiser (here Adam, full batch over memory, started at
sum v_k) and what happens before labels exist (here nothing). Logits go up; soft labels are their softmax.
Training starts from ctx.start until something has been folded.

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

from fedsim.algorithm import Algorithm, AnyShard, At, Context, Exchange, Step, Task
from fedsim.learning.function_space import FunctionTerm, Held, Memory
from fedsim.learning.gaussian import Gaussian, Point, product
from fedsim.learning.solvers.first_order import LocalTraining, minimise, minimise_memory
from fedsim.seeds import RandomStream
from protocols._memory import (
    AnyDown,
    Client,
    Down,
    LabelledDown,
    NewMemory,
    OwnMemory,
    Server,
    Up,
    news_for,
    with_labels,
)


@dataclass(frozen=True)
class FedLapFunc(Algorithm[Server, Client, AnyDown, Up]):
    delta: Annotated[float, Meta(gt=0, description="precision of the prior N(0, I/delta)")] = 0.1
    rho: Annotated[Step, Meta(description="damping of the dual step; |S|: the clients asked")] = "1/K"
    tau: Annotated[float, Meta(ge=0, description="weight of the memory points; 0: none")] = 1.0
    points_per_class: Annotated[int, Meta(ge=0, description="memory points of a client per class")] = 1
    server_steps: Annotated[int, Meta(ge=1, description="steps of Adam on the server, per round")] = 200
    server_lr: Annotated[float, Meta(gt=0, description="learning rate of these steps")] = 1e-3
    send_global_labels: Annotated[bool, Meta(description="send w_g's labels, as the paper has it")] = False
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "fedlap_func"
    paper: ClassVar[str] = "Swaroop, Khan, Doshi-Velez 2025, Eq. 17"
    url: ClassVar[str] = "https://arxiv.org/abs/2501.17325"
    default_model: ClassVar[str] = "mlp_small"

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return (Exchange(LabelledDown if self.send_global_labels else Down, Up),)

    def sizes_on_wire(self, clients: int, classes: int) -> Mapping[str, int]:
        return {"M": clients * classes * self.points_per_class}

    def server_init(self, ctx: Context) -> Server:
        zero, none = torch.zeros_like(ctx.start, dtype=torch.float64), torch.zeros(ctx.K, dtype=torch.int64)
        return Server(zero, zero, Held.nothing(), torch.zeros(0, 0), none, none)

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client(torch.zeros_like(ctx.start, dtype=torch.float64), Held.nothing())

    def broadcast(self, server: Server, ctx: Context) -> AnyDown:
        if not self.send_global_labels:
            return Down(server.mean)
        logits = ctx.net.logits(server.mean.float(), ctx.read(server.memory.inputs))
        return LabelledDown(server.mean, logits)

    def broadcast_to(self, server: Server, k: int, ctx: Context) -> NewMemory | None:
        return news_for(server, k)

    def client_update(self, client: Client, down: AnyDown, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        if down.news is not None:
            news = Held(down.news.inputs, down.news.weights, down.news.owners)
            client = replace(client, held=client.held.joined(news))
        draws = RandomStream(task.rng.seed, "memory", 0, task.client).torch("points")
        own = shard.memory(self.points_per_class, draws)
        fit = minimise(
            shard,
            down.mean if task.started else task.start,
            how=self.local,
            rng=task.rng,
            round=task.round,
            weight=shard.size,
            penalties=(Gaussian.at(down.mean, self.delta) / Gaussian(self.delta * client.dual, 0.0),),
            moments=client.moments,
            term=self.term(client, down, own, shard, task),
        )
        logits = shard.logits(fit.weights, own.inputs)
        sent = OwnMemory(own.inputs, own.weights) if client.logits is None else None
        return replace(client, moments=fit.carried), Up(fit.weights, logits, fit.loss, sent)

    def term(
        self, client: Client, down: AnyDown, own: Memory, shard: AnyShard, task: Task
    ) -> FunctionTerm | None:
        """Both function terms: the soft labels of w_g on all memory, less the client's own on its own."""
        known = client.held
        if client.logits is not None:
            known = known.joined(Held.of(own.inputs, own.weights, task.client))
        if not len(known.weights) or self.tau == 0:
            return None
        labels = (
            down.logits if isinstance(down, LabelledDown) else shard.logits(down.mean, known.inputs)
        ).softmax(dim=1)
        if client.logits is not None:
            labels[known.owners == task.client] -= client.logits.softmax(dim=1)
        return FunctionTerm(shard.floats(known.inputs), labels, self.tau * known.weights)

    def client_commit(self, client: Client, down: AnyDown, up: Up, task: Task) -> Client:
        dual = client.dual + self.dual_step(down, up, task.at)
        return replace(client, dual=dual, logits=up.logits)

    def dual_step(self, down: AnyDown, up: Up, at: At) -> Tensor:
        """rho (w_k - w_g), (P,) float64."""
        step: Tensor = up.mean.double() - down.mean.double()
        return at.value(self.rho) * step

    def server_update(
        self, server: Server, down: AnyDown, ups: Iterable[tuple[int, Up]], ctx: Context
    ) -> Server:
        dual, memory, labels = server.dual.clone(), server.memory, server.logits
        arrived, synced = server.arrived.clone(), server.synced.clone()
        for k, up in ups:
            dual += self.dual_step(down, up, ctx.at(k))
            synced[k] = ctx.round
            arrived[k] = arrived[k] if up.own is None else ctx.round
            memory, labels = with_labels(memory, labels, k, up)
        mean = self.server_step(dual, memory, labels, ctx)
        return Server(dual, mean, memory, labels, arrived, synced)

    def server_step(self, dual: Tensor, memory: Held, labels: Tensor, ctx: Context) -> Tensor:
        """w_g, (P,) float64; without memory that is sum v_k."""
        if not len(memory.weights) or self.tau == 0:
            return dual
        term = FunctionTerm(ctx.read(memory.inputs), labels.softmax(dim=1), self.tau * memory.weights)
        cavity = Gaussian(self.delta * dual, self.delta)
        solved = minimise_memory(
            ctx.net, dual.float(), term, cavity, steps=self.server_steps, lr=self.server_lr
        )
        return solved.double()

    def dual_mismatch(self, server: Server, clients: Iterable[Client]) -> float:
        return Gaussian(server.dual, 0.0).mismatch(product(Gaussian(c.dual, 0.0) for c in clients))

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.mean if server.started else ctx.start)

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        return {"memory_points": float(len(server.memory.weights))}
