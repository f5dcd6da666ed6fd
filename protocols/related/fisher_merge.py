"""Fisher-weighted merging - Matena and Raffel 2022 (arXiv:2111.09832), in one communication round as in
FedFisher with the diagonal Fisher, Jhunjhunwala et al. 2024 (arXiv:2403.12329).

    client:  w_k <- E epochs of minibatch steps on lbar_k, started at the shared random start
             F_k  = diagonal of the Fisher information at w_k, per example
    server:  w_g <- sum_k N_k F_k w_k / sum_k N_k F_k,  F_k not less than floor      coordinate by coordinate

With fisher = true, F_k is an expectation over the model's predicted labels; for a softmax this is the exact
diagonal GGN. With fisher = empirical it uses the labels of the data. Where F_k is below the floor on every
client, w_g is FedAvg's average. N_k F_k is the precision of a Laplace approximation without a prior;
bcm computes the same product with a prior.

The merge includes the first upload of every client that has uploaded so far. By default there is one round.
Further rounds are for clients that have not uploaded yet; a client's second upload is ignored.

Wire: 0 down, 2P up. Every process knows the start.

Local training is Adam by default. A client keeps nothing, so `carry` has no effect.

Differs: Matena and Raffel merge models that were fine-tuned from one pre-trained model, with weights that
they tune on validation data; here the weights are N_k. FedFisher's server takes gradient steps on sum_k N_k
||w - w_k||^2_{F_k}, whose minimum is the formula above.

References:
    Matena and Raffel 2022: https://arxiv.org/abs/2111.09832
    Jhunjhunwala et al. 2024: https://arxiv.org/abs/2403.12329
    docs/references/equations.md#fisher-merging
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

import fedsim
from fedsim import Algorithm, AnyShard, Arrival, Context, Gaussian, LocalTraining, Point, Task


@dataclass(frozen=True)
class Server:
    """State of the server. merged: the factor with precision sum N_k F_k and shift sum N_k F_k w_k over the
    clients that have uploaded, (P,) float64. heard: True for these clients, (K,) bool."""

    merged: Gaussian
    heard: Tensor


@dataclass(frozen=True)
class Client:
    """Empty state: the client keeps nothing."""


@dataclass(frozen=True)
class Down:
    """Empty message: every process knows the start."""


@dataclass(frozen=True)
class Up:
    """Upload of w_k and F_k."""

    mean: fedsim.Mean
    curvature: fedsim.Curvature
    train_loss: fedsim.Scalar


@dataclass(frozen=True)
class FisherMerge(Algorithm[Server, Client, Down, Up]):
    fisher: Annotated[
        Literal["true", "empirical"], Meta(description="labels of the Fisher: the model's own, or the data's")
    ] = "true"
    floor: Annotated[float, Meta(gt=0, description="least Fisher information per example")] = 1e-6
    local: LocalTraining = LocalTraining(epochs=20)

    name: ClassVar[str] = "fisher_merge"
    paper: ClassVar[str] = "Matena and Raffel 2022; Jhunjhunwala et al. 2024"
    url: ClassVar[str] = "https://arxiv.org/abs/2111.09832"
    default_model: ClassVar[str] = "mlp_small"
    default_rounds: ClassVar[int] = 1

    def server_init(self, ctx: Context) -> Server:
        return Server(Gaussian.one(ctx.start), torch.zeros(ctx.K, dtype=torch.bool))

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client()

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down()

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        fit = task.minimise(shard, self.local, task.start)
        if self.fisher == "true":
            information = shard.curvature(fit.weights, "exact", task.rng) / shard.size
        else:
            information = shard.mean_fisher(fit.weights)
        return client, Up(fit.weights, information, fit.loss)

    def server_update(self, server: Server, down: Down, arrivals: Iterable[Arrival], ctx: Context) -> Server:
        merged, heard = server.merged, server.heard.clone()
        for a in arrivals:
            if not heard[a.client]:
                information = a.up.curvature.double().clamp(min=self.floor)
                merged = merged * Gaussian.at(a.up.mean, ctx.sizes[a.client] * information)
                heard[a.client] = True
        return Server(merged, heard)

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.merged.mean if bool(server.heard.any()) else ctx.start)

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        return {"heard": float(server.heard.sum())}
