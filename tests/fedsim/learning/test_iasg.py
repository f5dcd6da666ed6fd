"""FedPA's delta against the dense solve and the paper's recurrence (see
docs/references/equations.md#identity-5); IASG's chain; the empirical Fisher."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedsim.learning.params import Net
from fedsim.learning.shards import QuadraticShard, Shard
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.learning.solvers.iasg import Sampling, iasg, posterior_delta
from fedsim.seeds import RandomStream
from tests.support.tolerances import gamma


def drawn(dims: int, samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """x_0 (d,) and samples (l, d) in float64."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, dims, generator=draws, dtype=torch.float64)
    return torch.randn(dims, generator=draws, dtype=torch.float64), 0.3 * x + 1


def dense(start: Tensor, x: Tensor, rho: float) -> Tensor:
    """Sigma^-1 (x_0 - xbar) with Sigma = r I + (1 - r) Cov, divisor l - 1 (Eq. 10)."""
    n, d = x.shape
    r = 1 / (1 + (n - 1) * rho)
    z = x - x.mean(0)
    cov = z.T @ z / (n - 1) if n > 1 else torch.zeros(d, d, dtype=x.dtype)
    return torch.linalg.solve(r * torch.eye(d, dtype=x.dtype) + (1 - r) * cov, start - x.mean(0))


def recurrence(start: Tensor, x: Tensor, rho: float) -> list[Tensor]:
    """arXiv:2010.05273, Appendix C: the delta of every prefix, O(l^2 d)."""
    mean, D = x[0].clone(), start - x[0]
    w, uw, g, out = [], [], [], [D.clone()]
    for t in range(2, len(x) + 1):
        u = x[t - 1] - mean
        gt = rho * (t - 1) / t
        v = u.clone()
        for wk, uk, gk in zip(w, uw, g, strict=True):
            v -= gk * (wk @ u) / (1 + gk * uk) * wk
        D = D - v / t - gt * (u @ D - u @ v / t) / (1 + gt * (u @ v)) * v
        w.append(v)
        uw.append(u @ v)
        g.append(gt)
        mean = mean + u / t
        out.append((1 + (t - 1) * rho) * D)
    return out


def error(result: Tensor, exact: Tensor) -> float:
    return float((result - exact).norm() / exact.norm())


@pytest.mark.parametrize("rho", [0.01, 0.5, 3.0])
@pytest.mark.parametrize(("dims", "samples"), [(10, 100), (50, 10), (200, 30), (1000, 100)])
def test_three_ways_to_the_delta_agree(dims: int, samples: int, rho: float) -> None:
    """Sigma's condition number is at most 470 here. Measured against the dense solve: 4e-16 .. 4e-14 both."""
    start, x = drawn(dims, samples)
    exact = dense(start, x, rho)
    assert error(posterior_delta(start, x, rho), exact) < 1e-12
    assert error(recurrence(start, x, rho)[-1], exact) < 1e-12


@pytest.mark.parametrize("rho", [1e2, 1e4, 1e6])
def test_large_rho_and_more_samples_than_dimensions_cost_digits(rho: float) -> None:
    """The delta is then what is left of nearly equal vectors, about 1 / rho of them, in the product form and
    in the recurrence: each of 100 terms is a product of length 10 and some five operations."""
    start, x = drawn(10, 100)
    exact, rounding = dense(start, x, rho), gamma(100 * (10 + 5), torch.float64)
    assert error(posterior_delta(start, x, rho), exact) < rounding * rho
    assert error(recurrence(start, x, rho)[-1], exact) < rounding * rho


def test_one_sample_is_fedavgs_delta_and_no_shrinkage_is_the_means() -> None:
    start, x = drawn(30, 8)
    assert torch.equal(posterior_delta(start, x[:1], 0.4), start - x[0])
    assert error(posterior_delta(start, x, 0.0), start - x.mean(0)) < 1e-14


def test_iasg_averages_stretches_of_one_chain() -> None:
    a = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))
    shard = QuadraticShard(a, torch.tensor([1.0, -1.0], dtype=torch.float64), size=2)
    how = Sampling(burn_in=2, steps_per_sample=3, samples=2, lr=0.1, momentum=0.5, decay=0.5)
    start = torch.tensor([2.0, 1.0], dtype=torch.float64)
    chain = iasg(shard, start, how=how, rng=RandomStream(0, "t", round=2), round=2)
    w, v, seen = start.clone(), torch.zeros(2, dtype=torch.float64), []
    for _ in range(8):
        v = 0.5 * v + (a @ w - shard.linear) / 2
        w = w - 0.05 * v  # round 2: lr * decay
        seen.append(w)
    expected = torch.stack([torch.stack(seen[2:5]).mean(0), torch.stack(seen[5:8]).mean(0)])
    assert error(chain.solution.samples, expected) < 1e-14
    assert torch.allclose(chain.solution.last, w, rtol=1e-14)
    assert torch.equal(start, torch.tensor([2.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("size", [7, 12, 13])
def test_a_sample_per_epoch_is_the_walk_of_fedavg(size: int) -> None:
    """Clients with more examples take more steps; burn-in rounds are those of FedAvg with as many epochs."""
    torch.manual_seed(0)
    net = Net(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    shard = Shard(net, torch.randn(size, 5), torch.arange(size) % 3, 1.0)
    start, rng = net.snapshot(), RandomStream(0, "t", round=1)
    how = Sampling(samples=3, batch_size=4, lr=0.1, momentum=0.5, batches="epochs")
    assert how.length(size) == math.ceil(size / 4)
    chain = iasg(shard, start, how=how, rng=rng, round=1).solution
    local = LocalTraining(3, 4, 0.1, "sgd", momentum=0.5)
    assert torch.equal(chain.last, minimise(shard, start, how=local, rng=rng, round=1).solution)
    short = iasg(shard, start, how=replace(how, steps_per_sample=how.length(size)), rng=rng, round=1)
    assert torch.equal(chain.samples, short.solution.samples)
