"""Some of tests.mutations's trials. A failure names the seed that replays it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations import RUNS, Base, bases, trial

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

SEEDS = range(10_000, 10_036)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Base]:
    return bases(tmp_path_factory.mktemp("interrupted"))


def test_a_run_with_a_changed_file_goes_on_identically_or_is_refused(
    interrupted: dict[str, Base], tmp_path: Path
) -> None:
    trials = [trial(interrupted, seed, tmp_path) for seed in SEEDS]
    assert not [str(one) for one in trials if not one.good]
    assert {one.outcome for one in trials} == {"identical", "refused"}
    assert {one.run for one in trials} == set(RUNS)
