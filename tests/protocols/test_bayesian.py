"""Bayesian-ADMM and its relatives: PVI, BregmanADMM, IVON-ADMM, IVON-PVI and the committee machine.

Quadratic clients l_k(w) = 1/2 w' A_k w - b_k' w, solved exactly, in float64: identities 1, 2, 3, 11 and 12 of
docs/references/equations.md#identities. Relative errors are
|found - exact| / |exact|; tolerances are about 100 times what was measured, and not below 1e-13.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

from fedsim.algorithm import At
from fedsim.errors import TaskError, UsageError
from fedsim.learning.gaussian import Gaussian, is_full, product
from fedsim.learning.shards import QuadraticShard
from fedsim.learning.solvers.first_order import LocalTraining
from fedsim.learning.solvers.ivon import IvonTraining
from fedsim.learning.solvers.von import VonTraining
from fedsim.wire.gaussian_messages import check_size
from protocols import find
from protocols._dual_rule import Consensus, Dual
from protocols.bayes_admm import BayesADMM
from protocols.bcm import BCM
from protocols.bregman_admm import BregmanADMM
from protocols.ivon_admm import IvonADMM
from protocols.ivon_pvi import IvonPVI
from protocols.pvi import PVI
from tests.support.harness import problem_of

pytestmark = pytest.mark.slow

SGD = LocalTraining(optimiser="exact")
VON = VonTraining(optimiser="exact")
IVON = IvonTraining(optimiser="exact")
DELTA = 0.3
K, D = 5, 20
TIGHT = 1e-12

Shards = tuple[QuadraticShard, ...]


@pytest.fixture
def shards(quadratics: SimpleNamespace) -> Shards:
    result: Shards = quadratics.regressions(K, D)
    return result


def stacked(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def error(result: Tensor | float, exact: Tensor | float) -> float:
    result, exact = torch.as_tensor(result), torch.as_tensor(exact)
    return float((result - exact).norm() / exact.norm())


@dataclass(frozen=True)
class Truth:
    """The fixed point of every member at temperature tau, for a full or a diagonal family."""

    q: Gaussian
    sites: list[Gaussian]

    @staticmethod
    def of(shards: Shards, *, full: bool, tau: float = 1.0) -> Truth:
        """m* of sum_k l_k / tau + delta/2 |w|^2, V_k = A_k / tau (its diagonal), v_k = V_k m* - grad_k."""
        eye = torch.eye(D, dtype=torch.float64)
        whole = DELTA * eye + stacked([s.hessian for s in shards]) / tau
        mean = torch.linalg.solve(whole, stacked([s.linear for s in shards]) / tau)
        sites = []
        for s in shards:
            V = s.hessian / tau if full else s.hessian.diagonal() / tau
            slope = (s.hessian @ mean - s.linear) / tau
            sites.append(Gaussian((V @ mean if full else V * mean) - slope, V))
        prior = DELTA * eye if full else torch.full((D,), DELTA, dtype=torch.float64)
        return Truth(Gaussian.at(mean, prior + stacked([t.precision for t in sites])), sites)

    def errors(self, federation: Any) -> tuple[float, float, float]:
        """Of the mean, of the precision, and the largest of any client's dual."""
        q, duals = federation.server.q, [c.dual.site for c in federation.clients]
        pairs = list(zip(duals, self.sites, strict=True))
        return (
            error(q.mean, self.q.mean),
            error(q.precision, self.q.precision),
            max(max(error(a.shift, b.shift), error(a.precision, b.precision)) for a, b in pairs),
        )

    def put(self, federation: Any) -> Any:
        """The federation at the fixed point."""
        algorithm = federation.algorithm
        rho_server, _ = algorithm.exponents(At(federation.sizes))
        zs = [self.q**rho_server * t if algorithm.silent == "last" else None for t in self.sites]
        duals = [Dual(t, z) for t, z in zip(self.sites, zs, strict=True)]
        known = [d.z or d.site for d in duals]
        total = known[0]
        for factor in known[1:]:
            total = total * factor
        federation.server, federation.folds = Consensus(self.q, total, started=True), 1
        federation.clients = [replace(c, dual=d) for c, d in zip(federation.clients, duals, strict=True)]
        return federation


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


def sums_agree(federation: Any) -> float:
    """The server's sum of factors against the sum of what clients hold, relative to the sum of norms."""
    correction = [c.dual.z or c.dual.site for c in federation.clients]
    total = federation.server.total
    worst = 0.0
    for whole, parts in (
        (total.shift, [f.shift for f in correction]),
        (total.precision, [f.precision for f in correction]),
    ):
        scale = max(sum(float(p.norm()) for p in parts), 1e-300)
        worst = max(worst, float((whole - stacked(parts)).norm()) / scale)
    return worst


