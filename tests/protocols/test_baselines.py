"""Identities of SCAFFOLD on quadratic clients (float64).

Relative error is |found - exact| / |exact|. Tolerances are about 100 times what was measured, and not below
1e-13.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.learning.shards import QuadraticShard
from fedsim.learning.solvers.first_order import LocalTraining
from protocols.fedavg import FedAvg
from protocols.scaffold import Scaffold

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


def optimum(shards: Shards) -> Tensor:
    """argmin of the sum of the clients' MEAN losses, in which every client counts the same."""
    hessian = torch.stack([s.hessian / s.size for s in shards]).sum(0)
    return torch.linalg.solve(hessian, torch.stack([s.linear / s.size for s in shards]).sum(0))


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


def test_scaffold_finds_the_optimum_of_unlike_clients_where_fedavg_stalls(
    quadratics: SimpleNamespace, shards: Shards
) -> None:
    local, exact = sgd(0.1 / smoothness(shards), epochs=10), optimum(shards)
    errors = {}
    for algorithm in (Scaffold(local=local), FedAvg(local)):
        federation = quadratics.Federation(algorithm, shards)
        for _ in range(400):
            federation.play()
        errors[algorithm.name] = quadratics.error(federation.mean, exact)
    assert errors["scaffold"] < 1e-13
    assert errors["fedavg"] > 1e-2


def test_scaffolds_sum_of_controls_survives_lost_uploads_and_a_codec(
    quadratics: SimpleNamespace, shards: Shards
) -> None:
    codecs = {"down": {"mean": "bf16", "control": "bf16"}, "up": {"mean": "bf16"}}
    federation = quadratics.Federation(Scaffold(local=sgd(0.1 / smoothness(shards), 4)), shards, codecs)
    for participants, lost in (((0, 1, 2, 3, 4), (1,)), ((0, 2), ()), ((1, 3, 4), (3, 4)), ((0, 4), (0,))):
        federation.play(participants, lost)
    mismatch = federation.algorithm.dual_mismatch(federation.server, federation.clients)
    assert mismatch < 1e-13
    lossy = quadratics.Federation(Scaffold(local=sgd(0.1 / smoothness(shards), 4)), shards, codecs)
    lossy.commit_on_send = True  # the mistake: a client commits although its upload is lost
    for participants, lost in (((0, 1, 2, 3, 4), (1,)), ((0, 2), ())):
        lossy.play(participants, lost)
    assert lossy.algorithm.dual_mismatch(lossy.server, lossy.clients) > 1e-3
