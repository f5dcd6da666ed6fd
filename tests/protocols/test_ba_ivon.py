"""BA-BFL: each barycentre minimises the mean of its divergence, and clients start at the global posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.algorithm import Context, Task
from fedsim.learning.gaussian import kl_divergence
from fedsim.learning.params import Net
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.ivon import IvonTraining
from fedsim.seeds import RandomStream, seeded_torch
from protocols.related.ba_ivon import BaIvon
from protocols.related.fedivon import FedIvon

SIZES = (10, 20, 40, 80, 160)
EXACT = IvonTraining(optimiser="exact")
Divergence = Callable[[Tensor, Tensor, Tensor, Tensor], float]


def wasserstein(m: Tensor, s: Tensor, m_k: Tensor, s_k: Tensor) -> float:
    """The squared distance of diagonal Gaussians."""
    return float(((m - m_k) ** 2 + (s**-0.5 - s_k**-0.5) ** 2).sum())


DIVERGENCES: dict[str, Divergence] = {
    "reverse_kl": kl_divergence,
    "wasserstein": wasserstein,
    "forward_kl": lambda m, s, m_k, s_k: kl_divergence(m_k, s_k, m, s),
}


@pytest.fixture
def shards(quadratics: SimpleNamespace) -> Any:
    return quadratics.regressions(5, 20, sizes=SIZES)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_server_has_the_barycentre_of_the_participants(
    quadratics: SimpleNamespace, shards: Any, name: Any
) -> None:
    """The weighted mean of the divergences is stationary at q_g and grows in 20 random directions."""
    delta, tau, participants = 3.0, 0.5, (1, 2, 4)
    federation = quadratics.Federation(BaIvon(name, delta=delta, tau=tau, local=EXACT), shards)
    federation.play()
    federation.play(participants)
    q = federation.algorithm.model(federation.server, federation.context())
    locals_ = {k: (up.mean, up.precision) for k, up in federation.uploads.items()}
    for k, (m_k, s_k) in locals_.items():
        A, b = shards[k].hessian / tau, shards[k].linear / tau
        assert quadratics.error(m_k, torch.linalg.solve(A + delta * torch.eye(20).double(), b)) < 1e-12
        assert quadratics.error(s_k, A.diagonal() + delta) < 1e-13

    def mean_divergence(m: Tensor, s: Tensor) -> float:
        return sum(SIZES[k] * DIVERGENCES[name](m, s, *q_k) for k, q_k in locals_.items())

    least, draws = mean_divergence(q.mean, q.precision), torch.Generator().manual_seed(0)
    for _ in range(20):
        u, v = torch.randn(2, 20, generator=draws, dtype=torch.float64)
        ends = [mean_divergence(q.mean + h * u, q.precision * (h * v).exp()) for h in (-1e-3, 1e-3)]
        growth = sum(ends) / 2 - least
        assert growth > 0
        assert abs(ends[1] - ends[0]) < 0.01 * growth  # odd terms are of third order: 1e-9 beside 1e-6


def test_a_first_upload_is_fedivons_bit_for_bit_and_starts_from_the_global_posterior() -> None:
    """The first q_g has h = h0 for clients of the mean size."""
    with seeded_torch(0):
        net = Net(nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)))
        shard = Shard(net, torch.randn(21, 5), torch.randint(3, (21,)), 1.0)
    start, local = net.snapshot(), IvonTraining(epochs=3, batch_size=8, carry=False)

    def first_upload(algorithm: Any, precision: float | None = None) -> Any:
        ctx = Context(start, net.layout, (21, 21), 1, 1, RandomStream(0, "server", 1))
        task = Task(start, (21, 21), 1, 1, 0, RandomStream(0, "client.1", 1, 0))
        down = algorithm.broadcast(algorithm.server_init(ctx), ctx)
        second = next(v for v in vars(down).values() if v is not down.mean).float()
        down = type(down)(start, second if precision is None else torch.full_like(second, precision))
        return algorithm.client_update(algorithm.client_init(ctx, 0), down, shard, task)[1]

    fedivon, ours = first_upload(FedIvon(local=local)), first_upload(BaIvon(curvature="h0", local=local))
    assert torch.equal(ours.mean, fedivon.mean)
    posterior = first_upload(BaIvon(local=local))
    assert float((posterior.mean - ours.mean).norm() / ours.mean.norm()) < 1e-4
    wider = first_upload(BaIvon(local=local), 1 + 0.05 * 210)  # h = h0 / 2
    expected = first_upload(BaIvon(curvature="h0", local=replace(local, h0=0.05)))
    assert float((wider.mean - expected.mean).norm() / expected.mean.norm()) < 1e-4
    assert float((wider.mean - ours.mean).norm() / ours.mean.norm()) > 1e-2
