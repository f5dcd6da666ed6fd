"""FedIvon - Pal, Gupta, Sarwar, Rai 2025 (arXiv:2411.18385): clients train with IVON, and the server averages
their Gaussians with the curvatures as weights. IVON-ADMM differs: it has duals, its KL has q_g instead of
N(0, I/delta), it starts from the prior, and it does not weight clients by N_k.

    client:  (m_k, h_k) <- IVON on lambda_k E_q[lbar_k] + KL(q || N(0, I/delta)),  lambda_k = N_k / tau,
             from m = m_g and h = h_g;  h_k is the curvature of the MEAN loss lbar_k
    server:  h_g <- sum_k a_k h_k ;   m_g <- (sum_k a_k h_k m_k) / h_g,   a_k = N_k / N, over the participants
    init:    m_g = the shared random start, h_g = h0

The model is N(m_g, diag(s_g)^-1) with s_g = (N / tau) h_g + delta, on the scale of the summed loss. With the
clients' precisions s_k = lambda_k h_k + delta, this is s_g = delta + sum_k (s_k - delta).

Local training is IVON. Its momentum and step count begin at zero in every task; with the option `carry`, each
client keeps them from round to round, as in ivon_admm.

Wire: 2P down, 2P up.

Differs: IVON keeps h + delta / lambda positive, but not h. A negative h_k is set to 0, and where all h_k are
0 the mean is weighted by N_k alone. A round's average includes only the clients that take part. In the paper
the server also provides the prior of a personal model, which is left out here.

References:
    Pal et al. 2025: https://arxiv.org/abs/2411.18385
    Shen et al. 2024: https://arxiv.org/abs/2402.17641
    docs/references/equations.md#fedivon
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

import fedsim
from fedsim import Algorithm, AnyShard, Arrival, Context, Gaussian, IvonMoments, IvonTraining, Point, Task


@dataclass(frozen=True)
class Server:
    """State of the server. mean: m_g, curvature: h_g, (P,) float64. started: True after an update."""

    mean: Tensor
    curvature: Tensor
    started: bool = False


@dataclass(frozen=True)
class Client:
    """State of a client. moments: IVON's momentum and step count if the client keeps them, else None."""

    moments: IvonMoments | None = None


@dataclass(frozen=True)
class Down:
    mean: fedsim.Mean
    curvature: fedsim.Curvature


@dataclass(frozen=True)
class Up:
    """Upload of m_k and of h_k, clamped to at least 0."""

    mean: fedsim.Mean
    curvature: fedsim.Curvature
    train_loss: fedsim.Scalar


@dataclass(frozen=True)
class Sums:
    """Sums over clients of N_k h_k, of N_k h_k m_k, of N_k m_k and of N_k."""

    curvature: fedsim.Sum
    weighted: fedsim.Sum
    mean: fedsim.Sum
    weight: fedsim.Count


@dataclass(frozen=True)
class FedIvon(Algorithm[Server, Client, Down, Up]):
    delta: Annotated[float, Meta(gt=0, description="precision of the prior N(0, I/delta)")] = 1.0
    tau: Annotated[float, Meta(gt=0, description="temperature of the loss: clients minimise l_k / tau")] = 0.1
    local: IvonTraining = IvonTraining(carry=False)

    name: ClassVar[str] = "fedivon"
    paper: ClassVar[str] = "Pal et al. 2025, FedIvon"
    url: ClassVar[str] = "https://arxiv.org/abs/2411.18385"
    default_model: ClassVar[str] = "mlp_small"
    eval_samples: ClassVar[int] = 32

    def server_init(self, ctx: Context) -> Server:
        start = ctx.start.double()
        return Server(start, torch.full_like(start, self.local.h0))

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client()

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(server.mean, server.curvature)

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        h0 = down.curvature.clamp(min=0)  # a codec may round it below 0
        zero = torch.zeros_like(down.mean, dtype=torch.float64)
        prior: dict[str, Any] = {"prior_mean": zero, "prior_precision": zero + self.delta, "h0": h0}
        own: dict[str, Any] = {"how": self.local, "moments": client.moments, "ess": shard.size / self.tau}
        fit = fedsim.ivon(shard, down.mean, rng=task.rng, round=task.round, curvature=True, **own, **prior)
        assert fit.solution.curvature is not None
        return Client(fit.carried), Up(fit.solution.mean, fit.solution.curvature.clamp(min=0), fit.loss)

    def add(self, sums: Sums, a: Arrival, ctx: Context) -> Sums:
        before = (sums.curvature, sums.weighted, sums.mean)
        h, hm, mean = self.summed(before, a.up, weight=ctx.sizes[a.client])
        return Sums(h, hm, mean, sums.weight + ctx.sizes[a.client])

    @fedsim.accumulating
    def summed(self, totals: tuple[Tensor, ...], up: Up, *, weight: int) -> tuple[Tensor, ...]:
        return tuple(t.add(x, alpha=weight) for t, x in zip(totals, self.terms(up), strict=True))

    def from_sums(self, server: Server, down: Down, sums: Sums, ctx: Context) -> Server:
        h, hm, plain = (total / sums.weight for total in (sums.curvature, sums.weighted, sums.mean))
        return Server(torch.where(h > 0, hm / h, plain), h, started=True)

    def terms(self, up: Up) -> tuple[Tensor, Tensor, Tensor]:
        """Return h_k, h_k m_k and m_k, each (P,) float64."""
        h, m = up.curvature.double().clamp(min=0), up.mean.double()
        return h, h * m, m

    def model(self, server: Server, ctx: Context) -> Point | Gaussian:
        if not server.started:
            return Point(ctx.start)
        return Gaussian.at(server.mean, sum(ctx.sizes) / self.tau * server.curvature + self.delta)
