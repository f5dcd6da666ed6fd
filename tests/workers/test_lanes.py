"""Workers that compute several tasks at once, on a pretended GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.problem import Problem
from fedsim.wire.ledger import Ledger
from tests.support.harness import ALGORITHMS, Class, play, problem_of
from tests.support.streams import LanedLoopback
from tests.workers.test_recorded_steps import NEVER
from workers.transport.endpoint import Endpoint

LANES = 4


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_a_run_has_the_same_bits(algorithm: Class, tmp_path: Path) -> None:
    made: list[LanedLoopback] = []

    def laned(problem: Problem, folder: Path, ledger: Ledger) -> Endpoint:
        made.append(LanedLoopback(ledger, problem, folder, LANES, seed=len(algorithm.name)))
        return made[0]

    plain = play(problem_of(algorithm), tmp_path / "plain")
    several = play(problem_of(algorithm), tmp_path / "lanes", connect=laned, lanes=LANES)
    assert several.bits == plain.bits
    most = min(LANES, len(plain.problem.clients))
    assert made[0].most == (0 if algorithm.name in NEVER else most), "only recorded steps give way"
