"""Some of tests.mutations's trials. A failure names the seed that replays it."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from tests.mutations import EXCHANGED, RUNS, Base, bases, exchanged, files_of, trial

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


@pytest.mark.parametrize("name", EXCHANGED)
def test_files_that_change_places_go_on_identically_or_are_refused(name: str, tmp_path: Path) -> None:
    """Also with files of a run with another seed, and of the same experiment."""
    base, other, same = (tmp_path / part for part in ("base", "other", "same"))
    for home in (base, other, same):
        home.mkdir()
    run, another, again = Base.of(name, base), Base.of(name, other, seed=1), Base.of(name, same)
    files = files_of(run.folder)
    states = [file for file in files if file.startswith("state/")]
    assert len(states) >= 5 and any(file.startswith("checkpoints/") for file in files)
    pairs = [pair for pair in combinations(files, 2) if len({Path(file).suffix for file in pair}) == 1]
    pairs += zip(files[1:], files, strict=False)  # of two kinds
    trials = [exchanged(run, *pair, tmp_path) for pair in dict.fromkeys(pairs)]
    for of in (another, again):
        trials += [exchanged(run, file, file, tmp_path, of) for file in files if (of.folder / file).exists()]
    assert not [str(one) for one in trials if not one.good]
    assert {one.outcome for one in trials} == {"identical", "refused"}
