"""FedEP: the moments of a tilted distribution, and what it shares with PVI and FedLap-Cov."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.errors import UsageError
from fedsim.learning.gaussian import Gaussian
from fedsim.learning.params import Net
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import LocalTraining
from fedsim.learning.solvers.tilted import Chain, tilted_moments
from fedsim.learning.solvers.von import VonTraining
from fedsim.seeds import RandomStream
from protocols.fedlap_cov import FedLapCov
from protocols.pvi import PVI
from protocols.related.fedep import FedEP

EXACT = LocalTraining(optimiser="exact")
DELTA = 0.7


def diagonal_of(federation: Any) -> Tensor:
    precision: Tensor = federation.algorithm.model(federation.server, federation.context()).precision
    return precision


def test_one_client_has_the_marginal_variances_where_pvi_has_the_conditional_ones(
    quadratics: SimpleNamespace,
) -> None:
    shards = quadratics.regressions(1, 12)
    ep = quadratics.Federation(FedEP(DELTA, 1.0, local=EXACT), shards)
    pvi = quadratics.Federation(PVI("diagonal", DELTA, 1.0, local=VonTraining(optimiser="exact")), shards)
    ep.play()
    pvi.play()
    posterior = shards[0].hessian + DELTA * torch.eye(12, dtype=torch.float64)
    assert quadratics.error(1 / diagonal_of(ep), torch.linalg.inv(posterior).diagonal()) < 1e-12
    assert quadratics.error(diagonal_of(pvi), posterior.diagonal()) < 1e-12
    assert quadratics.error(1 / diagonal_of(pvi), 1 / diagonal_of(ep)) > 0.1  # measured 0.21
    assert quadratics.error(ep.mean, pvi.mean) < 1e-12


def test_with_laplaces_moments_it_is_fedlap_cov(quadratics: SimpleNamespace) -> None:
    shards = quadratics.regressions(5, 20)
    one = quadratics.Federation(FedEP(DELTA, 0.4, "laplace", local=EXACT), shards)
    two = quadratics.Federation(FedLapCov(DELTA, 0.4, local=EXACT), shards)
    for participants in (range(5), [0, 2], [4], range(5)):
        one.play(participants)
        two.play(participants)
        assert quadratics.error(one.mean, two.mean) < 1e-12
        assert quadratics.error(diagonal_of(one), diagonal_of(two)) < 1e-12


def test_fedsep_rests_where_the_average_site_explains_all_clients(quadratics: SimpleNamespace) -> None:
    """Its fixed point is prod_k q_k = q_g^K; clients keep nothing, and the server alone knows the sites."""
    shards = quadratics.regressions(5, 20)
    federation = quadratics.Federation(FedEP(DELTA, "1/K", stateless=True, local=EXACT), shards)
    before = federation.clients[0]
    for _ in range(12):
        federation.play()
    q, rest = federation.server.q, None
    for up in federation.uploads.values():
        ratio = Gaussian.at(up.mean, up.precision) / q
        rest = ratio if rest is None else rest * ratio
    assert rest is not None
    assert float(torch.as_tensor(rest.precision).norm() / torch.as_tensor(q.precision).norm()) < 1e-9
    assert float(rest.shift.norm() / q.shift.norm()) < 1e-9
    assert all(torch.equal(c.dual.site.shift, before.dual.site.shift) for c in federation.clients)
    assert federation.algorithm.dual_mismatch(federation.server, federation.clients) is None


# ---- the moments of a tilted distribution that is no Gaussian


@pytest.fixture
def skewed() -> tuple[Shard, Gaussian]:
    """Six examples of a logistic regression in two weights, separable: the tilted density is skewed."""
    net = Net(nn.Sequential(nn.Linear(1, 2, bias=False)))
    x = torch.tensor([[1.0], [2.0], [3.0], [-1.0], [-2.0], [0.5]])
    shard = Shard(net, x, torch.tensor([1, 1, 1, 0, 0, 1]), 1.0)
    return shard, Gaussian.at(torch.tensor([0.5, -0.5]).double(), torch.tensor([0.15, 0.3]).double())


def brute_force(shard: Shard, cavity: Gaussian) -> tuple[Tensor, Tensor]:
    """Mean and variances by summation over a grid of 300 x 300 points."""
    line = torch.linspace(-14, 14, 300, dtype=torch.float64)
    w = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    x, sign = shard.inputs[:, 0].double(), 1.0 - 2.0 * shard.targets.double()
    loss = nn.functional.softplus((w[:, 1] - w[:, 0])[:, None] * (x * sign)).sum(1)
    log = -loss + w @ cavity.shift - 0.5 * (w**2) @ torch.as_tensor(cavity.precision)
    share = (log - log.logsumexp(0)).exp()
    mean = share @ w
    return mean, share @ (w - mean) ** 2


def moments_of(shard: Shard, cavity: Gaussian, chain: Chain | None) -> tuple[Tensor, Tensor]:
    start = torch.zeros(2)
    how = LocalTraining(epochs=100, batch_size=6, lr=1.0, optimiser="sgd")
    fit = tilted_moments(
        shard, start, cavity=cavity, how=how, chain=chain, rng=RandomStream(0, "test"), round=1
    )
    return fit.q.mean, 1 / torch.as_tensor(fit.q.precision)


def test_the_chain_finds_the_moments_and_laplace_does_not(skewed: tuple[Shard, Gaussian]) -> None:
    mean, variance = brute_force(*skewed)

    def errors(chain: Chain | None) -> tuple[float, float]:
        m, v = moments_of(*skewed, chain)
        return float(((m - mean) / variance.sqrt()).abs().max()), float((v / variance - 1).abs().max())

    off, wide = errors(None)
    shift, spread = errors(Chain(1500, 0.5, 0.0))
    assert off > 0.3 and wide > 0.3  # measured 0.32 standard deviations, 36 % of the variance
    assert shift < 0.15 and spread < 0.2  # measured 0.035 and 7 %: noise of 1,500 samples


def test_a_model_too_large_for_the_chain_is_refused() -> None:
    with pytest.raises(UsageError, match=r"P = 7,510 .* moments=laplace"):
        FedEP().check(7510)
    FedEP(moments="laplace").check(7510)
    with pytest.raises(UsageError, match="one sample has no variance"):
        replace(FedEP(), chain=Chain(1, 1.0, 0.0)).check(650)
