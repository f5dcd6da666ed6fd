"""Runs whose workers record training steps have the bits of others, for every algorithm."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.problem import Problem
from fedsim.wire.ledger import Ledger
from tests.support.harness import ALGORITHMS, Class, loopback, play, problem_of
from tests.support.tape import Tapes
from workers.transport.endpoint import Endpoint

NEVER = {
    "bayes_admm", "bregman_admm", "fald", "fedivon", "fedpa", "fedpm", "fola", "iso_bayes_admm", "ivon_admm",
    "ivon_pvi", "mbsgd", "mime", "mimelite", "proxskip", "pvi",
}  # fmt: skip
"""Algorithms whose clients train by something else than minimise, or look at every step."""


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_a_run_has_the_same_bits(algorithm: Class, tmp_path: Path) -> None:
    tapes = Tapes()

    def recording(problem: Problem, folder: Path, ledger: Ledger) -> Endpoint:
        problem.net.recorder = tapes.recorder
        return loopback(problem, folder, ledger)

    plain = play(problem_of(algorithm), tmp_path / "plain")
    recorded = play(problem_of(algorithm), tmp_path / "recorded", connect=recording)
    assert recorded.bits == plain.bits
    assert bool(tapes.repeated) != (algorithm.name in NEVER)
