"""The rules of a step: 1/K, N_k/N, 1/|S| (clients asked in the round), and one rule after another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedsim.algorithm import Algorithm, At, step_size
from fedsim.errors import UsageError
from fedsim.experiment import build_algorithm
from fedsim.learning.solvers.first_order import LocalTraining
from fedsim.wire.state_file import encode_state
from protocols import find
from protocols._local_solvers import IvonTraining, VonTraining
from protocols.ama import AMA
from protocols.fedlap import FedLap
from protocols.fedlap_cov import FedLapCov
from protocols.ivon_pvi import IvonPVI
from protocols.pvi import PVI

K, D, DELTA = 5, 6, 30.0
EXACT = LocalTraining(optimiser="exact")
SIZES = (10, 20, 40, 80, 50)


def members(rule: str) -> list[Algorithm[Any, Any, Any, Any]]:
    """Every kind of algorithm that takes a step, with this rule."""
    von, ivon = VonTraining(optimiser="exact"), IvonTraining(optimiser="exact")
    either = [FedLap(DELTA, rule, local=EXACT), FedLapCov(DELTA, rule, local=EXACT)]
    if rule not in ("1/K", "1/|S|"):
        return either
    ama = AMA(DELTA, "delta/K" if rule == "1/K" else "delta/|S|", local=EXACT)
    return [*either, ama, PVI("full", DELTA, rule, local=von), IvonPVI(DELTA, rule, local=ivon)]


def test_the_numbers_of_the_rules() -> None:
    at = At((1, 2, 5), 2, round=3, asked=2)
    rules: dict[Any, float] = {0.3: 0.3, 2: 2.0, "1/K": 1 / 3, "N_k/N": 5 / 8, "1/|S|": 1 / 2}
    rules |= {"20/K": 20 / 3, "0.5/K": 0.5 / 3, "3/|S|": 3 / 2}
    assert {rule: step_size(rule, at) for rule in rules} == rules
    assert at.value("N_k/N") == 5 / 8


@pytest.mark.parametrize(("round", "value"), [(1, 5 / 8), (10, 5 / 8), (11, 1 / 3), (12, 1 / 3)])
def test_a_rule_for_the_first_rounds_and_one_for_the_others(round: int, value: float) -> None:
    """Swaroop et al. 2025, App. E.6."""
    assert step_size("N_k/N:10:1/K", At((1, 2, 5), 2, round)) == value


def test_where_no_client_is_asked_all_count() -> None:
    assert step_size("1/|S|", At((1, 2, 5))) == 1 / 3


@pytest.mark.parametrize(
    "rule", [0, -1.0, "1/S", "0/K", "0.0/K", "N_k/N:10", "N_k/N:0:1/K", "1/K:10:0.5", "1/K:1:1/K:1", "1/K\n"]
)
def test_a_wrong_rule_is_refused_with_the_list_of_rules(rule: Any) -> None:
    with pytest.raises(UsageError, match=r"rho = .*: must be a number above 0 or 1/K, N_k/N, 1/\|S\|, or"):
        build_algorithm(find("fedlap"), {"rho": rule})


def test_with_all_clients_both_rules_are_one_to_the_bit(quadratics: SimpleNamespace) -> None:
    for one, other in zip(members("1/K"), members("1/|S|"), strict=True):
        states = []
        for algorithm in (one, other):
            federation = quadratics.Federation(algorithm, quadratics.regressions(K, D, sizes=SIZES))
            for _ in range(4):
                federation.play()
            states.append([encode_state(s) for s in (federation.server, *federation.clients)])
        assert states[0] == states[1], one.name


def test_the_first_round_is_the_mean_of_those_that_were_asked(quadratics: SimpleNamespace) -> None:
    """Where 1/K moves w_g by |S|/K of that."""
    shards = quadratics.regressions(K, D)
    eye = DELTA * torch.eye(D, dtype=torch.float64)
    steps = {k: torch.linalg.solve(shards[k].hessian + eye, shards[k].linear) for k in (1, 3)}
    mean = torch.stack([*steps.values()]).mean(0)
    for rule, share in (("1/|S|", 1.0), ("1/K", 2 / K)):
        federation = quadratics.Federation(FedLap(DELTA, rule, local=EXACT), shards)
        federation.play([1, 3])
        assert quadratics.error(federation.mean, share * mean) < 1e-13
    federation = quadratics.Federation(FedLap(DELTA, "1/|S|", local=EXACT), shards)
    federation.play([1, 3], lost=[3])  # two were asked, and one is folded
    assert quadratics.error(federation.mean, steps[1] / 2) < 1e-13


DAMPED = (
    *("fedlap", "fedlap_cov", "fedlap_func", "fedlap_func_public", "fedlap_cov_func"),
    *("pvi", "ivon_pvi", "fedgvi"),
)


@pytest.mark.parametrize("algo", DAMPED)
def test_the_default_damping_counts_the_clients_asked(algo: str) -> None:
    """docs/participation.md#default-damping: 1/|S|, and 1/K if no client is left out; fedep keeps 1/K."""
    algorithm = find(algo)()
    damping = next(getattr(algorithm, name) for name in ("damping", "rho") if hasattr(algorithm, name))
    assert (At(SIZES, asked=2).value(damping), At(SIZES).value(damping)) == (1 / 2, 1 / K)
