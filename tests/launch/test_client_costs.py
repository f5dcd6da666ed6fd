"""What an algorithm costs one client: the plan and runs against the formula in the algorithm's docstring."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.cli import main
from launch.results.groups import gather
from launch.runs.client_costs import of_ledger, sent_once
from launch.runs.folder import RunFolder
from protocols import find
from tests.launch.test_plan import planned
from tests.support.harness import problem_of

SIDES = ("down", "up")


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
