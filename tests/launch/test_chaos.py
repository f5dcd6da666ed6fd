"""Some of tests.chaos's trials, with workers here and elsewhere, and with edge servers. A failure names
the seed that replays its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import chaos, chaos_remote

pytestmark = [pytest.mark.process, pytest.mark.chaos]

LOCAL, ELSEWHERE, EDGES = range(14), (100, 102, 110, 112, 117, 128), (202, 205, 207)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return chaos.undisturbed(tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.fixture(scope="module")
def expected_remote(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return chaos_remote.undisturbed(tmp_path_factory.mktemp("elsewhere") / "run")


@pytest.fixture(scope="module")
def expected_of_tree(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return chaos.undisturbed(tmp_path_factory.mktemp("tree") / "run", chaos.EDGES)


@pytest.mark.parametrize("seed", LOCAL)
def test_a_disturbed_run_has_the_bits_of_an_undisturbed_one(
    seed: int, expected: dict[str, Any], tmp_path: Path
) -> None:
    created = chaos.trial(seed, tmp_path / "run", expected)
    assert created.good, str(created)


@pytest.mark.parametrize("seed", ELSEWHERE)
def test_so_has_one_with_workers_elsewhere(
    seed: int, expected_remote: dict[str, Any], tmp_path: Path
) -> None:
    created = chaos_remote.trial(seed, tmp_path / "run", expected_remote)
    assert created.good, str(created)


@pytest.mark.slow
@pytest.mark.parametrize("seed", EDGES)
def test_so_has_one_with_edge_servers(seed: int, expected_of_tree: dict[str, Any], tmp_path: Path) -> None:
    created = chaos.trial(seed, tmp_path / "run", expected_of_tree, chaos.EDGES)
    assert created.good, str(created)


def test_both_are_the_same_run(expected: dict[str, Any], expected_remote: dict[str, Any]) -> None:
    for key in ("model_sha256", "clients_sha256", "took_part", "folded"):
        assert expected[key] == expected_remote[key]


def test_the_plans_are_varied() -> None:
    what = {f.what for seed in LOCAL for f in chaos.plan(seed)[0]}
    assert what == {"kill worker", "stop worker", "kill coordinator", "interrupt"}
    what = {f.what for seed in EDGES for f in chaos.plan(seed, chaos.EDGES)[0]}
    assert {"kill edge server", "stop edge server"} <= what
    what = {f.what.split()[0] for seed in ELSEWHERE for f in chaos_remote.plan(seed)[0]}
    assert what == {f.split()[0] for f in chaos_remote.FAULTS}
    for plan in (chaos.plan, chaos_remote.plan):
        assert plan(7) == plan(7) != plan(8)
