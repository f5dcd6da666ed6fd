"""FedPM - Federated Probabilistic Mask training, Isik et al. 2023.

The weights are fixed at random; the algorithm learns the probability theta of keeping each weight.

    client:  theta_k <- E epochs of minibatch steps on the scores logit(theta), with a new mask per step
             m_k ~ Bernoulli(theta_k)                         is sent
    server:  alpha <- alpha + sum_k m_k ;  beta <- beta + sum_k (1 - m_k)      over the participants
             theta <- (alpha - 1) / (alpha + beta - 2)        the mode of Beta(alpha, beta)

The fixed weights are w = +-sqrt(2 / fan_in), with the signs of the random start; every process knows them.
alpha and beta start at 1. They are reset to 1 after every ceil(K / |S|) rounds, in which each of the K
clients could have taken part once. With full participation theta is therefore the mean of the round's masks.

Wire: P down, P up. The algorithm uploads theta_k, and the codec draws the mask. The default codec, bernoulli,
sends an entropy-coded mask with less than a bit per parameter, as in the paper. mrc:b (KLMS) sends fewer
bits, and --codec up.probability=dense sends theta_k itself. The broadcast of theta is dense by default; other
codecs for it are levels:b and mrc:bxN+last.

Local training is Adam; a client keeps nothing, so Adam's moments begin at zero in every round.

Differs: theta starts at 1/2 and is clamped to [margin, 1 - margin] before it is converted to a score. Biases
have masks, too; the fixed weight of a bias is the constant of its layer. Scores are those of the mean weights
w theta and of an average over drawn masks (eval_samples); the paper evaluates one drawn mask.

References:
    Isik et al. 2023: https://arxiv.org/abs/2209.15328
    Isik, Pase et al. 2024: https://arxiv.org/abs/2306.12625
    Havasi et al. 2019: https://arxiv.org/abs/1810.00440
    docs/references/equations.md#fedpm
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import Algorithm, AnyShard, Context, Task, Unsent
from fedsim.errors import UsageError
from fedsim.learning.gaussian import Point, Samples
from fedsim.learning.shards import QuadraticShard
from fedsim.learning.solvers.mask_training import MaskTraining, signed_constants, train_mask
from fedsim.seeds import RandomStream
from fedsim.wire.schema import Count, Probability, Scalar, Sum


@dataclass(frozen=True)
class Server:
    """State of the server. alpha, beta: parameters of each mask bit's Beta distribution, (P,) float64.
    round: that of the last server update. seed and round determine the masks that the model draws."""

    alpha: Tensor
    beta: Tensor
    started: bool = False
    seed: int = 0
    round: int = 0

    @property
    def theta(self) -> Tensor:
        """The mode of the Beta distributions, (P,) float64; 1/2 before the first server update."""
        count = self.alpha + self.beta - 2
        return torch.where(count > 0, (self.alpha - 1) / count.clamp(min=1), 0.5)


@dataclass(frozen=True)
class Client:
    """Empty state: the client keeps nothing."""


@dataclass(frozen=True)
class Down:
    probability: Probability


@dataclass(frozen=True)
class Up:
    probability: Probability
    train_loss: Scalar


@dataclass(frozen=True)
class Sums:
    """The sum of the masks, and their number."""

    masks: Sum
    count: Count


@dataclass(frozen=True)
class FedPM(Algorithm[Server, Client, Down, Up]):
    margin: Annotated[
        float, Meta(gt=0, lt=0.5, description="theta is held in [margin, 1 - margin] when training begins")
    ] = 0.01
    masks: Annotated[int, Meta(ge=1, le=64, description="masks that the model is averaged over")] = 16
    local: MaskTraining = MaskTraining()

    name: ClassVar[str] = "fedpm"
    paper: ClassVar[str] = "Isik et al. 2023, Algorithm 1"
    url: ClassVar[str] = "https://arxiv.org/abs/2209.15328"
    default_model: ClassVar[str] = "mlp_small"
    eval_samples: ClassVar[int] = 16
    default_codecs: ClassVar[Mapping[str, str]] = MappingProxyType({"up.probability": "bernoulli"})

    def unsent(self) -> Unsent:
        raise UsageError("+event: an upload of fedpm is a random mask, which differs in every round")

    def server_init(self, ctx: Context) -> Server:
        one = torch.ones_like(ctx.start, dtype=torch.float64)
        return Server(one, one)

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client()

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(server.theta)

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        if isinstance(shard, QuadraticShard):
            raise UsageError("fedpm trains masks of a network's weights; a quadratic loss has no network")
        fixed = signed_constants(task.start, shard.net.layout)
        theta = down.probability.clamp(self.margin, 1 - self.margin)
        fit = train_mask(shard, fixed, theta, how=self.local, rng=task.rng, round=task.round)
        return client, Up(fit.solution, fit.loss)

    def add(self, sums: Sums, down: Down, k: int, up: Up, ctx: Context) -> Sums:
        return Sums(sums.masks.add_(up.probability.double()), sums.count + 1)

    def from_sums(self, server: Server, down: Down, sums: Sums, ctx: Context) -> Server:
        often = math.ceil(ctx.K / (ctx.asked or ctx.K))
        # server.round is the last round with uploads, which may be several rounds ago
        fresh = (ctx.round - 1) // often != (server.round - 1) // often
        one = torch.ones_like(server.alpha)
        alpha, beta = (one, one) if fresh else (server.alpha, server.beta)
        alpha, beta = alpha + sums.masks, beta + (sums.count - sums.masks)
        return Server(alpha, beta, True, ctx.rng.seed, ctx.round)

    def model(self, server: Server, ctx: Context) -> Point | Samples:
        if not server.started:
            return Point(ctx.start)
        fixed, theta = signed_constants(ctx.start, ctx.layout).double(), server.theta
        draws = RandomStream(server.seed, "masks", server.round).torch("model")
        drawn = [fixed * (torch.rand(len(theta), generator=draws) < theta) for _ in range(self.masks)]
        return Samples(fixed * theta, torch.stack(drawn))
