"""FedPA's client: samples of the local posterior, and the delta computed from them.

Source: Al-Shedivat et al. 2021, arXiv:2010.05273, Algorithms 3 and 4, App. C;
docs/references/curvature-and-solvers.md#fedpa-delta."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedsim.hyperparameters import BatchSize, Decay, LearningRate, Momentum
from fedsim.learning.shards import QuadraticShard, Shard
from fedsim.learning.solvers import LocalFit
from fedsim.learning.solvers.first_order import decayed
from fedsim.seeds import RandomStream


@dataclass(frozen=True)
class Sampling:
    """Settings of iterate-averaged stochastic-gradient sampling (IASG), one chain per local training.

    The chain takes `burn_in` SGD steps and then draws `samples` samples, each the mean of `steps_per_sample`
    iterates. The learning rate is constant along the chain. Momentum is reset after the chain.
    burn_in: 0 by default, as in footnote 11; fedpa's burn_in_rounds are rounds of FedAvg instead.
    steps_per_sample: "epoch" means one sample per local epoch of ceil(N_k / batch_size) steps (Sec. 5.1:
    FedPA-ME). Clients with more examples then take more steps, as in FedAvg.
    batches: "independent" draws every batch anew, without replacement within the batch, as in the released
    JAX library. "epochs" uses shuffled epochs, as in the TFF code. Gradient noise nearly cancels over an
    epoch, so the mean of one has an eighth of the posterior's spread (docs/results/fedpa.md).
    decay: the learning rate in round r is lr * decay^(r-1).
    """

    burn_in: Annotated[int, Meta(ge=0, description="SGD steps before the first sample")] = 0
    steps_per_sample: Annotated[
        Annotated[int, Meta(ge=1)] | Literal["epoch"],
        Meta(description="iterates whose mean is one sample; epoch: those of one pass over the examples"),
    ] = "epoch"
    samples: Annotated[int, Meta(ge=1, description="posterior samples of a client and round")] = 5
    batch_size: BatchSize = 20
    lr: LearningRate = 0.05
    momentum: Momentum = 0.9
    batches: Annotated[
        Literal["independent", "epochs"],
        Meta(description="every batch drawn anew, or shuffled passes over the examples"),
    ] = "independent"
    decay: Decay = 1.0

    def length(self, size: int) -> int:
        """Return the number of steps per sample of a client with `size` examples."""
        return -(-size // self.batch_size) if self.steps_per_sample == "epoch" else self.steps_per_sample


@dataclass(frozen=True)
class Chain:
    """The result of a chain: samples (l, P) and the last iterate (P,)."""

    samples: Tensor
    last: Tensor


def iasg(
    shard: Shard | QuadraticShard, start: Tensor, *, how: Sampling, rng: RandomStream, round: int
) -> LocalFit[Chain, None]:
    """Draw iterate-averaged samples of exp(-mean loss) by Algorithm 4, on a chain from `start` (P,).

    The fit's loss is the mean along the chain. `round` determines the learning rate. On a QuadraticShard the
    gradients are exact, so the chain is gradient descent.
    """
    weights = start.clone()
    velocity = torch.zeros_like(weights)
    lr = decayed(how.lr, how.decay, round)
    length = how.length(shard.size)
    steps = how.burn_in + how.samples * length
    means = torch.zeros((how.samples, len(start)), dtype=weights.dtype, device=weights.device)
    noise = shard.net.noise(rng.key("dropout")) if isinstance(shard, Shard) else nullcontext()
    total = 0.0
    with noise:
        for t, (grads, loss) in zip(range(steps), _gradients(shard, weights, how, rng), strict=False):
            velocity.mul_(how.momentum).add_(grads)
            weights.add_(velocity, alpha=-lr)
            total += loss
            if t >= how.burn_in:
                means[(t - how.burn_in) // length].add_(weights, alpha=1 / length)
    return LocalFit(Chain(means, weights), total / steps)


def _gradients(
    shard: Shard | QuadraticShard, weights: Tensor, how: Sampling, rng: RandomStream
) -> Iterator[tuple[Tensor, float]]:
    """Yield gradient and mean loss at `weights`, without end; the caller changes `weights` in place."""
    if isinstance(shard, QuadraticShard):
        while True:
            yield shard.gradient(weights) / shard.size, shard.loss(weights)
    order, net = rng.torch("batches"), shard.net
    net.refuse("IASG adds up the loss of every step")
    while True:
        # the first batch of a newly shuffled epoch is an independent draw
        epoch = shard.batches(how.batch_size, order)
        for inputs, targets in islice(epoch, 1) if how.batches == "independent" else epoch:
            net.load(weights)
            net.train()
            loss = net.loss_gradient(inputs, targets, 1.0)
            yield net.grads, float(loss)


def posterior_delta(start: Tensor, samples: Tensor, shrinkage: float) -> Tensor:
    """Return Delta = Sigma^-1 (x_0 - xbar), (P,) float64, from x_0 = `start` and the samples x_1..x_l (l, P).

        Sigma = r I + (1 - r) Cov(x_1..x_l; divisor l-1),   r = 1 / (1 + (l-1) rho)        (Eq. 10)

    rho is `shrinkage`; l = 1 gives FedAvg's x_0 - x_1. Let Z have the rows x_i - xbar and s = 1 + (l-1) rho.
    Then Sigma = (I + rho Z'Z) / s. A product of (l, P) with (P, l) and an l x l solve replace the recurrence
    of Appendix C:

        Delta = s [ r_0 - rho Z' (I + rho Z Z')^-1 Z r_0 ],   r_0 = x_0 - xbar
    """
    x = samples.double()
    centre = x.mean(0)
    z, r = x - centre, start.double() - centre
    gram = torch.eye(len(x), dtype=torch.float64, device=x.device) + shrinkage * (z @ z.T)
    solved: Tensor = torch.linalg.solve(gram, z @ r)
    return (1 + (len(x) - 1) * shrinkage) * (r - shrinkage * (z.T @ solved))
