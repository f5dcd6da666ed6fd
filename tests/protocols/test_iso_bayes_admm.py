"""Isotropic Bayesian-ADMM keeps E_q[l_k]: its limit is the mode of a smoothed loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.learning.params import Net
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import LocalTraining, Smoothing
from fedsim.seeds import RandomStream
from protocols.fedadmm import FedADMM
from protocols.iso_bayes_admm import IsoBayesADMM
from protocols.precond_admm import PrecondADMM

P, DELTA = 4, 0.5


class Logistic(Shard):
    """A Shard that the federation in memory takes: two inputs, two classes, no bias."""

    linear = property(lambda self: torch.zeros(P, dtype=torch.float64))


@pytest.fixture
def shards() -> tuple[Logistic, ...]:
    g = torch.Generator().manual_seed(0)
    net = Net(nn.Sequential(nn.Linear(2, 2, bias=False)))
    clients = []
    for k in range(2):
        x = 2 * torch.randn(12, 2, generator=g) + k
        y = (x @ torch.tensor([2.0, -1.0]) + torch.randn(12, generator=g) > 0).long()
        clients.append(Logistic(net, x, y, 1.0))
    return tuple(clients)


def mode(shards: tuple[Logistic, ...], precision: float) -> Tensor:
    """argmin sum_k E_{N(m, I/s)}[l_k] + delta/2 |m|^2 by Gauss-Hermite quadrature and Newton's method.

    A logit difference x . (w_1 - w_0) is Gaussian with the variance 2 |x|^2 / s, so one dimension is enough.
    precision = inf: without the expectation.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    z, share = torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())
    m = torch.zeros(P, dtype=torch.float64)

    def objective(m: Tensor) -> Tensor:
        w, total = m.view(2, 2), DELTA / 2 * m @ m
        for shard in shards:
            x = shard.inputs.double()
            sign = 1.0 - 2.0 * shard.targets.double()
            spread = (2 * (x**2).sum(1) / precision).sqrt()
            margins = sign[:, None] * ((x @ (w[1] - w[0]))[:, None] + spread[:, None] * z)
            total = total + (nn.functional.softplus(margins) @ share).sum()
        return total

    for _ in range(30):
        gradient = torch.autograd.functional.jacobian(objective, m)
        m = m - torch.linalg.solve(torch.autograd.functional.hessian(objective, m), gradient)
    assert float(gradient.norm()) < 1e-9
    return m


def test_a_pair_of_draws_has_the_gradient_of_the_smoothed_loss(shards: Any) -> None:
    """The mean over many pairs, against quadrature's gradient at some point; noise falls with their root."""
    net, precision = shards[0].net, 2.0
    point = torch.tensor([0.3, -0.2, -0.1, 0.4])
    net.load(point)
    draws = RandomStream(0, "test").torch("smoothing")
    Smoothing(precision, 1000).loss_gradient(net, shards[0].inputs, shards[0].targets, 12.0, draws)
    assert torch.equal(net.weights, point)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    x, sign = shards[0].inputs.double(), 1.0 - 2.0 * shards[0].targets.double()
    spread = (2 * (x**2).sum(1) / precision).sqrt()
    w = point.double().view(2, 2)
    margins = sign[:, None] * ((x @ (w[1] - w[0]))[:, None] + spread[:, None] * torch.from_numpy(nodes))
    slope = (sign * (torch.sigmoid(margins) @ torch.from_numpy(weights / weights.sum()))) @ x
    exact = torch.cat([-slope, slope])
    assert float((net.grads.double() - exact).norm() / exact.norm()) < 0.03  # measured 0.006


def test_on_quadratics_it_is_fedadmm_and_precond_admm(quadratics: SimpleNamespace) -> None:
    shards, s, rho, exact = quadratics.regressions(5, 20), 7.0, 0.4, LocalTraining(optimiser="exact")
    algorithms = (
        IsoBayesADMM(2.0, rho, s, local=exact),
        PrecondADMM(2.0, rho, s, local=exact),
        FedADMM(delta=2.0, rho=rho * s, local=exact),
    )
    one, two, three = (quadratics.Federation(a, shards) for a in algorithms)
    for participants in (range(5), [0, 3], range(5), [1]):
        for federation in (one, two, three):
            federation.play(participants)
        assert quadratics.error(one.mean, two.mean) < 1e-13
        assert quadratics.error(one.mean, three.mean) < 1e-13


def test_a_pair_is_exact_where_the_loss_is_quadratic() -> None:
    """A squared loss of a linear network: odd terms cancel within a pair, up to float32's rounding."""
    g = torch.Generator().manual_seed(1)
    net = Net(nn.Sequential(nn.Linear(3, 2, bias=False)))
    x, target = torch.randn(8, 3, generator=g), torch.randn(8, 2, generator=g)

    class Squares:
        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return ((outputs - targets) ** 2).mean()

    net.likelihood = Squares()  # type: ignore[assignment]
    start = net.snapshot()
    net.loss_gradient(x, target, 1.0)
    plain = net.grads.clone()
    Smoothing(1.0, 1).loss_gradient(net, x, target, 1.0, RandomStream(0, "test").torch("smoothing"))
    assert float((net.grads - plain).norm() / plain.norm()) < 1e-5
    assert torch.equal(net.weights, start)
