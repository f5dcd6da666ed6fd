"""fedsim plan: the ledger without the run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fedsim.algorithm import Algorithm
from fedsim.problem import Problem
from launch.cli import main
from launch.results.plan import Plan, plan
from protocols import REGISTRY
from tests.support.harness import play, problem_of

Class = type[Algorithm[Any, Any, Any, Any]]
MIXED = "coin:0.7+gone:0.3+lost:0.3"


def planned(problem: Problem) -> Plan:
    e = problem.experiment
    outline = Problem.outline(e, problem.algorithm, None)
    return plan(outline, problem.rounds.schedule(), run="run")


def measured(
    problem: Problem, folder: Path
) -> tuple[Counter[tuple[str, str, str]], Counter[tuple[int, str]]]:
    entries = [e for e in play(problem, folder).entries if e.kind == "algorithm"]
    by_field: Counter[tuple[str, str, str]] = Counter()
    by_round: Counter[tuple[int, str]] = Counter()
    for e in entries:
        by_field[e.direction, e.field, e.layer] += e.bytes
        by_round[e.round, e.direction] += e.bytes
    return by_field, by_round


@pytest.mark.parametrize("algorithm", REGISTRY, ids=lambda a: a.name)
def test_it_is_the_ledger_to_the_byte(algorithm: Class, tmp_path: Path) -> None:
    problem = problem_of(algorithm, participation=MIXED, seed=5, rounds=4)
    created = planned(problem)
    by_field, by_round = measured(problem, tmp_path / "run")
    if not created.exact:  # parts that are sent once, bounds on what a client may have
        assert algorithm.name in ("fedlap_func", "fedlap_cov_func", "fedlap_func_public")
        assert all(created.bytes[key] >= n for key, n in by_field.items())
        return
    assert created.bytes == by_field
    rounds = {(r, side): n for r, sides in created.rounds.items() for side, n in sides.items() if n}
    assert rounds == {key: n for key, n in by_round.items() if n}


@pytest.mark.parametrize(
    ("codecs", "exact"),
    [
        ({"precision": "csr:0.1", "mean": "bf16"}, True),
        ({"precision": "csr:0.5"}, True),  # larger than dense, which is sent instead
        ({"precision": "log8", "up.mean": "f16"}, True),
        ({"precision": "best:0.1", "up.mean": "delta+zstd"}, False),
    ],
)
def test_codecs_of_one_size_to_the_byte_others_at_most(
    codecs: dict[str, str], exact: bool, tmp_path: Path
) -> None:
    algorithm = next(a for a in REGISTRY if a.name == "fedlap_cov")
    problem = problem_of(algorithm, codecs=codecs, rounds=2)
    created = planned(problem)
    by_field, _ = measured(problem, tmp_path / "run")
    assert created.exact is exact
    if exact:
        assert created.bytes == by_field
    else:
        assert all(created.bytes[key] >= n for key, n in by_field.items() if key[2] in ("values", "indices"))


def test_a_million_clients_can_be_planned() -> None:
    command = ["plan", "--clients", "1000000", "--rounds", "1000", "--algo", "fedavg"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert "1,000,000 clients, 1,000 rounds" in result.output
    assert "takes part in 1000 rounds" in result.output.replace(",", "")


def test_mistakes_are_those_of_launch() -> None:
    result = CliRunner().invoke(main, ["plan", "--algo", "fedlab"])
    assert result.exit_code == 2 and "did you mean 'fedlap'" in result.output
