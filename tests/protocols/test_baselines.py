"""Identities of SCAFFOLD, FedNova, ProxSkip, FedPD and Fisher merging on quadratic clients (float64).

Relative error is |found - exact| / |exact|. Tolerances are about 100 times what was measured, and not below
1e-13.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.experiment import Experiment
from fedsim.learning.shards import QuadraticShard, Shard
from fedsim.learning.solvers.first_order import LocalTraining
from fedsim.problem import Problem
from fedsim.seeds import RandomStream
from protocols.fedavg import FedAvg
from protocols.related.fednova import FedNova
from protocols.related.fedpd import FedPD
from protocols.related.fisher_merge import Down, FisherMerge
from protocols.related.proxskip import ProxSkip
from protocols.related.scaffold import Scaffold

K, D = 5, 6
Shards = tuple[QuadraticShard, ...]


def sgd(lr: float, epochs: int = 1, **settings: Any) -> LocalTraining:
    """Steps with exact gradients: a QuadraticShard of N_k = 1 has one per epoch."""
    return LocalTraining(epochs=epochs, lr=lr, optimiser="sgd", **settings)


@pytest.fixture
def shards(quadratics: SimpleNamespace) -> Shards:
    """Five unlike clients of one example each."""
    unlike: Shards = quadratics.regressions(K, D, spread=0.2)
    return unlike


def smoothness(shards: Shards) -> float:
    """L: the largest eigenvalue of any client's mean loss."""
    return max(float(torch.linalg.eigvalsh(s.hessian)[-1]) / s.size for s in shards)


# ---- SCAFFOLD


