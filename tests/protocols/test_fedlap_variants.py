"""FedLap's rescaling to ADMM's form (Eq. 18), FedLap-Cov with full covariances and with function terms, and
FedLap-Func on public inputs."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.errors import DataError, UsageError
from fedsim.learning.function_space import FunctionTerm
from fedsim.learning.solvers.first_order import LocalTraining
from fedsim.participation import Participation
from fedsim.wire.state_file import encode_state
from protocols._local_solvers import VonTraining
from protocols.fedlap import FedLap
from protocols.fedlap_cov import FedLapCov
from protocols.fedlap_cov_func import FedLapCovFunc
from protocols.fedlap_func_public import FedLapFuncPublic
from protocols.pvi import PVI
from tests.support.harness import listed, play, problem_of, steps
from tests.support.tolerances import moved

K, D, DELTA = 4, 6, 5.0
SIZES = (10, 20, 40, 80)
EXACT = LocalTraining(optimiser="exact")


def participations(seed: int, count: int) -> list[tuple[list[int], list[int]]]:
    """Random participants, a third of whose uploads are lost."""
    draws = random.Random(seed)
    rounds = [[k for k in range(K) if draws.random() < 0.7] for _ in range(count)]
    return [(here, [k for k in here if draws.random() < 1 / 3]) for here in rounds]


@pytest.mark.parametrize("rho", ["1/K", "N_k/N", "1/|S|"])
def test_fedlap_is_admms_form_with_scaled_duals(quadratics: SimpleNamespace, rho: Any) -> None:
    """Eq. 18, u_k = delta v_k / N_k: MEAN loss, a prox of delta/N_k, u_k += rho (delta/N_k) (w_k - w_g)."""
    shards = quadratics.regressions(K, D, sizes=SIZES)
    federation = quadratics.Federation(FedLap(DELTA, rho, local=EXACT), shards)
    u, w_g = torch.zeros(K, D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
    for here, lost in participations(3, 12):
        federation.play(here, lost)
        steps = {"1/K": [1 / K] * K, "N_k/N": [n / sum(SIZES) for n in SIZES]}.get(
            rho, [1 / max(len(here), 1)] * K
        )
        change = torch.zeros_like(u)
        for k in (k for k in here if k not in lost):
            pull = DELTA / SIZES[k]
            matrix = shards[k].hessian / SIZES[k] + pull * torch.eye(D, dtype=torch.float64)
            w_k = torch.linalg.solve(matrix, shards[k].linear / SIZES[k] - u[k] + pull * w_g)
            change[k] = steps[k] * pull * (w_k - w_g)
        u = u + change
        w_g = (torch.tensor(SIZES)[:, None] / DELTA * u).sum(0)
        assert quadratics.error(federation.mean, w_g) < 1e-12
        duals = torch.stack([c.dual for c in federation.clients])
        assert quadratics.error(duals * DELTA / torch.tensor(SIZES)[:, None], u) < 1e-12


def test_with_full_covariances_on_quadratics_it_is_pvi(quadratics: SimpleNamespace) -> None:
    """The Hessian is exact, so the Laplace approximation is the solution of PVI's problem (Eq. 5)."""
    shards = quadratics.regressions(K, D, sizes=SIZES)
    ours = quadratics.Federation(FedLapCov(DELTA, "1/K", covariance="full", local=EXACT), shards)
    local = VonTraining(optimiser="exact")
    theirs = quadratics.Federation(PVI("full", DELTA, "1/K", cap_dual=False, local=local), shards)
    for here, lost in participations(4, 12):
        ours.play(here, lost)
        theirs.play(here, lost)
        if not ours.folds:
            continue
        q, other = (f.algorithm.model(f.server, f.context()) for f in (ours, theirs))
        assert quadratics.error(q.mean, other.mean) < 1e-10
        assert quadratics.error(q.precision, other.precision) < 1e-10
        assert ours.algorithm.dual_mismatch(ours.server, ours.clients) < 1e-12


def test_a_full_covariance_crosses_the_wire_as_a_triangle(tmp_path: Path) -> None:
    problem = problem_of(FedLapCov, {"covariance": "full"}, fraction=0.2)
    run = play(problem, tmp_path / "run", listed(*[Participation((0, 1, 2))] * 2))
    size = problem.net.layout.size
    values = {
        (e.direction, e.field, e.bytes) for e in run.entries if e.kind == "algorithm" and e.layer == "values"
    }
    triangle = 4 * size * (size + 1) // 2
    sent = {("mean", 4 * size), ("precision", triangle)}
    assert {v[1:] for v in values if v[0] == "down"} == sent
    assert {v[1:] for v in values if v[0] == "up"} == {*sent, ("train_loss", 8)}
    assert run.metrics[-1]["floored"] == 0
    assert problem.algorithm.dual_mismatch(run.outcome.server, run.states) < 1e-12


def test_a_full_covariance_of_a_network_is_refused() -> None:
    with pytest.raises(UsageError, match=r"full covariance of P = 7,510 .* the limit is P = 3,000"):
        problem_of(FedLapCov, {"covariance": "full"}, model="mlp_small")


# ---- FedLap-Cov with function terms

ROUGH = (
    Participation((0, 1)),
    Participation((0, 1, 2), frozenset({1})),
    Participation((2,)),
    Participation((0, 1, 2)),
)
"""Partial participation and lost uploads."""


