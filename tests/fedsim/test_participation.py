"""Schedules are pure functions of (seed, round, client population)."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from fedsim import traces
from fedsim.errors import DataError, UsageError
from fedsim.participation import SPECS, Participation, schedule

fixed = settings(deadline=None, derandomize=True, database=None, max_examples=80)


@fixed
@given(st.integers(1, 30), st.data())
def test_a_count_draws_that_many_clients_of_the_roster(clients: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, clients))
    participation = schedule(str(count), clients=clients, seed=data.draw(st.integers(0, 99)))
    for round in range(1, 4):
        participants = participation(round).participants
        assert len(participants) == count
        assert list(participants) == sorted(set(participants))
        assert set(participants) <= set(range(clients))
        assert all(type(k) is int for k in participants)
        assert participation(round).lost_uploads == frozenset()


@pytest.mark.parametrize(
    ("spec", "clients", "count"),
    [
        *(("0.3", 10, 3), ("0.5", 7, 4), ("0.25", 10, 2), ("0.01", 10, 1), (".5", 4, 2)),
        *(("1.0", 10, 10), ("0.999", 10, 10), ("1", 1, 1), ("1", 10, 1), ("full", 6, 6)),
    ],
)
def test_a_share_is_rounded_and_is_at_least_one_client(spec: str, clients: int, count: int) -> None:
    assert len(schedule(spec, clients=clients, seed=0)(1).participants) == count


def test_full_is_everybody_always() -> None:
    participation = schedule("full", clients=4, seed=3)
    assert {participation(r) for r in range(1, 20)} == {Participation((0, 1, 2, 3))}
    assert schedule("4", clients=4, seed=3)(7) == schedule("1.0", clients=4, seed=8)(9) == participation(1)


def test_rounds_and_seeds_differ() -> None:
    by_round = [schedule("5", clients=20, seed=1)(r) for r in range(1, 40)]
    by_seed = [schedule("5", clients=20, seed=s)(1) for s in range(40)]
    assert len(set(by_round)) > 35
    assert len(set(by_seed)) > 35


def test_every_client_is_as_likely_as_any_other() -> None:
    """2,000 rounds of 3 in 10: 600 each with standard deviation 20.5; five of them is 103."""
    participation = schedule("3", clients=10, seed=0)
    times = Counter(k for r in range(1, 2001) for k in participation(r).participants)
    assert max(abs(times[k] - 600) for k in range(10)) < 103


@pytest.mark.parametrize(
    "spec", ["", "0", "-1", "11", "0.0", "-0.3", "1.5", "nan.", "half", "0,3", "inf", "1e-1", "Full", "."]
)
def test_what_is_no_schedule_is_refused_with_what_would_be(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        schedule(spec, clients=10, seed=0)
    output = str(caught.value)
    assert repr(spec) in output
    assert "'full', a share such as 0.3 or 30%, a number of clients from 1 to 10, or one of" in output
    assert caught.value.exit_code == 2


def test_the_listed_specs_are_accepted(tmp_path: Path) -> None:
    trace = tmp_path / "who.csv"
    trace.write_text("round,client\n1,3\n")
    for usage in SPECS:
        spec = "full" + usage[3:] if usage.startswith("...") else usage
        for name, value in {
            "LEAVE": "0.1",
            "COME": "0.5",
            "FILE": str(trace),
            "P": "0.5",
            "N": "2",
            ":C": ":1",
            ":B": ":9",
        }.items():
            spec = spec.replace(name, value)
        participants = [schedule(spec, clients=10, seed=0, sizes=(5,) * 10)(r) for r in range(1, 9)]
        assert any(participation.participants for participation in participants), spec


# ---- every schedule

EVERY = (
    *("full", "0.3", "3", "coin:0.4", "robin:3", "size:3", "markov:0.2,0.4", "coin:0"),
    *("full+gone:0.3", "0.5+lost:0.3+gone:0.2", "coin:0.5+lost:1"),
)


@fixed
@given(st.sampled_from(EVERY), st.integers(3, 40), st.integers(0, 99))
def test_every_schedule_is_pure_and_of_its_roster(spec: str, clients: int, seed: int) -> None:
    sizes = tuple(1 + k % 7 for k in range(clients))
    created = schedule(spec, clients=clients, seed=seed, sizes=sizes)
    forwards = [created(r) for r in range(1, 8)]
    fresh = schedule(spec, clients=clients, seed=seed, sizes=sizes)
    assert [fresh(r) for r in range(7, 0, -1)] == forwards[::-1]  # in any order
    for t in forwards:
        assert list(t.participants) == sorted(set(t.participants))
        assert all(type(k) is int and 0 <= k < clients for k in t.participants)
        assert t.lost_uploads | t.dropouts <= set(t.participants) and not t.lost_uploads & t.dropouts


def test_modifiers_leave_the_people_as_they_are() -> None:
    plain, struck = (schedule(s, clients=20, seed=4) for s in ("0.5", "0.5+gone:0.2+lost:0.3"))
    for r in range(1, 30):
        assert plain(r).participants == struck(r).participants
    dropouts = sum(len(struck(r).dropouts) for r in range(1, 301)) / 3000
    lost = sum(len(struck(r).lost_uploads) for r in range(1, 301)) / 3000
    assert abs(dropouts - 0.2) < 0.03 and abs(lost - 0.3 * 0.8) < 0.03


def test_a_coin_may_leave_a_round_empty() -> None:
    created = schedule("coin:0.1", clients=3, seed=0)
    sizes = [len(created(r).participants) for r in range(1, 400)]
    assert 0 in sizes and abs(sum(sizes) / len(sizes) - 0.3) < 0.1


def test_robin_takes_turns() -> None:
    created = schedule("robin:3", clients=7, seed=0)
    assert [created(r).participants for r in (1, 2, 3)] == [(0, 1, 2), (3, 4, 5), (0, 1, 6)]
    times = Counter(k for r in range(1, 8) for k in created(r).participants)
    assert set(times.values()) == {3}


def test_by_size_prefers_those_with_data() -> None:
    created = schedule("size:1", clients=3, seed=0, sizes=(1, 1, 8))
    times = Counter(k for r in range(1, 2001) for k in created(r).participants)
    assert abs(times[2] / 2000 - 0.8) < 0.04
    with pytest.raises(UsageError, match="how much data"):
        schedule("size:1", clients=3, seed=0)


def test_markov_has_its_long_run_and_its_memory() -> None:
    created = schedule("markov:0.1,0.3", clients=200, seed=2)
    there = [set(created(r).participants) for r in range(1, 200)]
    assert abs(sum(map(len, there)) / (200 * len(there)) - 0.75) < 0.03
    stay = sum(len(a & b) for a, b in pairwise(there)) / sum(len(a) for a in there[:-1])
    assert abs(stay - 0.9) < 0.02


def test_a_trace_is_read_with_its_mistakes_named(tmp_path: Path) -> None:
    path = tmp_path / "a+b.csv"  # a + in a path is no modifier
    path.write_text("client,round\n2,1\n0,1\n2,3\n2,3\n")
    created = schedule(f"trace:{path}+lost:1", clients=3, seed=0)
    assert [created(r).participants for r in (1, 2, 3, 4)] == [(0, 2), (), (2,), ()]
    assert created(1).lost_uploads == {0, 2}
    for text, says in (
        ("round,client\n1,3\n", "line 2"),
        ("1,2\n", "first line"),
        ("round,client\n0,1\n", "line 2"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=says):
            schedule(f"trace:{path}", clients=3, seed=0)
    with pytest.raises(UsageError, match="No such file"):
        schedule("trace:nowhere.csv", clients=3, seed=0)


def test_a_trace_is_packed_or_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    packed = gzip.compress(b"round,client\n1,2\n")
    (tmp_path / "a.csv.gz").write_bytes(packed)
    assert schedule("trace:~/a.csv.gz", clients=3, seed=0)(1).participants == (2,)
    assert traces.absolute("trace:~/a.csv.gz+lost:1") == f"trace:{tmp_path.resolve()}/a.csv.gz+lost:1"
    (tmp_path / "a.csv.gz").write_bytes(packed[:-12])
    with pytest.raises(DataError, match=r"a\.csv\.gz is no whole \.gz file"):
        schedule("trace:~/a.csv.gz", clients=3, seed=0)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("coin:2", "no probability"),
        ("coin", "write coin:P"),
        ("robin:11", "1 to 10"),
        ("markov:0.1", "write markov:LEAVE,COME"),
        ("markov:0,0", "long run"),
        ("full+late:0.1", "gone:P or lost:P"),
        ("full+lost:0.1+lost:0.1", "once each"),
        ("marko:0.1,0.2", "did you mean 'markov:LEAVE,COME'"),
    ],
)
def test_a_mistake_is_named(spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        schedule(spec, clients=10, seed=0)
