"""FedLap-Func - Swaroop, Khan, Doshi-Velez 2025, Eq. 17 (arXiv:2501.17325): FedLap whose sites also
speak in function space, on a few memory inputs M_k per client.

    client:  w_k <- argmin l_k(w) + delta v_k . w + (delta/2) ||w - w_g||^2                  (SUM loss)
                      - sum_{i in M_k} tau_i l(yhat_i, w) + sum_k' sum_{i in M_k'} tau_i l(yhat_ig, w)
             v_k <- v_k + rho (w_k - w_g) ;   yhat_i <- soft labels of w_k on M_k
    server:  w_g <- argmin sum_k [ sum_{i in M_k} tau_i l(yhat_i, w) - delta v_k . w ] + (delta/2) ||w||^2
    init:    v_k = 0, w_g = 0

    yhat_ig = soft labels of w_g;  tau_i = tau N_kc / M_kc  (points of class c on client k, in its memory)

A client's inputs and first labels go up with its first upload; the server passes inputs on to whoever does
not hold them, with the broadcast of the next round in which that client takes part. Until a client's inputs
and labels are there, nobody has a term for its memory; so the first round is FedLap's, and without memory
points every round is. A silent client counts with its last v_k and its last labels.

Wire: P down, P + M C up. Once: M I + 2M down, M I + M up. M is the number of memory points: a client's own
going up, everyone else's coming down. The labels of w_g are computed by the client from w_g; with
send_global_labels they are sent, as the paper has it: P + M C down, M all points.

Differs: the paper leaves open the server's optimiser (here Adam, full batch over memory, started at
sum v_k) and what happens before labels exist (here nothing). Logits go up; soft labels are their softmax.
Training starts from ctx.start until something has been folded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Context, Exchange, Step, Task, step_size
from fedsim.errors import WireError
from fedsim.learning.function_space import FunctionTerm, Held, Memory
from fedsim.learning.gaussian import Gaussian, Point
from fedsim.learning.solvers.first_order import LocalTraining, Moments, minimise, minimise_memory
from fedsim.seeds import RandomStream
from fedsim.wire.schema import Flag, Inputs, Logits, Mean, Owners, Scalar, Weights


@dataclass(frozen=True)
class Server:
    """dual: sum_k v_k; mean: w_g, both (P,) float64. memory: all inputs received, in the order of their
    owners; logits (M, C): their last labels. arrived, synced (K,): the round in which a client's inputs
    came (0: not yet), and in which it last took part."""

    dual: Tensor
    mean: Tensor
    memory: Held
    logits: Tensor
    arrived: Tensor
    synced: Tensor

    @property
    def started(self) -> bool:
        return bool(self.synced.any())


@dataclass(frozen=True)
class Client:
    """dual: v_k (P,) float64; held: other clients' memory; logits (M_k, C): its own last labels, once the
    server has its inputs."""

    dual: Tensor
    held: Held
    logits: Tensor | None = None
    moments: Moments | None = None


@dataclass(frozen=True)
class NewMemory:
    """Memory that this client does not hold yet."""

    inputs: Inputs
    weights: Weights
    owners: Owners


@dataclass(frozen=True)
class Down:
    mean: Mean
    started: Flag
    news: NewMemory | None = None


@dataclass(frozen=True)
class LabelledDown:
    """send_global_labels: the logits of w_g on all memory, in the order of owners."""

    mean: Mean
    started: Flag
    logits: Logits
    news: NewMemory | None = None


@dataclass(frozen=True)
class OwnMemory:
    """A client's memory, sent once."""

    inputs: Inputs
    weights: Weights


@dataclass(frozen=True)
class Up:
    mean: Mean
    logits: Logits
    train_loss: Scalar
    own: OwnMemory | None = None