@pytest.mark.parametrize("without", [{"points_per_class": 0}, {"tau": 0.0}], ids=str)
def test_without_memory_it_is_fedlap_cov_bit_for_bit(without: dict[str, Any], tmp_path: Path) -> None:
    def states(algorithm: Any, folder: str, **settings: Any) -> tuple[Any, list[bytes], list[float]]:
        run = play(problem_of(algorithm, settings, rounds=len(ROUGH)), tmp_path / folder, listed(*ROUGH))
        sites = [encode_state(run.outcome.server.sites), *(encode_state(c.site) for c in run.states)]
        return run.bits[0], sites, [m["test_nll"] for m in run.metrics]

    theirs = states(FedLapCov, "cov")
    assert states(FedLapCovFunc, "func", **without) == theirs
    assert states(FedLapCovFunc, "memory") != theirs


def test_the_servers_step_minimises_memory_and_sites_together() -> None:
    """There S_g w_g - sum v_k + gradient of the memory term = 0."""
    problem = problem_of(FedLapCovFunc, {"server_steps": 3000, "server_lr": 1e-3, "delta": 20.0})
    algorithm = problem.algorithm
    assert isinstance(algorithm, FedLapCovFunc)
    _, servers, _ = steps(problem)
    server, ctx = servers[2], problem.context(2, 1)
    assert torch.equal(server.mean, algorithm.server_step(server.sites, server.known, ctx))

    def slope(w: torch.Tensor) -> torch.Tensor:
        points, net = server.known.points, problem.net
        net.load(w.float())
        net.module.eval()
        net.grads.zero_()
        labels = server.known.logits.softmax(dim=1)
        FunctionTerm(problem.read(points.inputs), labels, algorithm.tau * points.weights).add_gradient(net)
        return net.grads.double() + algorithm.precision(server.sites) * w - server.sites.shift

    start = server.sites.shift / algorithm.precision(server.sites)
    assert slope(server.mean).norm() < 0.02 * slope(start).norm()  # Adam with a constant step


# ---- FedLap-Func on public inputs


@pytest.mark.parametrize("without", [{"public": 0}, {"tau": 0.0, "public": 0}], ids=str)
def test_without_public_inputs_it_is_fedlap_bit_for_bit(without: dict[str, Any], tmp_path: Path) -> None:
    def bits(algorithm: Any, folder: str, **settings: Any) -> tuple[Any, ...]:
        run = play(problem_of(algorithm, settings, rounds=len(ROUGH)), tmp_path / folder, listed(*ROUGH))
        return run.bits[0], [encode_state(c.dual) for c in run.states], [m["test_nll"] for m in run.metrics]

    assert bits(FedLapFuncPublic, "func", **without) == bits(FedLap, "fedlap")


def test_public_inputs_are_no_clients_and_no_test_inputs_and_everybody_has_the_same() -> None:
    problem, without = problem_of(FedLapFuncPublic, {"public": 50}), problem_of(FedLap)
    rows = set(problem.public.tolist())
    assert len(rows) == 50 and not rows & {int(i) for c in problem.clients for i in c}
    assert {int(i) for c in without.clients for i in c} == rows | {int(i) for c in problem.clients for i in c}
    assert sum(problem.sizes) == sum(without.sizes) - 50
    assert not len(without.public) and not len(without.task(1, 1, 0).public)
    expected = torch.from_numpy(problem.dataset.train_inputs[problem.public]).flatten(1)
    for k in range(3):
        assert torch.equal(problem.task(1, 1, k).public, expected)
    assert torch.equal(problem.context(1, 1).public, expected)
    with pytest.raises(DataError, match="public inputs leave client 0 without"):
        problem_of(FedLapFuncPublic, {"public": 10**6})


def test_a_clients_public_term_is_that_of_the_formula() -> None:
    """(tau/M) sum_i [ N_heard l(yhat_ig, w) - N_k l(yhat_ik, w) ], in float64."""
    problem = problem_of(FedLapFuncPublic, {"public": 15, "tau": 0.7})
    algorithm = problem.algorithm
    assert isinstance(algorithm, FedLapFuncPublic)
    created, _, _ = steps(problem)
    inputs = problem.read(problem.public_inputs).double().flatten(1)

    def logs(w: Tensor, inputs: Tensor) -> Tensor:
        return (inputs @ w.reshape(10, -1).mT).log_softmax(dim=1)

    assert algorithm.term(created[0].client, created[0].down, created[0].shard, problem.public_inputs) is None
    for k, step in enumerate(created[3:]):
        term = algorithm.term(step.client, step.down, step.shard, step.task.public)
        assert term is not None and step.down.heard == sum(problem.sizes)
        w = torch.randn(problem.net.layout.size, generator=torch.Generator().manual_seed(k))

        def formula(
            w: Tensor, model: Tensor, model_k: Tensor, x: Tensor, size: int = problem.sizes[k]
        ) -> Tensor:
            labels = sum(problem.sizes) * logs(model, x).exp() - size * logs(model_k, x).exp()
            at = w.clone().requires_grad_()
            return torch.autograd.grad(-(0.7 / 15) * (labels * logs(at, x)).sum(), at)[0]

        supplied = (w, step.down.mean, created[k].up.mean, inputs)
        exact = formula(*(x.double() for x in supplied))
        error = moved(formula, *supplied, roundings=2 * inputs.shape[1] + len(inputs) + 60)
        problem.net.load(w)
        problem.net.module.eval()
        problem.net.grads.zero_()
        term.add_gradient(problem.net)
        assert float((problem.net.grads - exact).norm()) < error < 1e-3 * float(exact.norm())
