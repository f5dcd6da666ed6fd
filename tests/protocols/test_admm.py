"""The ADMM family of point estimates: FedADMM, FedDyn, AMA and preconditioned ADMM.

Quadratic clients l_k(w) = 1/2 w' A_k w - b_k' w and exact local solutions, in float64; see
docs/references/equations.md#identity-9. Relative errors are
|found - exact| / |exact|; tolerances are about 100 times what was measured, and not below 1e-13.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.algorithm import At
from fedsim.learning.shards import QuadraticShard
from fedsim.learning.solvers.first_order import LocalTraining
from protocols.ama import AMA
from protocols.fedadmm import FedADMM
from protocols.feddyn import FedDyn
from protocols.precond_admm import PrecondADMM

pytestmark = pytest.mark.slow

EXACT = LocalTraining(optimiser="exact")
DELTA = 0.3
K, D = 5, 20
SIZES = (10, 20, 40, 80, 160)

Shards = tuple[QuadraticShard, ...]


@pytest.fixture
def shards(quadratics: SimpleNamespace) -> Shards:
    result: Shards = quadratics.regressions(K, D)
    return result


@pytest.fixture
def sized(quadratics: SimpleNamespace) -> Shards:
    """The same clients with 10, 20, 40, 80 and 160 examples."""
    result: Shards = quadratics.regressions(K, D, sizes=SIZES)
    return result


def stacked(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def rounds(federation: Any, count: int) -> Any:
    for _ in range(count):
        federation.play()
    return federation


def participations(seed: int, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Random participants, a third of whose uploads are lost."""
    draws = random.Random(seed)
    for _ in range(count):
        participants = [k for k in range(K) if draws.random() < 0.6]
        yield participants, [k for k in participants if draws.random() < 1 / 3]


# ---- FedDyn


def test_feddyn_without_decay_is_fedadmm_in_its_mean_form(quadratics: SimpleNamespace, sized: Shards) -> None:
    dyn = quadratics.Federation(FedDyn(2.0, "constant", weight_decay=0.0, local=EXACT), sized)
    admm = quadratics.Federation(FedADMM("mean", rho=2.0, local=EXACT), sized)
    other = quadratics.Federation(FedDyn(2.0, "constant", weight_decay=1e-3, local=EXACT), sized)
    for participants, lost in participations(3, 60):
        for federation in (dyn, admm, other):
            federation.play(participants, lost)
    assert quadratics.error(dyn.mean, admm.mean) < 1e-12  # measured 7e-16
    assert quadratics.error(other.mean, admm.mean) > 1e-5
    for a, b in zip(dyn.clients, admm.clients, strict=True):  # its sites are v_k / alpha
        assert quadratics.error(2.0 * a.dual.site.shift, b.dual.site.shift) < 1e-12


def test_feddyns_penalties() -> None:
    sizes = (10, 30)
    assert [FedDyn(0.5, "constant").penalties(At(sizes, k)) for k in (0, 1)] == [(0.5, 0.5)] * 2
    assert [FedDyn(0.5, "paper").penalties(At(sizes, k)) for k in (0, 1)] == [(1.0, 1.0), (1 / 3, 1 / 3)]
    assert [FedDyn(0.5, "release").penalties(At(sizes, k)) for k in (0, 1)] == [(0.125, 0.5), (0.375, 0.5)]


# ---- AMA


def test_amas_first_round_with_its_default_is_the_mean_of_the_steps(
    quadratics: SimpleNamespace, shards: Shards
) -> None:
    federation = rounds(quadratics.Federation(AMA(DELTA, local=EXACT), shards), 1)
    steps = [up.mean for up in federation.uploads.values()]
    assert quadratics.error(federation.mean, stacked(steps) / K) < 1e-13
    eye = DELTA / K * torch.eye(D, dtype=torch.float64)
    assert quadratics.error(steps[2], torch.linalg.solve(shards[2].hessian + eye, shards[2].linear)) < 1e-13


# ---- on a real network, through the launcher, the coordinator and the wire


def test_isotropic_bayesian_admm_is_fedadmm_on_quadratics(quadratics: SimpleNamespace) -> None:
    """v2, Eq. 21-22: q = N(m, I), prior N(0, I), alpha = 1 / (1 + rho K), written out with its own names.

    fedadmm and precond_admm with S = I take E_q[l_k] as l_k(m), the same on quadratic losses; on others
    iso_bayes_admm alone is isotropic Bayesian-ADMM (test_iso_bayes_admm.py)."""
    shards, rho = quadratics.regressions(5, 20), 3.0
    eye, m, v = torch.eye(20, dtype=torch.float64), torch.zeros(20).double(), torch.zeros(5, 20).double()
    federations = [
        quadratics.Federation(algorithm, shards)
        for algorithm in (
            FedADMM(delta=1.0, rho=rho, local=LocalTraining(optimiser="exact")),
            PrecondADMM(1.0, rho, 1.0, local=LocalTraining(optimiser="exact")),
        )
    ]
    alpha = 1 / (1 + rho * 5)
    for _ in range(6):
        own = torch.stack(
            [
                torch.linalg.solve(s.hessian + rho * eye, s.linear - v[k] + rho * m)
                for k, s in enumerate(shards)
            ]
        )
        v = v + rho * (own - m)
        m = (1 - alpha) * own.mean(0) + alpha * v.sum(0)
        for federation in federations:
            federation.play()
            assert quadratics.error(federation.mean, m) < 1e-12
