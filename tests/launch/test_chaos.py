"""A long run under random faults (tests.chaos). A failure names the seed of its plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import chaos

pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.slow]


def test_a_disturbed_run_has_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    seed, faults = 2, 30
    outcome = chaos.disturbed(seed, faults, tmp_path)
    assert outcome.identical and not outcome.left, f"seed {seed}: {outcome}"
    assert len(outcome.hit) >= 0.8 * faults, f"seed {seed}: {outcome}"
