"""Isotropic Bayesian-ADMM keeps E_q[l_k]: its limit is the mode of a smoothed loss."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.learning.params import Net
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import LocalTraining
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


def settled(quadratics: SimpleNamespace, shards: Any, algorithm: Any, rounds: int, last: int) -> Tensor:
    """The mean of the last rounds' m_g."""
    federation, total = quadratics.Federation(algorithm, shards), torch.zeros(P, dtype=torch.float64)
    for r in range(rounds):
        federation.play()
        if r >= rounds - last:
            total += federation.mean / last
    return total


def test_its_limit_is_the_mode_of_the_smoothed_loss(quadratics: SimpleNamespace, shards: Any) -> None:
    smooth, plain = mode(shards, 1.0), mode(shards, math.inf)
    distance = quadratics.error(plain, smooth)
    assert distance > 0.4  # measured 0.44
    how = LocalTraining(epochs=12, batch_size=100, lr=0.5, optimiser="sgd")
    kept = settled(quadratics, shards, IsoBayesADMM(DELTA, 0.3, 1.0, pairs=6, local=how), 9, 3)
    assert quadratics.error(kept, smooth) < 0.06  # measured 0.006: the noise of the draws
    delta_method = settled(quadratics, shards, PrecondADMM(DELTA, 0.3, 1.0, local=how), 12, 1)
    assert quadratics.error(delta_method, plain) < 0.02  # measured 0.008
    assert quadratics.error(delta_method, smooth) > 0.4


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
