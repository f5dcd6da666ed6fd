"""Exact identities of the algorithms, from docs/references/equations.md#identities.

Relative error is |found - exact| / |exact|; everything is float64 unless a codec is named. Tolerances
are about 100 times what was measured, and not below 1e-13.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from torch import Tensor, nn

from fedsim.algorithm import AnyShard, Task
from fedsim.experiment import Experiment, build_algorithm
from fedsim.learning.solvers.first_order import LocalTraining
from fedsim.problem import Problem
from fedsim.seeds import RandomStream
from protocols import fedlap, fedlap_cov
from protocols.fedavg import FedAvg
from protocols.fedlap import FedLap
from protocols.fedlap_cov import FedLapCov
from protocols.fedprox import FedProx
from workers.storage.client_states import model_digest

EXACT = LocalTraining(optimiser="exact")
DELTA = 0.3
K, D = 5, 20


def stacked(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


# ---- FedLap-Cov (identity 10)


@dataclass(frozen=True)
class NewV(FedLapCov):
    """The mistake to detect: S_k from the NEW V_k."""

    def client_update(
        self, client: fedlap_cov.Client, down: fedlap_cov.Down, shard: AnyShard, task: Task
    ) -> tuple[fedlap_cov.Client, fedlap_cov.Up]:
        draft, up = super().client_update(client, down, shard, task)
        old = client.site.precision
        hessian = up.precision - down.precision + old
        new = (1 - float(self.rho)) * old + float(self.rho) * hessian
        return draft, replace(up, precision=hessian - new + down.precision)


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


def test_fedlap_cov_with_the_new_v_in_s_is_wrong(quadratics: SimpleNamespace) -> None:
    mean, precision = one_round_errors(quadratics, NewV(DELTA, 1.0, local=EXACT))
    assert mean > 0.5
    assert precision > 0.5  # 98 % in docs/references/equations.md#identity-10


@pytest.mark.parametrize("rho", [0.2, 0.7, 1.0])
def test_fedlap_cov_sites_grow_geometrically(quadratics: SimpleNamespace, rho: float) -> None:
    shards = quadratics.regressions(K, D, diagonal=True)
    federation = quadratics.Federation(FedLapCov(DELTA, rho, local=EXACT), shards)
    for r in range(1, 7):
        federation.play()
        for client, shard in zip(federation.clients, shards, strict=True):
            expected = (1 - (1 - rho) ** r) * shard.hessian.diagonal()
            assert quadratics.error(client.site.precision, expected) < 1e-13  # measured 3e-16


@pytest.mark.parametrize("rho", ["1/K", 1.0])
def test_fedlap_cov_with_diagonal_hessians_converges_to_the_exact_mode(
    quadratics: SimpleNamespace, rho: Any
) -> None:
    shards = quadratics.regressions(K, D)
    federation = quadratics.Federation(FedLapCov(DELTA, rho, local=EXACT), shards)
    federation.play()
    mode = quadratics.minimiser(shards, DELTA)
    assert quadratics.error(federation.mean, mode) > 1e-3  # it takes more than a round
    for _ in range(299):
        federation.play()
    assert quadratics.error(federation.mean, mode) < 1e-13
    q = federation.algorithm.posterior(federation.server.sites)
    assert quadratics.error(q.precision, DELTA + stacked([s.hessian.diagonal() for s in shards])) < 1e-13
    for client, shard in zip(federation.clients, shards, strict=True):
        v = shard.hessian.diagonal() * mode - (shard.hessian @ mode - shard.linear)
        assert quadratics.error(client.site.shift, v) < 1e-12


def sums_agree(federation: Any) -> float:
    """Largest relative error of the server's sums against the sums of all clients' duals."""
    server, clients = federation.server, federation.clients
    if isinstance(server, fedlap.Server):
        pairs = [(server.dual, [c.dual for c in clients])]
    else:
        pairs = [
            (server.sites.shift, [c.site.shift for c in clients]),
            (server.sites.precision, [c.site.precision for c in clients]),
        ]
    return max(
        float((total - stacked(parts)).norm() / max(float(total.norm()), 1e-300)) for total, parts in pairs
    )


def random_rounds(federation: Any, rounds: int, seed: int) -> float:
    """Random participants, a third of the uploads lost; the largest error of the sums after any round."""
    draws, worst = random.Random(seed), 0.0
    for _ in range(rounds):
        participants = [k for k in range(K) if draws.random() < 0.6]
        lost = [k for k in participants if draws.random() < 1 / 3]
        federation.play(participants, lost)
        worst = max(worst, sums_agree(federation))
    return worst


def test_fedlap_cov_converges_to_the_same_point_under_partial_participation_and_losses(
    quadratics: SimpleNamespace,
) -> None:
    shards = quadratics.regressions(K, D)
    federation = quadratics.Federation(FedLapCov(DELTA, 1.0, local=EXACT), shards)
    assert random_rounds(federation, 400, seed=1) < 1e-12
    assert quadratics.error(federation.mean, quadratics.minimiser(shards, DELTA)) < 1e-12
    precision = federation.algorithm.posterior(federation.server.sites).precision
    assert quadratics.error(precision, DELTA + stacked([s.hessian.diagonal() for s in shards])) < 1e-12


def test_committing_on_send_would_be_seen(quadratics: SimpleNamespace) -> None:
    """A commit whose upload was lost breaks the sums, so the tests above can tell."""
    federation = quadratics.Federation(
        FedLapCov(DELTA, 1.0, local=EXACT), quadratics.regressions(K, D), commit_on_send=True
    )
    assert random_rounds(federation, 20, seed=1) > 0.1


# ---- FedLap (identities 7 and 8)


def at_fixed_point(quadratics: SimpleNamespace, algorithm: FedLap, shards: Any) -> tuple[Any, Tensor]:
    """A federation put at w_g = w* = argmin sum l_k + delta/2 |w|^2 and v_k = -grad l_k(w*) / delta."""
    federation = quadratics.Federation(algorithm, shards)
    best = quadratics.minimiser(shards, algorithm.delta)
    federation.server = fedlap.Server(best, started=True)
    federation.clients = [fedlap.Client((s.linear - s.hessian @ best) / algorithm.delta) for s in shards]
    return federation, best


@pytest.mark.parametrize("rho", ["1/K", "N_k/N", 1.0])
@pytest.mark.parametrize("delta", [1.0, 100.0])
def test_one_round_of_fedlap_does_not_move_its_fixed_point(
    quadratics: SimpleNamespace, rho: Any, delta: float
) -> None:
    shards = quadratics.regressions(K, D, sizes=(10, 20, 40, 80, 160))
    algorithm = FedLap(delta, rho, local=EXACT)
    federation, best = at_fixed_point(quadratics, algorithm, shards)
    duals = [c.dual for c in federation.clients]
    federation.play()
    assert quadratics.error(federation.mean, best) < 1e-12  # measured 5e-14
    for client, dual in zip(federation.clients, duals, strict=True):
        assert quadratics.error(client.dual, dual) < 1e-12
    federation.server = fedlap.Server(best + 0.1, started=True)  # elsewhere it does move
    federation.play()
    assert quadratics.error(federation.mean, best + 0.1) > 1e-3


def test_first_round_of_fedlap_is_the_mean_of_proximal_steps_from_zero(quadratics: SimpleNamespace) -> None:
    shards = quadratics.regressions(K, D)
    federation = quadratics.Federation(FedLap(DELTA, "1/K", local=EXACT), shards)
    federation.start = torch.ones(D, dtype=torch.float64)  # where training starts, not the prox centre
    federation.play()
    eye = DELTA * torch.eye(D, dtype=torch.float64)
    steps = [torch.linalg.solve(s.hessian + eye, s.linear) for s in shards]
    assert quadratics.error(federation.mean, stacked(steps) / K) < 1e-13  # measured 1e-16


def round_map(quadratics: SimpleNamespace, rho: float, curvature: float, delta: float) -> Tensor:
    """The linear part of one FedLap round of scalar clients with equal curvature: v -> v', (K, K)."""
    shards = tuple(
        replace(s, hessian=torch.full((1, 1), curvature, dtype=torch.float64))
        for s in quadratics.regressions(K, 1)
    )

    def played(duals: Tensor) -> Tensor:
        federation = quadratics.Federation(FedLap(delta, rho, local=EXACT), shards)
        federation.server = fedlap.Server(duals.sum().reshape(1), started=True)
        federation.clients = [fedlap.Client(v.reshape(1)) for v in duals]
        federation.play()
        return torch.cat([c.dual for c in federation.clients])

    origin = played(torch.zeros(K, dtype=torch.float64))
    columns = [played(e) - origin for e in torch.eye(K, dtype=torch.float64)]
    return torch.stack(columns, dim=1)