@dataclass(frozen=True)
class FedLapFunc(Algorithm[Server, Client, Any, Up]):
    delta: Annotated[float, Meta(gt=0)] = 0.1
    rho: Step = "1/K"
    tau: Annotated[float, Meta(ge=0)] = 1.0
    points_per_class: Annotated[int, Meta(ge=0)] = 1
    server_steps: Annotated[int, Meta(ge=1)] = 200
    server_lr: Annotated[float, Meta(gt=0)] = 1e-3
    send_global_labels: bool = False
    local: LocalTraining = LocalTraining()

    name: ClassVar[str] = "fedlap_func"
    paper: ClassVar[str] = "Swaroop, Khan, Doshi-Velez 2025, Eq. 17"
    default_model: ClassVar[str] = "mlp_small"
    server_type: ClassVar[type] = Server
    client_type: ClassVar[type] = Client

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

    def broadcast(self, server: Server, ctx: Context) -> Down | LabelledDown:
        if not self.send_global_labels:
            return Down(server.mean, server.started)
        logits = ctx.net.logits(server.mean.float(), ctx.read(server.memory.inputs))
        return LabelledDown(server.mean, server.started, logits)

    def broadcast_to(self, server: Server, k: int, ctx: Context) -> NewMemory | None:
        fresh = server.arrived[server.memory.owners] >= max(1, int(server.synced[k]))
        rows = fresh & (server.memory.owners != k)
        if not bool(rows.any()):
            return None
        return NewMemory(server.memory.inputs[rows], server.memory.weights[rows], server.memory.owners[rows])

    def client_update(self, client: Client, down: Any, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        if down.news is not None:
            news = Held(down.news.inputs, down.news.weights, down.news.owners)
            client = replace(client, held=client.held.joined(news))
        draws = RandomStream(task.rng.seed, "memory", 0, task.client).torch("points")
        own = shard.memory(self.points_per_class, draws)
        fit = minimise(
            shard,
            down.mean if down.started else task.start,
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
        self, client: Client, down: Any, own: Memory, shard: AnyShard, task: Task
    ) -> FunctionTerm | None:
        """Both function terms: the soft labels of w_g on all memory, less the client's own on its own."""
        known = client.held
        if client.logits is not None:
            known = known.joined(Held.of(own.inputs, own.weights, task.client))
        if not len(known.weights) or self.tau == 0:
            return None
        sent = self.send_global_labels
        labels = (down.logits if sent else shard.logits(down.mean, known.inputs)).softmax(dim=1)
        if client.logits is not None:
            labels[known.owners == task.client] -= client.logits.softmax(dim=1)
        return FunctionTerm(shard.floats(known.inputs), labels, self.tau * known.weights)

    def client_commit(self, client: Client, down: Any, up: Up, task: Task) -> Client:
        dual = client.dual + self.dual_step(down, up, task.client, task.sizes)
        return replace(client, dual=dual, logits=up.logits)

    def dual_step(self, down: Any, up: Up, k: int, sizes: tuple[int, ...]) -> Tensor:
        """rho (w_k - w_g), (P,) float64."""
        step: Tensor = up.mean.double() - down.mean.double()
        return step_size(self.rho, k, sizes) * step

    def server_update(self, server: Server, down: Any, ups: Iterable[tuple[int, Up]], ctx: Context) -> Server:
        dual, memory, labels = server.dual.clone(), server.memory, server.logits
        arrived, synced = server.arrived.clone(), server.synced.clone()
        for k, up in ups:
            dual += self.dual_step(down, up, k, ctx.sizes)
            synced[k] = ctx.round
            known = int((memory.owners == k).sum())
            if len(up.logits) != (len(up.own.weights) if up.own is not None else known) or (up.own and known):
                raise WireError(f"client {k} labels {len(up.logits)} points; the server has {known} of it")
            if up.own is not None:
                arrived[k] = ctx.round
                mine = Held.of(up.own.inputs, up.own.weights, k)
                order, memory = memory.order_with(mine), memory.joined(mine)
                labels = torch.cat([labels.reshape(-1, up.logits.shape[1]), up.logits])[order]
            else:
                labels = labels.clone()
                labels[memory.owners == k] = up.logits
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

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.mean if server.started else ctx.start)

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        return {"memory_points": float(len(server.memory.weights))}