def random_rounds(federation: Any, count: int, seed: int) -> tuple[float, float]:
    """The largest error of the sums, and the largest reported dual_mismatch, after any round."""
    worst = reported = 0.0
    for participants, lost in participations(seed, count):
        federation.play(participants, lost)
        worst = max(worst, sums_agree(federation))
        reported = max(reported, federation.algorithm.dual_mismatch(federation.server, federation.clients))
    return worst, reported


# ---- one round (identity 1)


@pytest.mark.parametrize(
    "algorithm",
    [
        BayesADMM("full", DELTA, "1/K", local=VON),
        BayesADMM("full", DELTA, 1 / K, "last", local=VON),
        BayesADMM("full", DELTA, "1/K", cap_dual=False, local=VON),
        PVI("full", DELTA, damping=0.3, local=VON),
    ],
    ids=["bayes_admm", "bayes_admm, last", "bayes_admm, no cap", "pvi"],
)
def test_one_round_is_exact(quadratics: SimpleNamespace, algorithm: Any) -> None:
    """With damping, of the likelihoods to that power."""
    share = algorithm.damping if isinstance(algorithm, PVI) else 1.0
    shards = quadratics.regressions(K, D, spread=1.5, seed=3)
    federation = rounds(quadratics.Federation(algorithm, shards), 1)
    mean, precision, _ = Truth.of(shards, full=True, tau=1 / share).errors(federation)
    assert mean < 1e-12  # measured 4e-16 .. 7e-15
    assert precision < 1e-13  # measured 2e-16
    for client, shard in zip(federation.clients, shards, strict=True):
        assert error(client.dual.site.shift, share * shard.linear) < 1e-12
        assert error(client.dual.site.precision, share * shard.hessian) < 1e-12


# ---- any rho (identities 2 and 3)


def test_the_client_step_in_closed_form(quadratics: SimpleNamespace, shards: Shards) -> None:
    """S_k = S_g + (A_k - V_k)/rho, S_k m_k = S_g m_g + (b_k - v_k)/rho, with duals that are no optimum."""
    rho = 0.7
    truth = Truth.of(shards, full=True)
    federation = truth.put(
        quadratics.Federation(BayesADMM("full", DELTA, rho, cap_dual=False, local=VON), shards)
    )
    olds = [t**0.6 for t in truth.sites]
    federation.clients = [replace(c, dual=Dual(t)) for c, t in zip(federation.clients, olds, strict=True)]
    federation.play([0, 2])
    q = truth.q
    for k, up in federation.uploads.items():
        local = federation.algorithm.family.gaussian(up, 1.0)
        S = q.precision + (shards[k].hessian - olds[k].precision) / rho
        assert error(local.precision, S) < 1e-13
        assert error(local.shift, q.shift + (shards[k].linear - olds[k].shift) / rho) < 1e-12
        new = federation.clients[k].dual.site
        assert error(new.precision, olds[k].precision + rho * (S - q.precision)) < 1e-13


# ---- fixed points (identity 11)


@pytest.mark.parametrize(
    ("full", "algorithm"),
    [
        (True, BayesADMM("full", DELTA, "1/K", local=VON)),
        (False, IvonADMM(DELTA, "1/K", 0.2, tau=1.0, local=IVON)),
    ],
    ids=["bayes", "ivon_admm"],
)
def test_a_held_dual_keeps_the_fixed_point(
    quadratics: SimpleNamespace, shards: Shards, full: bool, algorithm: Any
) -> None:
    """cap_dual is on by default, and rho = 1/K holds V_k at the fixed point of clients that differ."""
    truth = Truth.of(shards, full=full)
    federation = rounds(truth.put(quadratics.Federation(algorithm, shards)), 1)
    assert min(up.info.dual_slack for up in federation.uploads.values()) < 0
    mean, precision, duals = truth.errors(federation)
    assert mean < TIGHT  # this holds: measured 5e-16
    assert precision < TIGHT  # measured 0.51 (full, 1/K), 1.30 (full, .05)
    assert duals < TIGHT  # measured 0.81, 1.04


# ---- members that are each other


def test_ivon_pvi_is_ivon_admm_without_averaging(quadratics: SimpleNamespace, shards: Shards) -> None:
    pvi = quadratics.Federation(IvonPVI(DELTA, 0.3, 0.1, local=IVON), shards)
    admm = quadratics.Federation(IvonADMM(DELTA, 1.0, 0.3, 0.0, 0.1, local=IVON), shards)
    other = quadratics.Federation(IvonADMM(DELTA, 1.0, 0.3, "rho", 0.1, local=IVON), shards)
    for participants, lost in participations(3, 30):
        for federation in (pvi, admm, other):
            federation.play(participants, lost)
    for federation, same in ((admm, True), (other, False)):
        assert torch.equal(federation.server.q.shift, pvi.server.q.shift) == same
        assert torch.equal(federation.server.q.precision, pvi.server.q.precision) == same


