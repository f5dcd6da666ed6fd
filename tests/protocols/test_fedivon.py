"""FedIvon: its server in closed form, and its client against our own IVON."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fedsim.algorithm import Context, Task
from fedsim.learning.gaussian import Gaussian
from fedsim.learning.params import Net
from fedsim.learning.shards import QuadraticShard, Shard
from fedsim.learning.solvers.ivon import IvonTraining, ivon
from fedsim.seeds import RandomStream, seeded_torch
from protocols.related.fedivon import FedIvon

SIZES = (10, 20, 40, 80, 160)
EXACT = IvonTraining(optimiser="exact")


@pytest.fixture
def shards(quadratics: SimpleNamespace) -> Any:
    return quadratics.regressions(5, 20, sizes=SIZES)


def test_the_server_merges_with_curvatures_as_weights(quadratics: SimpleNamespace, shards: Any) -> None:
    """The box, and its model on the scale of the summed loss: s_g = delta + sum_k (s_k - delta)."""
    delta, tau = 3.0, 0.5
    federation = quadratics.Federation(FedIvon(delta, tau, EXACT), shards)
    for participants in (range(5), [1, 4]):
        federation.play(participants)
        h, hm, weight = 0.0, 0.0, sum(SIZES[k] for k in participants)
        for k in participants:
            s, n = shards[k], SIZES[k]
            m_k = torch.linalg.solve(s.hessian / tau + delta * torch.eye(20).double(), s.linear / tau)
            h_k = s.hessian.diagonal() / n
            h, hm = h + n * h_k / weight, hm + n * h_k * m_k / weight
        assert quadratics.error(federation.mean, hm / h) < 1e-12
        model = federation.algorithm.model(federation.server, federation.context())
        assert isinstance(model, Gaussian)
        assert quadratics.error(model.precision, sum(SIZES) / tau * h + delta) < 1e-13


def test_weights_without_curvature_are_averaged_by_size(quadratics: SimpleNamespace) -> None:
    """A weight that no client's loss depends on (a dead pixel) has h_k = 0 everywhere."""
    hessian = torch.diag(torch.tensor([2.0, 0.0]).double())
    shards = tuple(QuadraticShard(hessian, torch.tensor([b, b]).double(), n) for b, n in ((1.0, 1), (5.0, 3)))
    federation = quadratics.Federation(FedIvon(1.0, 1.0, EXACT), shards)
    federation.play()
    assert federation.mean[1] == pytest.approx((1 * 1.0 + 3 * 5.0) / 4, rel=1e-14)


def test_a_first_upload_is_that_of_our_own_ivon_bit_for_bit() -> None:
    with seeded_torch(0):
        net = Net(nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)))
        shard = Shard(net, torch.randn(21, 5), torch.randint(3, (21,)), 1.0)
    start, sizes = net.snapshot(), (21,)
    algorithm = FedIvon(local=IvonTraining(epochs=3, batch_size=8))
    ctx = Context(start, net.layout, sizes, 1, 1, RandomStream(0, "server", 1))
    task = Task(start, sizes, 1, 1, 0, RandomStream(0, "client.1", 1, 0))
    server = algorithm.server_init(ctx)
    assert torch.equal(algorithm.model(server, ctx).mean, start)
    down = algorithm.broadcast(server, ctx)
    _, up = algorithm.client_update(
        algorithm.client_init(ctx, 0), type(down)(start, down.curvature.float()), shard, task
    )
    zero = torch.zeros_like(start, dtype=torch.float64)
    fit = ivon(
        shard,
        start,
        how=algorithm.local,
        rng=task.rng,
        round=1,
        prior_mean=zero,
        prior_precision=zero + algorithm.delta,
        ess=21 / algorithm.tau,
        h0=algorithm.local.h0,
    )
    assert torch.equal(up.mean, fit.solution.mean)
    ess = 21 / algorithm.tau
    assert torch.equal(ess * (up.curvature + algorithm.delta / ess), fit.solution.precision)
    assert up.train_loss == fit.loss
