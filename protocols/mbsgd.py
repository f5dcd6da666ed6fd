"""MB-SGD - one gradient per client and round.

    client:  g_k <- gradient of lbar_k at w_g, over all its examples or one random batch of them
    server:  w_g <- SERVERUPDATE(w_g, sum_k N_k g_k / sum_k N_k)          over the participants

Wire: P down, P up.

There is no local training: a client computes one gradient and keeps nothing. SERVERUPDATE is SGD with
momentum .9 by default.

References:
    Al-Shedivat et al. 2021: https://arxiv.org/abs/2010.05273
    McMahan et al. 2017: https://arxiv.org/abs/1602.05629
    docs/references/equations.md#mb-sgd
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from torch import Tensor

from fedsim.algorithm import AnyShard, Task
from fedsim.learning.shards import QuadraticShard
from protocols._averaging import Client, LocalFit, Pseudogradient, ServerOptimiser


@dataclass(frozen=True)
class MBSGD(Pseudogradient):
    batch_size: Annotated[int, Meta(ge=0, description="examples of the gradient; 0: all of the client's")] = 0
    server: ServerOptimiser = ServerOptimiser("sgd", server_lr=0.5, beta=0.9)

    name: ClassVar[str] = "mbsgd"
    paper: ClassVar[str] = "Al-Shedivat et al. 2021, Fig. 1"
    url: ClassVar[str] = "https://arxiv.org/abs/2010.05273"
    default_model: ClassVar[str] = "mlp_small"
    default_rounds: ClassVar[int] = 100

    @property
    def optimiser(self) -> ServerOptimiser:
        return self.server

    def delta(self, client: Client, mean: Tensor, shard: AnyShard, task: Task) -> LocalFit[Tensor, Any]:
        if isinstance(shard, QuadraticShard):
            return LocalFit(shard.gradient(mean) / shard.size, shard.loss(mean))
        net = shard.net
        net.refuse("a round of mbsgd is one step")
        net.load(mean)
        net.train()
        size = self.batch_size or shard.size
        inputs, targets = next(iter(shard.batches(size, task.rng.torch("batches"))))
        with net.noise(task.rng.key("dropout")):
            loss = net.loss_gradient(inputs, targets, 1.0)
        return LocalFit(net.grads.clone(), float(loss))
