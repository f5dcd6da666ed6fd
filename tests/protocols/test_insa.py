"""FedADMM-InSa's two rules in fedadmm: the box written out, the criterion, and where they change nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fedsim.errors import UsageError
from fedsim.learning.params import Net
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.seeds import RandomStream, seeded_torch
from protocols.fedadmm import FedADMM

SIZES = (10, 20, 40, 80, 160)
EXACT = LocalTraining(optimiser="exact")
ROUNDS = ((0, 1, 2, 3, 4), (1, 3), (0, 2, 4), (3,), (0, 1, 2, 3, 4)) * 6


@pytest.fixture
def shards(quadratics: SimpleNamespace) -> Any:
    return quadratics.regressions(5, 20, sizes=SIZES)


@pytest.mark.parametrize(("form", "rho"), [("mean", 0.5), ("regularised", 30.0), ("regularised", "5000/K")])
def test_with_a_penalty_for_each_client_it_is_the_box(
    quadratics: SimpleNamespace, shards: Any, form: Any, rho: Any
) -> None:
    """u, lambda and beta of the paper's clients, silent ones included, and the server's weighted mean."""
    mu, tau, delta = 2.0, 1.5, 3.0
    algorithm = FedADMM(form, delta, rho, "last", balance=mu, factor=tau, local=EXACT)
    federation = quadratics.Federation(algorithm, shards)
    scales = [1 / n if form == "mean" else 1.0 for n in SIZES]
    z, beta = torch.zeros(20).double(), [rho if isinstance(rho, float) else 1000.0] * 5
    u, v, used = [z] * 5, [z] * 5, list(beta)
    for participants in ROUNDS:
        lost = {participants[0]} if len(participants) == 3 else set()
        federation.play(participants, lost)
        for k in set(participants) - lost:
            A, b = scales[k] * shards[k].hessian, scales[k] * shards[k].linear
            before = u[k]
            u[k] = torch.linalg.solve(A + beta[k] * torch.eye(20).double(), b - v[k] + beta[k] * z)
            v[k], used[k] = v[k] + beta[k] * (u[k] - z), beta[k]
            mean_scale = beta[k] if form == "mean" else beta[k] / SIZES[k]
            p, d = mean_scale * (u[k] - before).norm(), (u[k] - z).norm()
            beta[k] *= tau if d > mu * p else 1 / tau if p > mu * d else 1.0
        weight = sum(used) + (delta if form == "regularised" else 0.0)
        z = torch.stack([v[k] + used[k] * u[k] for k in range(5)]).sum(0) / weight
        assert quadratics.error(federation.mean, z) < 1e-11
    assert len(set(beta)) > 2, "the rule has done something, and not the same for all"
    report = algorithm.report(federation.server, federation.context())
    assert report["rho"] == pytest.approx(sum(used) / 5, rel=1e-12)
    assert algorithm.dual_mismatch(federation.server, federation.clients) < 1e-12


def test_a_rule_that_never_acts_changes_nothing(quadratics: SimpleNamespace, shards: Any) -> None:
    plain, ruled = (
        quadratics.Federation(FedADMM(rho=20.0, silent="last", balance=mu, local=EXACT), shards)
        for mu in (0.0, 1e30)
    )
    for participants in ROUNDS[:5]:
        plain.play(participants)
        ruled.play(participants)
    assert torch.equal(plain.mean, ruled.mean)


def test_penalties_of_their_own_need_the_last_values() -> None:
    with pytest.raises(UsageError, match="silent=last"):
        FedADMM(balance=5.0).check(10)


@pytest.mark.parametrize("penalty", [1.0, 100.0])
def test_a_client_stops_with_the_first_epoch_that_is_exact_enough(
    quadratics: SimpleNamespace, penalty: float
) -> None:
    """The gradient is over sigma of that at w_g one epoch before, and not above it at the end."""
    (shard,) = quadratics.regressions(1, 20, sizes=(40,))
    how = LocalTraining(optimiser="sgd", lr=0.002, batch_size=10, epochs=500)
    algorithm = FedADMM(rho=40 * penalty, inexact=0.5, local=how)
    federation = quadratics.Federation(algorithm, (shard,))
    federation.play()
    up = federation.uploads[0]
    sigma = 0.999 / (1 + (penalty / 0.5 / 2) ** 0.5)

    def gradient(w: torch.Tensor) -> float:
        return float((shard.gradient(w) + 40 * penalty * w).norm())  # w_g = v_k = 0

    epochs = int(up.info.epochs)
    assert 1 < epochs < 500
    assert gradient(up.mean) <= sigma * gradient(torch.zeros_like(up.mean))
    shorter = FedADMM(rho=40 * penalty, inexact=0.5, local=replace(how, epochs=epochs - 1))
    before = quadratics.Federation(shorter, (shard,))
    before.play()
    assert before.uploads[0].info.epochs == epochs - 1
    assert gradient(before.uploads[0].mean) > sigma * gradient(torch.zeros_like(up.mean))


def test_training_that_ends_early_is_the_beginning_of_the_longer_one() -> None:
    """Weights, loss, moments and step count of a network are those of so many epochs."""
    with seeded_torch(0):
        net = Net(nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)))
        shard = Shard(net, torch.randn(21, 5), torch.randint(3, (21,)), 1.0)
    start = net.snapshot()

    def fit(epochs: int, tolerance: float) -> Any:
        how, rng = LocalTraining(epochs=epochs, batch_size=8, lr=0.01), RandomStream(0, "client", 1, 0)
        return minimise(shard, start, how=how, rng=rng, round=1, tolerance=tolerance)

    early = fit(12, 0.8)
    epochs = int(early.info["epochs"])
    assert 1 < epochs < 12
    full = fit(epochs, 0.0)
    assert torch.equal(early.weights, full.weights) and early.loss == full.loss
    assert torch.equal(early.carried.second, full.carried.second)
    assert early.carried.steps == full.carried.steps
    assert not full.info
