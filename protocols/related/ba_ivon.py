"""BA-BFL - Jamoussi, Serra, Stavrou, Kountouris 2024 (arXiv:2412.11646v3), with IVON as the local solver: the
server takes the barycentre of the clients' Gaussians. fedivon merges curvatures instead, without the prior.

    client:  q_k <- IVON on lambda_k E_q[lbar_k] + KL(q || N(0, I/delta)),  lambda_k = N_k / tau,
             from q = q_g;  s_k = lambda_k h_k + delta is q_k's precision
    server:  q_g <- argmin_q sum_k a_k D(q_k, q),  a_k = N_k / N, over participants and diagonal Gaussians:
             reverse_kl   KL(q || q_k)      s_g = sum_k a_k s_k ;   m_g = (sum_k a_k s_k m_k) / s_g
             wasserstein  W_2(q, q_k)^2     m_g = sum_k a_k m_k ;   s_g = (sum_k a_k s_k^(-1/2))^(-2)
             forward_kl   KL(q_k || q)      m_g = sum_k a_k m_k ;   1/s_g = sum_k a_k (1/s_k + (m_k - m_g)^2)
    init:    m_g = the shared random start, s_g = h0 N / (K tau) + delta

With equal precisions, each barycentre has FedAvg's mean. q_g is as wide as one client's posterior; a product
of posteriors would have the sum of their precisions. forward_kl gives the moments of the mixture of all q_k.
If clients disagree, this mixture is so wide that IVON diverges when it starts there, unless curvature = h0.

Local training is IVON. Its momentum and step count begin at zero in every task; with the option `carry`, each
client keeps them from round to round, as in ivon_admm.

Wire: 2P down, 2P up.

Differs: the released code has curvature = h0: it writes the h of q_g to a file that local training does not
read. q_k has IVON's precision lambda (h + d), d = delta / lambda; the released code has lambda h + d. Clients
clamp the precisions that they send and receive to at least delta. The released code contains forward_kl, but
has no option for it. A round's barycentre includes only the clients that take part.

References:
    Jamoussi et al. 2024: https://arxiv.org/abs/2412.11646v3
    Shen et al. 2024: https://arxiv.org/abs/2402.17641
    docs/references/equations.md#ba-bfl
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

import fedsim
from fedsim import Algorithm, AnyShard, Arrival, Context, Gaussian, IvonMoments, IvonTraining, Point, Task


@dataclass(frozen=True)
class Server:
    """State of the server. mean: m_g, precision: s_g, (P,) float64. started: True after an update."""

    mean: Tensor
    precision: Tensor
    started: bool = False


@dataclass(frozen=True)
class Client:
    moments: IvonMoments | None = None


@dataclass(frozen=True)
class Down:
    mean: fedsim.Mean
    precision: fedsim.Precision


@dataclass(frozen=True)
class Up:
    mean: fedsim.Mean
    precision: fedsim.Precision
    train_loss: fedsim.Scalar


@dataclass(frozen=True)
class Sums:
    """Sums over clients of N_k times the first and the second term, and of N_k."""

    first: fedsim.Sum
    second: fedsim.Sum
    weight: fedsim.Count


@dataclass(frozen=True)
class BaIvon(Algorithm[Server, Client, Down, Up]):
    barycentre: Annotated[
        Literal["reverse_kl", "wasserstein", "forward_kl"],
        Meta(description="of the clients' Gaussians: mean natural parameters, mean deviations, or moments"),
    ] = "reverse_kl"
    curvature: Annotated[
        Literal["posterior", "h0"], Meta(description="IVON's at the start of a task: that of q_g, or h0")
    ] = "posterior"
    delta: Annotated[float, Meta(gt=0, description="precision of the prior N(0, I/delta)")] = 1.0
    tau: Annotated[float, Meta(gt=0, description="temperature of the loss: clients minimise l_k / tau")] = 0.1
    local: IvonTraining = IvonTraining(carry=False)

    name: ClassVar[str] = "ba_ivon"
    paper: ClassVar[str] = "Jamoussi et al. 2024, BA-BFL"
    url: ClassVar[str] = "https://arxiv.org/abs/2412.11646v3"
    default_model: ClassVar[str] = "mlp_small"
    eval_samples: ClassVar[int] = 32

    def server_init(self, ctx: Context) -> Server:
        start, examples = ctx.start.double(), sum(ctx.sizes) / ctx.K
        return Server(start, torch.full_like(start, self.local.h0 * examples / self.tau + self.delta))

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client()

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(server.mean, server.precision)

    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        ess, h0 = shard.size / self.tau, torch.full_like(down.mean, self.local.h0)
        if self.curvature == "posterior":
            h0 = ((self.bounded(down.precision) - self.delta) / ess).to(h0)
        zero = torch.zeros_like(down.mean, dtype=torch.float64)
        prior: dict[str, Any] = {"prior_mean": zero, "prior_precision": zero + self.delta, "h0": h0}
        own: dict[str, Any] = {"how": self.local, "moments": client.moments, "ess": ess}
        fit = fedsim.ivon(shard, down.mean, rng=task.rng, round=task.round, curvature=True, **own, **prior)
        assert fit.solution.curvature is not None
        precision = self.bounded(ess * fit.solution.curvature.double() + self.delta)
        return Client(fit.carried), Up(fit.solution.mean, precision, fit.loss)

    def bounded(self, precision: Tensor) -> Tensor:
        return precision.double().clamp(min=self.delta)

    def add(self, sums: Sums, a: Arrival, ctx: Context) -> Sums:
        N_k = ctx.sizes[a.client]
        x, y = self.terms(a.up, a.down.mean)
        return Sums(sums.first.add_(x, alpha=N_k), sums.second.add_(y, alpha=N_k), sums.weight + N_k)

    def terms(self, up: Up, centre: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two terms to average, (P,) float64; for forward_kl, moments around `centre`."""
        m, s = up.mean.double(), up.precision.double()
        if self.barycentre == "reverse_kl":
            return s * m, s
        if self.barycentre == "wasserstein":
            return m, s**-0.5
        step = m - centre.double()
        return step, 1 / s + step**2

    def from_sums(self, server: Server, down: Down, sums: Sums, ctx: Context) -> Server:
        first, second = sums.first / sums.weight, sums.second / sums.weight
        if self.barycentre == "reverse_kl":
            return Server(first / second, second, started=True)
        if self.barycentre == "wasserstein":
            return Server(first, second**-2, started=True)
        return Server(down.mean.double() + first, 1 / (second - first**2), started=True)

    def model(self, server: Server, ctx: Context) -> Point | Gaussian:
        return Gaussian.at(server.mean, server.precision) if server.started else Point(ctx.start)