def test_homogeneous_scalar_clients_contract_at_the_two_known_rates(quadratics: SimpleNamespace) -> None:
    a0, delta = 7.0, 2.0
    g = delta / (a0 + delta)
    rates = torch.linalg.eigvals(round_map(quadratics, 1 / K, a0, delta)).real.sort().values
    expected = torch.tensor([(1 - 1 / K) * g] + [1 - g / K] * (K - 1), dtype=torch.float64)
    assert expected[0] == pytest.approx(0.17778, abs=1e-5)
    assert expected[1] == pytest.approx(0.95556, abs=1e-5)
    torch.testing.assert_close(rates, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("margin", [0.99, 1.01])
def test_homogeneous_scalar_clients_are_stable_up_to_the_known_rho(
    quadratics: SimpleNamespace, margin: float
) -> None:
    a0, delta = 7.0, 2.0
    g = delta / (a0 + delta)
    rho = margin * 2 / (K - (K - 1) * g)
    radius = torch.linalg.eigvals(round_map(quadratics, rho, a0, delta)).abs().max()
    assert (float(radius) < 1) == (margin < 1)


# ---- duals and sums through the real wire


@pytest.mark.parametrize("codec", ["dense", "bf16"])
@pytest.mark.parametrize(
    ("algorithm", "fields"),
    [
        (FedLap(100.0, "1/K", local=EXACT), ("mean", "train_loss")),
        (FedLapCov(100.0, 0.5, local=EXACT), ("mean", "precision", "train_loss")),
    ],
    ids=["fedlap", "fedlap_cov"],
)
@pytest.mark.parametrize("seed", range(6))
def test_sums_equal_duals_through_any_codec_schedule_and_loss(
    quadratics: SimpleNamespace, algorithm: Any, fields: tuple[str, ...], codec: str, seed: int
) -> None:
    up = dict.fromkeys(fields, codec)
    codecs = {"down": {f: c for f, c in up.items() if f != "train_loss"}, "up": up}
    shards = quadratics.regressions(K, D, seed=seed)
    federation = quadratics.Federation(algorithm, shards, codecs)
    assert random_rounds(federation, 25, seed) < 1e-12
    assert float(federation.mean.norm()) > 0.01  # something was folded
    plain = quadratics.Federation(algorithm, shards)
    random_rounds(plain, 25, seed)
    assert 0 < quadratics.error(federation.mean, plain.mean) < (1e-3 if codec == "dense" else 0.5)


# ---- FedProx


def test_one_round_of_fedprox_does_not_move_its_fixed_point(quadratics: SimpleNamespace) -> None:
    """w_g = sum_k N_k/N argmin lbar_k + delta/2 |w - w_g|^2, a linear system in w_g."""
    sizes = (10, 20, 40, 80, 160)
    shards = quadratics.regressions(K, D, sizes=sizes)
    delta, eye = 2.0, torch.eye(D, dtype=torch.float64)
    inverses = [torch.linalg.inv(s.hessian / s.size + delta * eye) for s in shards]
    shares = [n / sum(sizes) for n in sizes]
    cavity = stacked([a * delta * i for a, i in zip(shares, inverses, strict=True)])
    rest = stacked([a * i @ s.linear / s.size for a, i, s in zip(shares, inverses, shards, strict=True)])
    fixed = torch.linalg.solve(eye - cavity, rest)
    federation = quadratics.Federation(FedProx(delta, local=EXACT), shards)
    federation.server = replace(federation.server, mean=fixed)
    federation.play()
    assert quadratics.error(federation.mean, fixed) < 1e-13
    federation.play([0, 2])  # a mean over the participants: no fixed point of fewer clients
    assert quadratics.error(federation.mean, fixed) > 1e-3


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


@pytest.mark.parametrize("prox_norm", ["squared", "unsquared"])
def test_fedprox_without_a_prox_is_fedavg_bit_for_bit(launched: Callable[..., Path], prox_norm: str) -> None:
    common: dict[str, Any] = {"clients": 3, "rounds": 2, "fraction": 0.5}
    avg = summary(launched("avg", algo="fedavg", hyperparameters={"epochs": 2}, **common))
    settings = {"epochs": 2, "delta": 0.0, "prox_norm": prox_norm}
    prox = summary(launched("prox", algo="fedprox", hyperparameters=settings, **common))
    other = summary(launched("other", algo="fedprox", hyperparameters=settings | {"delta": 0.1}, **common))
    for digest in ("model_sha256", "clients_sha256"):
        assert prox[digest] == avg[digest]
        assert other[digest] != avg[digest]


def test_fedavg_with_one_client_is_centralised_training_bit_for_bit(launched: Callable[..., Path]) -> None:
    """Three rounds of two epochs are six epochs of torch.optim.Adam on one flat parameter."""
    settings = {"epochs": 2, "batch_size": 64, "lr": 0.01}
    described: dict[str, Any] = {"algo": "fedavg", "clients": 1, "rounds": 3, "partition": "iid"}
    run = summary(launched("run", **described, hyperparameters=settings))
    problem = Problem.build(Experiment(**described), build_algorithm(FedAvg, settings), None)
    rows = problem.clients[0]
    inputs = torch.from_numpy(problem.dataset.train_inputs[rows]).float() / problem.scale
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
