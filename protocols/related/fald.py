"""FA-LD, federated averaging Langevin dynamics - Deng et al. 2024 (arXiv:2112.05120): clients take Langevin
steps, the server averages the results, and the averages of late rounds are samples of the posterior.

    client:  theta_k <- theta, then T times
             theta_k <- theta_k - eta grad f_k(theta_k) + sqrt(2 eta tau) (rho xi + sqrt((1-rho^2)/p_k) xi_k)
             f_k(theta) = N lbar_k(theta) + (delta/2) ||theta||^2,   p_k = N_k / N
    server:  theta <- sum_k p_k theta_k,   kept as a sample in every thin-th round after the first burn_in
    init:    theta = the shared random start

sum_k p_k f_k is sum_k l_k plus the prior's (delta/2) ||theta||^2, so the target is the posterior to the power
1/tau. All clients draw the same xi from a random stream of the round; each client draws its own xi_k. For
every rho, the noise of the average has the variance of a single chain's noise, 2 eta tau. rho is the option
`correlation`: with 0 all noise is private, which protects data more; with 1 all noise is shared, which costs
less accuracy. The option lr is N eta, the step on the mean loss.

The model consists of the last `keep` samples: predictions are averaged over them, and the point estimate is
their mean. The samples follow the target if steps are small and batches large. Otherwise discretisation,
minibatch noise and, for T > 1, heterogeneous clients widen or shift their distribution.

Wire: P down, P up.

Local training is a sequence of Langevin steps with a constant lr; nothing is carried over.

Differs: minibatches come from shuffled epochs. All clients take T steps for any N_k, as in the paper. With
partial participation the server's p_k is N_k divided by the participants' sum, but the clients' noise is not
adapted to this. (The paper's schemes for partial participation also have a bias that does not vanish.)

References:
    Deng et al. 2024: https://arxiv.org/abs/2112.05120
    Welling and Teh 2011: https://mlanthology.org/icml/2011/welling2011icml-bayesian
    docs/references/equations.md#fa-ld
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

import fedsim
from fedsim import Algorithm, AnyShard, Arrival, Context, Point, Samples, Task, UsageError


@dataclass(frozen=True)
class Server:
    """State of the server. mean: theta (P,), kept: samples (n, P), oldest first; float64. folds: updates."""

    mean: Tensor
    kept: Tensor
    folds: int = 0


@dataclass(frozen=True)
class Client:
    """The client keeps nothing."""


@dataclass(frozen=True)
class Down:
    mean: fedsim.Mean


@dataclass(frozen=True)
class Up:
    mean: fedsim.Mean
    train_loss: fedsim.Scalar


@dataclass(frozen=True)
class Sums:
    """Sums over clients. total: sum N_k theta_k, (P,) float64. weight: sum N_k."""

    total: fedsim.Sum
    weight: fedsim.Count


@dataclass(frozen=True)
class LangevinTraining:
    """Settings of Langevin training: each client takes `steps` steps, on the batches of successive epochs."""

    steps: Annotated[int, Meta(ge=1, description="local steps between two averages, of every client")] = 25
    batch_size: Annotated[int, Meta(ge=1, description="examples per local step")] = 32
    lr: Annotated[float, Meta(gt=0, description="step on the mean loss: N times eta")] = 0.1


@dataclass(frozen=True)
class FALD(Algorithm[Server, Client, Down, Up]):
    delta: Annotated[float, Meta(gt=0, description="precision of the prior N(0, I/delta)")] = 1.0
    tau: Annotated[float, Meta(gt=0, description="temperature: the target is the posterior^(1/tau)")] = 1.0
    correlation: Annotated[float, Meta(ge=0, le=1, description="rho, of two clients' noise")] = 0.0
    burn_in: Annotated[int, Meta(ge=0, description="rounds at the start that give no sample")] = 10
    thin: Annotated[int, Meta(ge=1, description="rounds from one sample to the next")] = 1
    keep: Annotated[int, Meta(ge=1, le=100, description="samples that the model holds, the last ones")] = 20
    local: LangevinTraining = LangevinTraining()

    name: ClassVar[str] = "fald"
    paper: ClassVar[str] = "Deng et al. 2024, FA-LD"
    url: ClassVar[str] = "https://arxiv.org/abs/2112.05120"
    default_model: ClassVar[str] = "mlp_small"
    eval_samples: ClassVar[int] = 32

    def unsent(self) -> fedsim.Unsent:
        raise UsageError("+event: an upload of fald is a sample, whose noise is new in every round")

    def server_init(self, ctx: Context) -> Server:
        start = ctx.start.double()
        return Server(start, start.new_zeros((0, len(start))))

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client()

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(server.mean)

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        N, size = sum(task.sizes), len(down.mean)
        common, own = task.rng.shared("langevin").torch("noise"), task.rng.torch("noise")
        scale = math.sqrt(2 * self.local.lr * self.tau / N)
        private = math.sqrt((1 - self.correlation**2) * N / task.sizes[task.client])
        batches = fedsim.endless_batches(shard, self.local.batch_size, task.rng)
        theta, total = down.mean.clone(), 0.0
        with shard.noise(task.rng.key("dropout")):
            for batch in islice(batches, self.local.steps):
                gradient, loss = batch.loss_gradient(theta)
                xi, xi_k = torch.randn(size, generator=common), torch.randn(size, generator=own)
                noise = (scale * (self.correlation * xi + private * xi_k)).to(theta)
                theta = theta - self.local.lr * (gradient + self.delta / N * theta) + noise
                total += loss
        return client, Up(theta, total / self.local.steps)

    def add(self, sums: Sums, a: Arrival, ctx: Context) -> Sums:
        N_k = ctx.sizes[a.client]
        return Sums(sums.total.add_(a.up.mean, alpha=N_k), sums.weight + N_k)

    def from_sums(self, server: Server, down: Down, sums: Sums, ctx: Context) -> Server:
        mean = sums.total / sums.weight
        late, kept = server.folds + 1 - self.burn_in, server.kept
        if late > 0 and late % self.thin == 0:
            kept = torch.cat([kept, mean[None]])[-self.keep :]
        return Server(mean, kept, server.folds + 1)

    def model(self, server: Server, ctx: Context) -> Point | Samples:
        return Samples(server.kept.mean(0), server.kept) if len(server.kept) else Point(server.mean)