def test_scaffold_is_its_box_under_decay_and_partial_participation(
    quadratics: SimpleNamespace, shards: Shards
) -> None:
    lr, decay, server_lr = 0.3 / smoothness(shards), 0.7, 0.8
    federation = quadratics.Federation(Scaffold(server_lr, sgd(lr, epochs=3, decay=decay)), shards)
    x, c = torch.zeros(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
    controls = torch.zeros(K, D, dtype=torch.float64)
    for r, participants in enumerate(((0, 1, 2, 3, 4), (0, 3), (1, 2, 4), (4,)), 1):
        federation.play(participants)
        eta, moved, changed = lr * decay ** (r - 1), torch.zeros_like(x), torch.zeros_like(x)
        for k in participants:
            y, gradients = x.clone(), []
            for _ in range(3):
                gradients.append(shards[k].hessian @ y - shards[k].linear)
                y = y - eta * (gradients[-1] - controls[k] + c)
            new = torch.stack(gradients).mean(0)  # what option II computes
            moved, changed, controls[k] = moved + y - x, changed + new - controls[k], new
        x, c = x + server_lr * moved / len(participants), c + changed / K
        assert quadratics.error(federation.mean, x) < 1e-13  # measured 4e-16
        assert quadratics.error(federation.server.controls / K, c) < 1e-12  # measured 2e-15
        for client, control in zip(federation.clients, controls, strict=True):
            assert float((client.control - control).norm()) < 1e-12 * float(controls.norm())
    assert federation.algorithm.dual_mismatch(federation.server, federation.clients) < 1e-13


# ---- FedNova

UNLIKE = (3, 1, 8, 2, 5)
"""N_k; with batches of one example a client takes as many steps per epoch."""


def weighted_optimum(shards: Shards) -> Tensor:
    """argmin sum_k l_k, which is sum_k N_k lbar_k."""
    hessian = torch.stack([s.hessian for s in shards]).sum(0)
    return torch.linalg.solve(hessian, torch.stack([s.linear for s in shards]).sum(0))


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_fednova_of_equal_steps_is_fedavg(quadratics: SimpleNamespace, momentum: float) -> None:
    """Unequal N_k, one batch per epoch: all clients take three steps."""
    shards = quadratics.regressions(K, D, spread=0.2, sizes=UNLIKE)
    local = sgd(0.1 / smoothness(shards), 3, batch_size=8, momentum=momentum)
    both = [quadratics.Federation(algorithm, shards) for algorithm in (FedNova(local), FedAvg(local))]
    for participants in (None, (0, 2), (1, 3, 4), None):
        for federation in both:
            federation.play(participants)
        assert quadratics.error(both[0].mean, both[1].mean) < 1e-13  # measured 2e-16


def test_fednovas_normaliser_is_the_sum_of_the_gradients_weights(quadratics: SimpleNamespace) -> None:
    """A constant gradient g moves a client by eta a_k g: SGD with momentum on a linear loss."""
    linear = QuadraticShard(torch.zeros(D, D, dtype=torch.float64), torch.ones(D, dtype=torch.float64), 5)
    for momentum in (0.0, 0.3, 0.9):
        algorithm = FedNova(sgd(0.01, epochs=3, batch_size=2, momentum=momentum))
        federation = quadratics.Federation(algorithm, (linear,))
        federation.play()
        steps = federation.uploads[0].effective_steps
        assert float((federation.mean - 0.01 * steps * linear.linear / 5).norm()) < 1e-13
        assert steps == pytest.approx(
            sum((1 - momentum**i) / (1 - momentum) for i in range(1, 10)), rel=1e-14
        )


# ---- ProxSkip


def test_proxskip_is_algorithm_2_step_by_step(quadratics: SimpleNamespace, shards: Shards) -> None:
    """Control variates and coin as printed, every client with its own h_k and all of them with one coin."""
    gamma, p = 0.5 / smoothness(shards), 0.3
    algorithm = ProxSkip(p, gamma)
    federation = quadratics.Federation(algorithm, shards)
    x, h = torch.zeros(D, dtype=torch.float64), torch.zeros(K, D, dtype=torch.float64)
    for r in range(1, 9):
        federation.play()
        steps = algorithm.steps(RandomStream(0, "server", r))
        hats = []
        for k, shard in enumerate(shards):
            own = x.clone()
            for _ in range(steps):
                own = own - gamma * (shard.hessian @ own - shard.linear - h[k])
            hats.append(own)
        x = torch.stack(hats).mean(0)
        h = h + (p / gamma) * (x - torch.stack(hats))
        assert quadratics.error(federation.mean, x) < 1e-13  # measured 1e-15
        for client, control in zip(federation.clients, h, strict=True):
            result = (p / gamma) * (federation.mean + client.dual)
            assert float((result - control).norm()) < 1e-12 * float(h.norm())


def test_the_coin_is_common_and_geometric() -> None:
    algorithm = ProxSkip(p=0.25)
    steps = [algorithm.steps(RandomStream(7, "server", r)) for r in range(1, 2001)]
    assert steps == [algorithm.steps(RandomStream(7, "client.1", r, 4)) for r in range(1, 2001)]
    assert min(steps) == 1
    assert sum(steps) / len(steps) == pytest.approx(4.0, rel=0.1)  # sd of the mean: 2 %
    assert steps[:20] != [algorithm.steps(RandomStream(8, "server", r)) for r in range(1, 21)]


# ---- FedPD


def test_fedpd_is_its_box_with_skipped_communication(quadratics: SimpleNamespace, shards: Shards) -> None:
    eta, p = 0.1, 0.4
    algorithm = FedPD(p, eta, LocalTraining(optimiser="exact"))
    federation = quadratics.Federation(algorithm, shards)
    centres, duals = torch.zeros(K, D, dtype=torch.float64), torch.zeros(K, D, dtype=torch.float64)
    for r in range(1, 7):
        federation.play()
        for _ in range(algorithm.iterations(RandomStream(0, "server", r))):
            for k, shard in enumerate(shards):
                matrix = shard.hessian + torch.eye(D, dtype=torch.float64) / eta
                x = torch.linalg.solve(matrix, shard.linear - duals[k] + centres[k] / eta)
                duals[k] += (x - centres[k]) / eta
                centres[k] = x + eta * duals[k]
        centres = centres.mean(0).repeat(K, 1)
        assert quadratics.error(federation.mean, centres[0]) < 1e-12  # measured 1e-15


# ---- Fisher merging


@pytest.mark.parametrize("fisher", ["true", "empirical"])
def test_a_merge_of_diagonal_quadratics_is_exact(quadratics: SimpleNamespace, fisher: Any) -> None:
    shards = quadratics.regressions(K, D, diagonal=True, sizes=UNLIKE)
    federation = quadratics.Federation(FisherMerge(fisher, 1e-12, LocalTraining(optimiser="exact")), shards)
    for participants in ((0, 2, 3), (1, 4), (2, 4)):  # client 2 and 4 are asked twice and count once
        federation.play(participants)
    assert quadratics.error(federation.mean, weighted_optimum(shards)) < 1e-13


def test_the_true_fisher_of_a_softmax_is_the_mean_over_the_models_own_labels() -> None:
    """Against the definition: squared gradients of every label, weighted by its predicted probability."""
    algorithm = FisherMerge(local=LocalTraining(epochs=1, batch_size=8))
    experiment = Experiment(
        algo="fisher_merge", model="logistic", clients=3, rounds=1, fraction=0.05, partition="iid"
    )
    problem = Problem.build(experiment, algorithm, None)
    shard, task = problem.shard(0), problem.task(1, 1, 0)
    client = algorithm.client_init(problem.context(0, 0), 0)
    _, up = algorithm.client_update(client, Down(), shard, task)
    weights = up.mean
    probabilities = shard.logits(weights, shard.inputs).softmax(1).double()
    information = torch.zeros(len(weights), dtype=torch.float64)
    for i in range(shard.size):
        for c in range(probabilities.shape[1]):
            one = Shard(shard.net, shard.inputs[i : i + 1], torch.tensor([c]), shard.scale)
            information += probabilities[i, c] * one.gradient(weights).double().square()
    expected = information / shard.size
    assert float((up.curvature - expected).norm() / expected.norm()) < 1e-5  # float32
