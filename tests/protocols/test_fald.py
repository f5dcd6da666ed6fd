"""FA-LD: its chain on quadratics, whose stationary mean and variance have a closed form, and its samples.

Coordinates are independent chains, so that one run has many: noise is that of CHAINS of them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.learning.gaussian import Point, Samples
from fedsim.learning.shards import QuadraticShard
from protocols.related.fald import FALD, LangevinTraining

CHAINS, SIZES, DELTA = 300, (10, 30, 60), 2.0
CURVATURES, SLOPES = (4.0, 20.0, 60.0), (8.0, -10.0, 90.0)
N = sum(SIZES)


@pytest.fixture
def shards() -> tuple[QuadraticShard, ...]:
    """l_k = sum over the coordinates of h_k w^2 / 2 - b_k w: the posterior is N(sum b / H, 1/H), H = 86."""
    eye, one = torch.eye(CHAINS, dtype=torch.float64), torch.ones(CHAINS, dtype=torch.float64)
    return tuple(
        QuadraticShard(h * eye, b * one, n) for h, b, n in zip(CURVATURES, SLOPES, SIZES, strict=True)
    )


def stationary(lr: float, steps: int, rho: float, tau: float) -> tuple[float, float]:
    """Mean and variance of the linear recursion that a round is."""
    eta, slope, shift, variance = lr / N, 0.0, 0.0, 0.0
    for h, b, n in zip(CURVATURES, SLOPES, SIZES, strict=True):
        p = n / N
        keep, pull = 1 - eta * (N * h / n + DELTA), eta * N * b / n
        slope += p * keep**steps
        shift += p * pull * sum(keep**t for t in range(steps))
        variance += p**2 * sum(keep ** (2 * t) for t in range(steps)) * 2 * eta * tau * (1 - rho**2) / p
    for t in range(steps):
        common = sum(
            n / N * (1 - eta * (N * h / n + DELTA)) ** t for h, n in zip(CURVATURES, SIZES, strict=True)
        )
        variance += common**2 * 2 * eta * tau * rho**2
    return shift / (1 - slope), variance / (1 - slope**2)


def chain(quadratics: SimpleNamespace, shards: Any, algorithm: FALD, burn_in: int, rounds: int) -> Tensor:
    """theta of the rounds behind burn_in: (rounds, CHAINS)."""
    federation = quadratics.Federation(algorithm, shards)
    for _ in range(burn_in):
        federation.play()
    thetas = []
    for _ in range(rounds):
        federation.play()
        thetas.append(federation.server.mean)
    return torch.stack(thetas)


@pytest.mark.parametrize(
    ("steps", "rho", "tau"), [(1, 0.0, 1.0), (1, 0.8, 1.0), (1, 1.0, 0.5), (4, 0.0, 1.0), (4, 0.8, 1.0)]
)
def test_the_chain_has_the_mean_and_variance_of_its_recursion(
    quadratics: SimpleNamespace, shards: Any, steps: int, rho: float, tau: float
) -> None:
    lr = 0.2
    algorithm = FALD(DELTA, tau, rho, local=LangevinTraining(steps=steps, lr=lr))
    thetas = chain(quadratics, shards, algorithm, 40 // steps, 120)
    mean, variance = stationary(lr, steps, rho, tau)
    assert abs(float(thetas.mean()) - mean) / variance**0.5 < 0.06  # measured 0.03 at most
    assert float(thetas.var()) == pytest.approx(variance, rel=0.06)  # measured 3 % at most


def test_shared_noise_is_the_same_at_all_clients_and_new_in_every_round(quadratics: SimpleNamespace) -> None:
    """On flat losses a client's step is noise alone."""
    zero = torch.zeros(600, 600, dtype=torch.float64)
    shards = tuple(QuadraticShard(zero, zero[0], n) for n in SIZES)

    def noises(rho: float) -> list[list[Tensor]]:
        local = LangevinTraining(steps=1, lr=0.1)
        federation = quadratics.Federation(FALD(1e-12, correlation=rho, local=local), shards)
        rounds = []
        for _ in range(2):
            before = federation.server.mean
            federation.play()
            rounds.append([up.mean - before for up in federation.uploads.values()])
        return rounds

    first, second = noises(1.0)
    assert torch.equal(first[0], first[1]) and torch.equal(first[0], first[2])
    assert not torch.equal(first[0], second[0])
    own, _ = noises(0.0)
    assert abs(float(torch.corrcoef(torch.stack(own))[0, 1])) < 0.15
    ratio = float(own[0].norm() / own[2].norm())
    assert ratio == pytest.approx((SIZES[2] / SIZES[0]) ** 0.5, rel=0.12)  # sqrt(1 / p_k)


def test_the_model_is_the_last_samples_behind_burn_in_thinned(
    quadratics: SimpleNamespace, shards: Any
) -> None:
    algorithm = FALD(DELTA, burn_in=3, thin=2, keep=3, local=LangevinTraining(steps=1))
    federation = quadratics.Federation(algorithm, shards)
    means, kinds = [], []
    for _ in range(13):
        federation.play()
        means.append(federation.server.mean)
        model = algorithm.model(federation.server, federation.context())
        kinds.append(type(model))
    assert kinds == [Point] * 4 + [Samples] * 9
    assert isinstance(model, Samples)
    assert torch.equal(model.values, torch.stack([means[r - 1] for r in (9, 11, 13)]))
    assert torch.equal(model.mean, model.values.mean(0))
    generator = torch.Generator()
    assert [x.tolist() for x in model.samples(2, generator)] == model.values[1:].tolist()
    assert len(list(model.samples(32, generator))) == 3