@pytest.mark.parametrize("rho_server", ["rho", 7.0])
@pytest.mark.parametrize("rho", [1.0, 3.0])
def test_with_all_clients_and_gamma_1_over_k_the_server_is_the_mean_whatever_its_penalty(
    quadratics: SimpleNamespace, shards: Shards, rho: float, rho_server: Any
) -> None:
    """lambda_0 + sum_k eta_k = lambda_g is kept by induction: lambda_g = mean_k lambda_k for any rho_server.
    With rho = 1 the algorithm is IVON-PVI at damping 1/K (docs/family.md)."""
    admm = quadratics.Federation(IvonADMM(DELTA, rho, 1 / K, rho_server, 0.1, local=IVON), shards)
    pvi = quadratics.Federation(IvonPVI(DELTA, "1/K", 0.1, local=IVON), shards)
    for _ in range(15):
        down = admm.algorithm.broadcast(admm.server, admm.context())
        q = admm.algorithm.family.gaussian(down, admm.server.q.precision)
        admm.play()
        pvi.play()
        sent = product(c.dual.site for c in admm.clients) * admm.algorithm.prior(admm.start)
        assert error(admm.server.q.shift, sent.shift) < 1e-12  # lambda_g = lambda_0 + sum eta_k
        assert error(admm.server.q.precision, sent.precision) < 1e-12
        assert not torch.equal(admm.server.q.shift, q.shift)
        if rho == 1:
            assert error(admm.server.q.mean, pvi.server.q.mean) < 1e-12  # measured 1e-15
            assert error(admm.server.q.precision, pvi.server.q.precision) < 1e-12


# ---- silent clients, losses, codecs


@pytest.mark.parametrize(
    ("full", "algorithm", "count"),
    [
        (True, BayesADMM("full", DELTA, 1.0, local=VON), 350),
        (True, BayesADMM("full", DELTA, "1/K", "last", cap_dual=False, local=VON), 150),
        (False, BayesADMM("diagonal", DELTA, 1.0, local=VON), 550),
        (False, BayesADMM("diagonal", DELTA, 1.0, "last", local=VON), 550),
        (False, IvonADMM(DELTA, 1.0, 0.2, tau=1.0, silent="last", local=IVON), 700),
        (False, PVI("diagonal", DELTA, 0.5, local=VON), 400),
    ],
)
def test_convergence_under_partial_participation_and_losses(
    quadratics: SimpleNamespace, shards: Shards, full: bool, algorithm: Any, count: int
) -> None:
    federation = quadratics.Federation(algorithm, shards)
    sums, reported = random_rounds(federation, count, seed=1)
    mean, precision, duals = Truth.of(shards, full=full).errors(federation)
    slow = isinstance(algorithm, BayesADMM) and not full and algorithm.silent == "last"
    assert mean < (1e-7 if slow else 2e-12)  # measured 2e-15 .. 2e-14; slow: 2e-10, and 1e-15 in the end
    assert precision < 1e-11
    assert duals < (1e-7 if slow else 1e-11)
    assert sums < TIGHT  # measured 3e-15
    assert reported < 1e-9  # measured 3e-15


# ---- PVI and BregmanADMM against Bayesian-ADMM


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_bregmans_dual_step_is_in_expectation_parameters(covariance: Any) -> None:
    """eta_k + c rho (mu_k - mu_g) with eta = (v, -V/2), mu = (m, m m' + S^-1); or with the release's sign."""
    draws = torch.Generator().manual_seed(0)

    def drawn() -> Gaussian:
        root = torch.randn(4, 4, generator=draws, dtype=torch.float64)
        S = root @ root.T + torch.eye(4, dtype=torch.float64)
        S = S if covariance == "full" else S.diagonal()
        return Gaussian.at(torch.randn(4, generator=draws, dtype=torch.float64), S)

    def second(q: Gaussian) -> Tensor:
        m, S = q.mean, torch.as_tensor(q.precision)
        whole = torch.outer(m, m) + torch.linalg.inv(S if is_full(S) else torch.diag(S))
        return whole if is_full(S) else whole.diagonal()

    local, q = drawn(), drawn()
    for dual, factor in (("paper", -2.0), ("release", 1.0)):
        algorithm = BregmanADMM(covariance, rho=0.7, damping=0.3, dual=dual)  # type: ignore[arg-type]
        step = algorithm.dual_step(local, q, At((1, 1)))
        assert error(step.shift, 0.21 * (local.mean - q.mean)) < 1e-13
        assert error(step.precision, 0.21 * factor * (second(local) - second(q))) < 1e-12


