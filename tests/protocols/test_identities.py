"""Exact identities of the algorithms, from docs/references/equations.md#identities.

Relative error is |found - exact| / |exact|; everything is float64 unless a codec is named. Tolerances
are about 100 times what was measured, and not below 1e-13.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from torch import Tensor, nn

from fedsim.experiment import Experiment, build_algorithm
from fedsim.learning.solvers.first_order import LocalTraining
from fedsim.problem import Problem
from fedsim.seeds import RandomStream
from protocols.fedavg import FedAvg
from protocols.fedlap_cov import FedLapCov
from protocols.fedprox import FedProx
from workers.storage.client_states import model_digest

EXACT = LocalTraining(optimiser="exact")
DELTA = 0.3
K, D = 5, 20


def stacked(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


# ---- FedLap-Cov (identity 10)


def one_round_errors(quadratics: SimpleNamespace, algorithm: FedLapCov) -> tuple[float, float]:
    """Errors of mean and precision after one round of diagonal quadratics."""
    shards = quadratics.regressions(K, D, diagonal=True)
    federation = quadratics.Federation(algorithm, shards)
    federation.play()
    q = algorithm.posterior(federation.server.sites)
    precision = DELTA + stacked([s.hessian.diagonal() for s in shards])
    return (
        quadratics.error(q.mean, quadratics.minimiser(shards, DELTA)),
        quadratics.error(q.precision, precision),
    )


def test_fedlap_cov_with_exact_hessians_and_rho_1_is_exact_in_one_round(quadratics: SimpleNamespace) -> None:
    mean, precision = one_round_errors(quadratics, FedLapCov(DELTA, 1.0, local=EXACT))
    assert mean < 1e-13  # measured 2e-16
    assert precision < 1e-13  # measured 0


# ---- FedProx


def test_fedprox_averages_over_the_participants_by_their_sizes(quadratics: SimpleNamespace) -> None:
    sizes = (10, 20, 40, 80, 160)
    shards = quadratics.regressions(K, D, sizes=sizes)
    federation = quadratics.Federation(FedProx(2.0, local=EXACT), shards)
    federation.play([1, 3, 4], lost=[3])
    eye = 2.0 * torch.eye(D, dtype=torch.float64)
    w = {k: torch.linalg.solve(shards[k].hessian + sizes[k] * eye, shards[k].linear) for k in (1, 4)}
    assert quadratics.error(federation.mean, (20 * w[1] + 160 * w[4]) / 180) < 1e-13


# ---- on a real network, through the launcher, the coordinator and the wire


def summary(run: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return parsed


def test_fedavg_with_one_client_is_centralised_training_bit_for_bit(launched: Callable[..., Path]) -> None:
    """Three rounds of two epochs are six epochs of torch.optim.Adam on one flat parameter."""
    settings = {"epochs": 2, "batch_size": 64, "lr": 0.01}
    described: dict[str, Any] = {"algo": "fedavg", "clients": 1, "rounds": 3, "partition": "iid"}
    run = summary(launched("run", **described, hyperparameters=settings))
    problem = Problem.build(Experiment(**described), build_algorithm(FedAvg, settings), None)
    rows = problem.clients[0]
    inputs = torch.from_numpy(problem.dataset.train_inputs[rows]).float() / problem.dataset.scale
    targets = torch.from_numpy(problem.dataset.train_targets[rows])
    module, layout = problem.net.module, problem.net.layout
    whole = nn.Parameter(problem.start.clone())
    optimiser = torch.optim.Adam([whole], lr=0.01, fused=True)
    for r in (1, 2, 3):
        order = RandomStream(0, "client.1", r, 0).torch("batches")
        for _ in range(2):
            for selected in torch.randperm(len(targets), generator=order).split(64):
                values = {n: v.requires_grad_() for n, v in layout.unflatten(whole.detach().clone()).items()}
                logits = torch.func.functional_call(module, values, (inputs[selected],))
                loss = F.cross_entropy(logits, targets[selected])
                gradients = torch.autograd.grad(loss, list(values.values()))
                whole.grad = torch.cat([g.reshape(-1) for g in gradients])
                optimiser.step()
    assert run["model_sha256"] == model_digest(whole.detach(), None)


@pytest.mark.parametrize(
    "settings",
    [
        {"hyperparameters": {"rho": 1.0, "delta": 1e-4}, "inputs": "raw"},
        {"hyperparameters": {"rho": 1.0, "delta": 1e-4}, "codecs": {"precision": "bf16"}},
    ],
    ids=["small delta", "bf16"],
)
def test_fedlap_cov_precisions_stay_positive_under_rounding(
    launched: Callable[..., Path], settings: dict[str, Any]
) -> None:
    """S_g - V_k cancels where one client holds nearly all curvature; without the floor both of these
    runs are refused in round 4."""
    out = launched("floor", algo="fedlap_cov", partition="two_classes:50", clients=10, rounds=6, **settings)
    assert summary(out)["status"] == "done"
    precision = [v for k, v in load_file(out / "model.safetensors").items() if k.startswith("precision.")]
    assert all((v > 0).all() for v in precision)
