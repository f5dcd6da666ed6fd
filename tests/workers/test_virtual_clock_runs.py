"""Deadlines on the virtual clock, in whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.wire.state_file import encode_state
from protocols import find
from tests.support.harness import Run, play, problem_of

LINK = {"link": "up=1mbit,down=8mbit,rtt=10ms"}


def times(run: Run) -> dict[int, float]:
    """Seconds of round 1 by client, from the ledger's own bytes."""
    c = run.problem.rounds.clock
    assert c is not None
    own = [e for e in run.entries if e.kind == "algorithm" and e.round == 1]
    paid = {
        (k, side): sum(e.bytes for e in own if (e.client, e.direction) == (k, side))
        for k in range(3)
        for side in ("down", "up")
    }
    return {k: c.seconds(1, k, run.problem.sizes[k], paid[k, "down"], paid[k, "up"]) for k in range(3)}


def test_a_round_lasts_as_long_as_its_slowest_client(tmp_path: Path) -> None:
    run = play(problem_of(find("fedavg"), **LINK, compute="1ms"), tmp_path / "run")
    assert run.metrics[1]["simulated_seconds"] == pytest.approx(max(times(run).values()), rel=1e-12)
    assert "simulated_seconds" not in play(problem_of(find("fedavg")), tmp_path / "plain").metrics[1]


def test_late_uploads_are_paid_for_and_not_folded(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**LINK, "compute": "1ms"}
    free = play(problem_of(find("fedlap_cov"), **settings), tmp_path / "free")
    slow = sorted(times(free), key=lambda k: times(free)[k])
    limit = (times(free)[slow[1]] + times(free)[slow[2]]) / 2  # between the second and the slowest
    run = play(problem_of(find("fedlap_cov"), **settings, deadline=f"{limit:.6f}s"), tmp_path / "run")
    for line in run.metrics[1:]:
        assert line["late"] == [slow[2]] and line["folded"] == sorted(slow[:2])
        assert line["simulated_seconds"] == pytest.approx(limit, abs=1e-6)
    assert run.outcome.versions[slow[2]] == 0
    up = [e for e in run.entries if e.kind == "algorithm" and e.direction == "up" and e.client == slow[2]]
    assert sum(e.bytes for e in up) > 0


@pytest.mark.parametrize("name", ["fedavg", "ivon_admm", "mime"])
def test_if_all_are_late_nothing_changes(name: str, tmp_path: Path) -> None:
    run = play(problem_of(find(name), compute="1s", deadline="1ms"), tmp_path / "run")
    assert torch.equal(run.outcome.model.mean.float(), run.problem.start)
    before, after = run.checkpoint(1), run.checkpoint(2)
    assert encode_state(before.server) == encode_state(after.server)
    assert run.outcome.versions == (0, 0, 0)