# ---- the committee machine (identity 12)


def test_the_committee_is_exact_where_the_local_posteriors_are(quadratics: SimpleNamespace) -> None:
    """S_g = sum S_k - (K-1) delta I; without dividing out the prior it would count K times."""
    shards = quadratics.regressions(K, D, diagonal=True)
    truth = Truth.of(shards, full=False)
    federation = rounds(quadratics.Federation(BCM(DELTA, local=SGD), shards), 1)

    def errors(federation: Any) -> tuple[float, float]:
        q = federation.algorithm.model(federation.server, federation.context())
        return error(q.mean, truth.q.mean), error(q.precision, truth.q.precision)

    assert max(errors(federation)) < 1e-13  # measured 3e-16
    locals_ = stacked([s.hessian.diagonal() + DELTA for s in shards])
    assert error(truth.q.precision, locals_ - (K - 1) * DELTA) < 1e-13
    federation.play([0, 2])  # asked again: replaced, not multiplied in twice
    federation.play()
    assert max(errors(federation)) < 1e-13
    gradually = quadratics.Federation(BCM(DELTA, local=SGD), shards)
    steps = ([0, 1], [], 2), ([1, 2], [2], 2), ([0, 2, 3], [3], 3), ([3, 4], [], 5)
    for participants, lost, heard in steps:
        gradually.play(participants, lost)
        assert (errors(gradually)[0] > 1e-3) == (heard < 5)
        assert gradually.algorithm.report(gradually.server, gradually.context()) == {"heard": heard}
    assert max(errors(gradually)) < 1e-13


# ---- errors


def test_a_client_problem_without_minimum_is_refused(quadratics: SimpleNamespace, shards: Shards) -> None:
    federation = quadratics.Federation(
        IvonADMM(DELTA, "1/K", 0.2, tau=1.0, cap_dual=False, local=IVON), shards
    )
    with pytest.raises(TaskError, match=r"local problem has no minimum: .* raise rho, or leave cap_dual on"):
        rounds(federation, 10)


@pytest.mark.parametrize("name", ["bayes_admm", "pvi", "bregman_admm", "fedlap_cov"])
def test_a_full_covariance_of_a_large_model_is_refused(name: str) -> None:
    up = find(name)(covariance="full").exchanges[0].up
    check_size(up, 3000)
    # the mean and the triangle in float32: 4 (P + P(P+1)/2) would be 18,024,008 bytes
    with pytest.raises(UsageError, match=r"P = 3,001 .* bytes per client.*Use --set covariance=diagonal"):
        check_size(up, 3001)
    problem_of(find(name), {"covariance": "diagonal"}, model="mlp_small")
    with pytest.raises(UsageError, match="a full covariance of P = 7,510"):
        problem_of(find(name), {"covariance": "full"}, model="mlp_small")


# ---- on real models, through the launcher, the coordinator and the wire


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("algo", "experiment", "settings", "rho"),
    [
        ("ivon_admm", {"participation": "2"}, {"epochs": 1, "silent": "last", "rho": 1.0}, 1.0),
        (
            "bayes_admm",
            {"model": "logistic", "fraction": 0.1, "rounds": 2},
            {"steps": 2, "samples": 1, "rho": 0.5},
            0.5,
        ),
        ("bregman_admm", {}, {"steps": 2, "rho": 2.0}, 2.0),
    ],
    ids=["ivon_admm", "bayes", "bregman"],
)
def test_metrics_of_a_run(
    launched: Callable[..., Path], algo: str, experiment: dict[str, Any], settings: dict[str, Any], rho: float
) -> None:
    common = {"algo": algo, "clients": 3, "rounds": 3, "fraction": 0.4, "eval_samples": 3}
    run = launched("run", **(common | experiment), hyperparameters=settings)
    result = lines(run)
    assert len(result) == experiment.get("rounds", 3) + 1
    assert "ensemble_nll" not in result[0]  # a point
    for m in result[1:]:
        assert m["rho"] == pytest.approx(rho)
        assert m["primal_residual"] > 0 and m["dual_residual"] > 0
        assert m["capped"] >= 0 and (m["dual_slack"] < 0) == (m["capped"] > 0)
        assert 0 <= m["ensemble_accuracy"] <= 1 and m["ensemble_nll"] > 0
        assert m["ensemble_nll"] != m["test_nll"]
    assert result[-1]["test_nll"] < result[0]["test_nll"]
    model = load_file(run / "model.safetensors")
    assert any(name.startswith("precision") for name in model)
