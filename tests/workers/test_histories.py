"""The coordinator in a simulated world (tests/simulation): whatever happens, the bits are those of a run to
which nothing happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.round_machine import ProtocolError
from fedsim.wire.envelope import Envelope
from tests.simulation.histories import EXPERIMENTS, TERMS, Ground, history
from tests.simulation.workers import SLOW
from tests.simulation.world import Odds
from workers.coordinator.responses import ResponseFilter

pytestmark = pytest.mark.chaos

HISTORIES = 150
"""Of each experiment."""
BY_NAME = {f"{e['algo']} {e.get('tree', '')}".strip(): e for e in EXPERIMENTS}


@pytest.fixture(scope="module", params=list(BY_NAME))
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground.of(BY_NAME[request.param], tmp_path_factory.mktemp("ground"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground.of(BY_NAME["mime"], tmp_path_factory.mktemp("ground"))


def test_any_history_ends_with_the_same_bits(ground: Ground, tmp_path: Path) -> None:
    starts = duplicates = refused = 0
    for seed in range(HISTORIES):
        created = history(ground, seed, tmp_path / str(seed))
        assert created.identical, created
        starts, duplicates = starts + created.starts, duplicates + created.duplicates
        refused += created.refused
    assert starts > 1.3 * HISTORIES  # coordinators were killed
    assert refused < 0.05 * starts  # files are torn deeper than a durable checkpoint allows only now and then
    assert duplicates > HISTORIES


@pytest.mark.parametrize("seed", [3, 14])
def test_a_seed_is_a_history(seed: int, small: Ground, tmp_path: Path) -> None:
    one, other = (history(small, seed, tmp_path / name) for name in ("one", "other"))
    assert one.happened and one.happened == other.happened
    assert (one.starts, one.seconds, one.duplicates) == (other.starts, other.seconds, other.duplicates)


@pytest.mark.parametrize("remote", [False, True])
def test_few_histories_need_a_second_start(remote: bool, small: Ground, tmp_path: Path) -> None:
    """Workers that die, hang, and repeat themselves; cut and silent connections: others take over, unless
    nobody is left for as long as one may take to join, or one task has ended three."""
    odds = Odds(3, remote, die=0.1, stop=0.05, repeat=0.3, cut=0.03 * remote, mute=0.05 * remote)
    ended = [history(small, seed, tmp_path / str(seed), odds) for seed in range(30)]
    assert all(created.identical for created in ended)
    errors = [error for created in ended for error in created.errors]
    assert all("were ready after 60 s" in e or "3 workers have ended there" in e for e in errors)
    assert len(errors) < 8


@pytest.mark.parametrize("remote", [False, True])
def test_a_slow_worker_is_never_given_up(remote: bool, small: Ground, tmp_path: Path) -> None:
    assert 3 * TERMS["lease"] < SLOW
    created = history(small, 0, tmp_path / "run", Odds(2, remote, slow=1.0))
    assert created.identical and created.starts == 1
    assert created.dismissed == []


def test_a_hung_worker_is_given_up_when_its_lease_ends(small: Ground, tmp_path: Path) -> None:
    created = history(small, 1, tmp_path / "run", Odds(2, stop=0.2))
    assert created.identical and "stopped" in created.happened
    assert any(f"was silent for {TERMS['lease']:g} s" in why for why in created.dismissed)


def test_a_task_that_ends_all_its_workers_stops_the_run(small: Ground, tmp_path: Path) -> None:
    created = history(small, 0, tmp_path / "run", Odds(2, die=1.0))
    assert created.identical  # in the end, when nothing goes wrong any more
    assert all("3 workers have ended there" in error for error in created.errors) and created.errors


@pytest.mark.parametrize("what", ["local, dies", "remote, dies", "remote, cut"])
def test_any_letter_may_be_the_last(what: str, small: Ground, tmp_path: Path) -> None:
    """At the n-th envelope of every start its sender dies, or its connection ends, for every n until none is
    struck."""
    remote, cuts = what.startswith("remote"), what.endswith("cut")
    for n in range(1, 300):
        created = history(small, 0, tmp_path / str(n), Odds(2, remote, inject=n, cuts=cuts))
        assert created.identical, f"envelope {n}: {created}"
        if not created.happened:
            break
    assert 40 < n < 299


def test_without_the_fence_histories_differ(
    small: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the test above can fail."""

    def everything(self: ResponseFilter, worker: int, envelope: Envelope) -> bool:
        return True

    monkeypatch.setattr(ResponseFilter, "accepts", everything)
    with pytest.raises((ProtocolError, KeyError)):
        history(small, 2, tmp_path / "run", Odds(2, repeat=0.5))
