"""What an algorithm costs one client: the plan and runs against the formula in the algorithm's docstring."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fedsim.algorithm import Algorithm
from fedsim.wire.schema import TRIANGLE
from launch.cli import main
from launch.results.groups import gather
from launch.runs.client_costs import of_ledger, sent_once
from launch.runs.folder import RunFolder
from protocols import REGISTRY, find
from tests.launch.test_plan import planned
from tests.support.harness import problem_of

Class = type[Algorithm[Any, Any, Any, Any]]
SIDES = ("down", "up")
ENVELOPE = 1200
"""The header, the framing and the scalars of an envelope have fewer bytes."""


def documented(algorithm: Class, once: bool = False) -> dict[str, str]:
    """The formulas behind `Wire:` (or `Once:`) in the algorithm's docstring, by direction."""
    text = " ".join((inspect.getdoc(inspect.getmodule(algorithm)) or "").split())
    label = "Once" if once else rf"(?:Wire|Wire of {algorithm.name}|Of {algorithm.name})"
    match = re.search(rf"\b{label}: (.*?) down, (.*?) up\b", text)
    assert match or once, "the docstring says no cost"
    return dict(zip(SIDES, match.groups() if match else ("0", "0"), strict=True))


def values(formula: str, dims: Mapping[str, int]) -> float:
    """How many values a formula such as '2P + M C' is."""
    known = {**dims, TRIANGLE: dims["P"] * (dims["P"] + 1) // 2, "0": 0}
    terms = [re.split(r"(?<=\d)(?=[A-Z])", term) for term in formula.split(" + ")]
    return sum(
        math.prod((int(term[0]) if len(term) > 1 else 1, *(known[name] for name in term[-1].split())))
        for term in terms
    )


@pytest.mark.parametrize("algorithm", REGISTRY, ids=lambda a: a.name)
def test_a_plan_costs_per_client_and_round_what_the_docstring_says(algorithm: Class) -> None:
    problem = problem_of(algorithm, rounds=3, participation="0.7")
    dims = {**problem.dims, "P": problem.net.layout.size}
    bill, built = planned(problem), problem.algorithm
    participations = int(bill.took_part.sum())
    units = bill.costs.units(params=dims["P"], participations=participations, clients=3)
    for side, formula in documented(algorithm).items():
        due, counted = 4 * values(formula, dims), 4 * dims["P"] * units[f"units_of_p_{side}"]
        assert due <= counted <= due + ENVELOPE * len(built.exchanges), (side, formula)
    for side, formula in documented(algorithm, once=True).items():
        due, counted = 4 * values(formula, dims), 4 * dims["P"] * units[f"units_of_p_once_{side}"]
        if sent_once(built):  # inputs may be stored as bytes
            assert due / 4 <= counted <= due
        else:
            assert due <= counted <= due + ENVELOPE * len(built.setup), (side, formula)


@pytest.mark.parametrize("name", ["mime", "precond_admm", "fedlap_func", "bcm", "fedavg"])
def test_a_run_costs_per_client_and_round_what_its_plan_says(
    name: str, launched: Callable[..., Path]
) -> None:
    options = {"algo": name, "model": "logistic", "clients": 3, "rounds": 3, "participation": "0.7"}
    run = RunFolder.open(launched("run", **options))
    summary, algorithm = run.summary, find(name)
    bill = planned(problem_of(algorithm, rounds=3, participation="0.7"))
    due = bill.costs.units(params=run.params, participations=int(bill.took_part.sum()), clients=3)
    got = {key: summary[key] for key in due}
    if name == "fedlap_func":  # parts that may be absent: at most
        assert all(0 < got[key] <= due[key] for key in due)
    else:
        assert got == pytest.approx(due, abs=0.02)
    assert got == pytest.approx(of_ledger(run.ledger, sent_once(algorithm()), params=run.params, clients=3))
    assert bool(got["units_of_p_once_up"]) is (name in ("precond_admm", "fedlap_func"))


def test_compare_does_not_mix_an_earlier_runs_units_with_todays(launched: Callable[..., Path]) -> None:
    options = {"algo": "mime", "model": "logistic", "clients": 3, "rounds": 2}
    folder = launched("earlier", **options)
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    today = {side: summary[f"units_of_p_{side}"] for side in SIDES}
    earlier = {k: v for k, v in summary.items() if not k.startswith("units_of_p_once")}
    earlier |= {f"units_of_p_{side}": today[side] / 2 for side in SIDES}  # per exchange, as it was
    path.write_text(json.dumps(earlier))
    (group,) = gather([folder])
    for side in SIDES:
        assert group.members[0].units(side) == pytest.approx(today[side])


def test_a_plan_prints_what_mime_costs_in_a_round_and_precond_admm_once() -> None:
    def printed(algo: str) -> str:
        command = ["plan", "--algo", algo, "--clients", "4", "--rounds", "2"]
        return CliRunner().invoke(main, command).output

    assert re.search(r"per client and round +3\.\d+ P +2\.\d+ P", printed("mime"))
    assert "once per client" not in printed("mime")
    assert re.search(r"once per client +1\.\d+ P +1\.\d+ P", printed("precond_admm"))
