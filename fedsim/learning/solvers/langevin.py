"""FA-LD's local training: Langevin steps, which are gradient steps with noise (Welling and Teh 2011)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

from msgspec import Meta
from torch import Tensor

from fedsim.hyperparameters import BatchSize
from fedsim.learning.shards import QuadraticShard, Shard, endless_batches
from fedsim.learning.solvers import LocalFit
from fedsim.seeds import RandomStream


@dataclass(frozen=True)
class LangevinTraining:
    """Settings of Langevin training: each client takes `steps` steps, on the batches of successive epochs."""

    steps: Annotated[int, Meta(ge=1, description="local steps between two averages, of every client")] = 25
    batch_size: BatchSize = 32
    lr: Annotated[
        float, Meta(gt=0, description="step on the mean loss: N times the step on the summed loss")
    ] = 0.1


def langevin(
    shard: Shard | QuadraticShard,
    start: Tensor,
    *,
    how: LangevinTraining,
    rng: RandomStream,
    prior: float,
    noise: Callable[[], Tensor],
) -> LocalFit[Tensor, None]:
    """Repeat w <- w - lr (grad lbar_k(w; batch) + prior w) + noise() `steps` times from `start` (P,).

    prior: the prior's precision on the scale of the mean loss lbar_k. noise: function that returns a draw
    (P,). The fit's loss is the mean over the steps. On a QuadraticShard the gradients are exact.
    """
    weights, total = start.clone(), 0.0
    batches = endless_batches(shard, how.batch_size, rng)
    with shard.noise(rng.key("dropout")):
        for batch in islice(batches, how.steps):
            gradient, loss = batch.loss_gradient(weights)
            weights = weights - how.lr * (gradient + prior * weights) + noise()
            total += loss
    return LocalFit(weights, total / how.steps)
