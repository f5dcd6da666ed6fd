"""SCAFFOLD - Karimireddy et al. 2020, Algorithm 1, option II (arXiv:1910.06378).

    client:  y <- x, then T_k times  y <- y - eta (grad lbar_k(y) - c_k + c)       one minibatch per step
             c_k <- c_k + Delta_k,   Delta_k = (x - y) / (T_k eta) - c
    server:  x <- x + eta_g mean_S (y - x),   c <- c + (1/K) sum_S Delta_k         over the participants S
    init:    c_k = 0, x = the shared random start

c changes by |S|/K times the participants' mean change, so it stays the mean of all c_k. eta is the learning
rate of the round, lr * decay^(round-1).

Wire: 2P down, P up. In the paper clients send 2P, y - x and Delta_k; here the server derives Delta_k from y,
its own broadcast and T_k, which both sides know.

Local training is SGD without momentum, and nothing is carried over to the next round. Option II is valid for
plain SGD only, so other optimisers, momentum and clip are refused.

References:
    Karimireddy et al. 2020: https://arxiv.org/abs/1910.06378
    docs/references/equations.md#scaffold
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

import fedsim
from fedsim import Algorithm, AnyShard, Arrival, At, Context, Gaussian, LocalTraining, Point, Task


@dataclass(frozen=True)
class Server:  # kept by the coordinator and in every checkpoint, float64
    mean: Tensor  # x (P,)
    controls: Tensor  # the sum of all c_k (P,)


@dataclass(frozen=True)
class Client:  # kept where the client computes, and never sent
    control: Tensor  # c_k (P,) float64


@dataclass(frozen=True)
class Down:  # an annotation is the field's kind: its shape, dtype and checks
    mean: fedsim.Mean
    control: fedsim.Gradient


@dataclass(frozen=True)
class Up:
    mean: fedsim.Mean  # y
    train_loss: fedsim.Scalar


@dataclass(frozen=True)
class Sums:  # over the uploads, float64
    moved: fedsim.Sum  # of y - x
    controls: fedsim.Sum  # of all c_k
    count: fedsim.Count  # of the uploads


@dataclass(frozen=True)
class Scaffold(Algorithm[Server, Client, Down, Up]):
    server_lr: Annotated[float, Meta(gt=0, description="eta_g, the server's step")] = 1.0
    local: LocalTraining = LocalTraining(optimiser="sgd", lr=0.05)  # eta, epochs, batch size

    name: ClassVar[str] = "scaffold"
    paper: ClassVar[str] = "Karimireddy et al. 2020, Algorithm 1"
    url: ClassVar[str] = "https://arxiv.org/abs/1910.06378"
    default_model: ClassVar[str] = "mlp_small"
    duals: ClassVar[dict[str, str]] = {"control": "controls"}

    def check(self, params: int) -> None:
        if self.local.optimiser != "sgd" or self.local.momentum or self.local.clip:
            raise fedsim.UsageError(
                "scaffold: option II holds for plain SGD: optimiser=sgd, no momentum, no clip"
            )

    def server_init(self, ctx: Context) -> Server:
        start = ctx.start.double()
        return Server(start, torch.zeros_like(start))

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client(torch.zeros_like(ctx.start, dtype=torch.float64))

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(server.mean, server.controls / ctx.K)

    # The penalty (c - c_k) . w adds c - c_k to every gradient.
    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        correction = Gaussian(client.control - down.control.double(), 0.0)
        fit = task.minimise(shard, self.local, down.mean, penalties=(correction,))
        return client, Up(fit.weights, fit.loss)

    # Adds Delta_k to c_k (on the worker) or to the sum of all c_k (on the server).
    @fedsim.accumulating
    def dual_step(self, control: Tensor, down: Down, up: Up, *, at: At) -> Tensor:
        eta = self.local.in_round(at.round).lr  # the step size of minimise: lr * decay^(round-1)
        steps = self.local.steps(at.sizes[at.k])
        return control + ((down.mean.double() - up.mean.double()) / (steps * eta) - down.control.double())

    def client_commit(self, client: Client, down: Down, up: Up, task: Task) -> Client:
        return Client(self.dual_step(client.control, down, up, at=task.at))

    def add(self, sums: Sums, a: Arrival, ctx: Context) -> Sums:
        moved = sums.moved + (a.up.mean.double() - a.down.mean.double())
        return Sums(moved, self.dual_step(sums.controls, a.down, a.up, at=a.at), sums.count + 1)

    def from_sums(self, server: Server, down: Down, sums: Sums, ctx: Context) -> Server:
        return Server(server.mean + self.server_lr * sums.moved / sums.count, sums.controls)

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.mean)
