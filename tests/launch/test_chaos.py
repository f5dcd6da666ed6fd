"""A run under random faults (tests.chaos), a short and a long one. A failure names the seed of its plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import chaos

pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize(("seed", "faults"), [(1, 2), (2, 30)])
def test_a_disturbed_run_has_the_bits_of_an_undisturbed_one(seed: int, faults: int, tmp_path: Path) -> None:
    outcome = chaos.disturbed(seed, faults, tmp_path)
    assert outcome.identical and not outcome.left, f"seed {seed}: {outcome}"
    assert len(outcome.hit) >= 0.8 * faults, f"seed {seed}: {outcome}"
