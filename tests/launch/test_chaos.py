"""Twenty of tests.chaos's trials; a failure names the seed that replays its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos import plan, trial, undisturbed


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.mark.parametrize("seed", range(20))
def test_a_disturbed_run_has_the_bits_of_an_undisturbed_one(
    seed: int, expected: dict[str, Any], tmp_path: Path
) -> None:
    made = trial(seed, tmp_path / "run", expected)
    assert made.good, str(made)


def test_the_plans_are_varied() -> None:
    what = {f.what for seed in range(20) for f in plan(seed)[0]}
    assert what == {"kill worker", "stop worker", "kill coordinator", "interrupt"}
    assert plan(7) == plan(7) != plan(8)
