"""The tables of costs in docs/communication.md and docs/algorithms.md are those of today's algorithms."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedsim
from fedsim.problem import Problem
from fedsim.wire.wire_size import EnvelopeSize, envelope_size
from launch.configuration.config import Overrides
from launch.results.plan import RUN_NAME
from protocols import REGISTRY

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(DOCS / "recipes"))
    before = set(sys.modules)
    yield importlib.import_module("costs")
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == DOCS / "recipes":
            del sys.modules[name]


def written(page: Path, name: str) -> dict[str, list[str]]:
    """The rows between the markers, by their first cell."""
    section = re.search(f"<!-- {name}: written.*?<!-- end of {name} -->", page.read_text(), re.DOTALL)
    assert section is not None
    lines = [line for line in section[0].splitlines() if line.startswith("| ")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row for row in rows}


def computed(costs: ModuleType, case: Any) -> tuple[int, Any, bool]:
    """P, the cost of a row from its messages' sizes, and whether those are the only possible ones."""
    experiment, _ = Overrides.of({"algo": case.name, "clients": costs.CLIENTS, "workers": 0}).resolve()
    algorithm = case.algorithm
    problem = Problem.outline(experiment, algorithm, None)
    exact, values, envelopes, once = True, dict.fromkeys(costs.SIDES, 0.0), {}, {}
    for side in costs.SIDES:
        sent = [envelope(problem, getattr(exchange, side), side) for exchange in algorithm.exchanges]
        first = [envelope(problem, getattr(exchange, side), side) for exchange in algorithm.setup]
        exact = exact and all(size.exact for size in (*sent, *first))
        for size in sent:
            values[side] += sum(n for (_, layer), n in size.rows.items() if layer in ("values", "indices"))
        envelopes[side] = float(sum(size.total for size in sent))
        once[side] = float(sum(size.total for size in first))
    return problem.net.layout.size, costs.Cost(values, envelopes, once), exact


def envelope(problem: Problem, message: type, side: str) -> EnvelopeSize:
    if problem.algorithm.centralised:  # nothing counts as the algorithm's traffic
        return EnvelopeSize({}, exact=True)
    kind = {"down": "task", "up": "upload"}[side]
    codecs, layout = problem.messages.codecs[side], problem.net.layout
    return envelope_size(message, codecs, problem.messages.dims, layout, kind=kind, run=RUN_NAME)


def test_the_measured_costs_are_those_that_the_messages_sizes_give(costs: ModuleType) -> None:
    rows = written(DOCS / "communication.md", "costs")
    assert list(rows) == [case.label for case in costs.CASES]
    inexact = set()
    for case in costs.CASES:
        params, cost, exact = computed(costs, case)
        due, row = costs.cost_row(case, params, cost), rows[case.label]
        if exact:
            assert row == due
        else:  # parts that are sent once, memory of a size that the split decides: formulas only
            inexact.add(case.name)
            assert [row[n] for n in (0, 1, 2, 5, 8, 9)] == [due[n] for n in (0, 1, 2, 5, 8, 9)]
    assert inexact == {"fedlap_func", "fedlap_cov_func", "fedlap_func_public"}


def test_the_two_tables_tell_of_the_same_bytes(costs: ModuleType) -> None:
    results, traffic_summary = (
        written(DOCS / "algorithms.md", "results"),
        written(DOCS / "communication.md", "costs"),
    )
    own = [case for case in costs.CASES if not case.same_as]
    assert list(results) == [case.label for case in own]
    assert {kind.name for kind in REGISTRY} <= set(results)
    for case in own:
        result, cost, rounds = results[case.label], traffic_summary[case.label], case.rounds(costs.ROUNDS)
        assert result[1] == str(rounds)
        unit = 4 * number(cost[1]) * costs.CLIENTS * rounds
        for envelopes, total in ((4, 2), (7, 3)):
            rest = number(result[total]) - number(cost[envelopes]) * unit
            assert rest >= -0.0005 * unit
            if not cost[9]:  # nothing is paid once
                assert rest <= 0.0005 * unit


def test_a_row_that_is_left_out_has_the_results_of_another(costs: ModuleType, tmp_path: Path) -> None:
    left_out = [case for case in costs.CASES if case.same_as]
    of = sorted({case.same_as for case in left_out})
    losses = {}
    for n, case in enumerate((*left_out, *map(costs.Case, of))):
        run = fedsim.run(
            quiet=True,
            algo=case.name,
            hyperparameters=case.settings,
            rounds=2,
            eval_every=2,
            workers=0,
            out=tmp_path / str(n),
        )
        losses[case.label] = run.summary["test_nll"]
    for case in left_out:
        assert losses[case.label] == pytest.approx(losses[case.same_as], rel=1e-6)
    assert len({round(losses[name], 4) for name in of}) == len(of)


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def test_a_quick_run_writes_both_pages(costs: ModuleType, tmp_path: Path) -> None:
    costs.QUICK = (costs.Case("precond_admm"),)
    costs.main(["--quick", "--out", str(tmp_path)])
    for page, name in (("communication.md", "costs"), ("algorithms.md", "results")):
        assert list(written(tmp_path / page, name)) == ["precond_admm"]
