"""Schedules are pure functions of (seed, round, roster)."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.errors import UsageError
from fedsim.schedules import SPECS, Turnout, schedule

fixed = settings(deadline=None, derandomize=True, database=None, max_examples=80)


@fixed
@given(st.integers(1, 30), st.data())
def test_a_count_draws_that_many_clients_of_the_roster(clients: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, clients))
    turnout = schedule(str(count), clients=clients, seed=data.draw(st.integers(0, 99)))
    for round in range(1, 4):
        people = turnout(round).participants
        assert len(people) == count
        assert list(people) == sorted(set(people))
        assert set(people) <= set(range(clients))
        assert all(type(k) is int for k in people)
        assert turnout(round).lost == frozenset()


@pytest.mark.parametrize(
    ("spec", "clients", "count"),
    [
        ("0.3", 10, 3),
        ("0.5", 7, 4),
        ("0.25", 10, 2),
        ("0.01", 10, 1),
        (".5", 4, 2),
        ("1.0", 10, 10),
        ("0.999", 10, 10),
        ("1", 1, 1),
        ("1", 10, 1),
        ("full", 6, 6),
    ],
)
def test_a_share_is_rounded_and_is_at_least_one_client(spec: str, clients: int, count: int) -> None:
    assert len(schedule(spec, clients=clients, seed=0)(1).participants) == count


def test_full_is_everybody_always() -> None:
    turnout = schedule("full", clients=4, seed=3)
    assert {turnout(r) for r in range(1, 20)} == {Turnout((0, 1, 2, 3))}
    assert schedule("4", clients=4, seed=3)(7) == schedule("1.0", clients=4, seed=8)(9) == turnout(1)


def test_a_turnout_is_a_function_of_seed_and_round_alone() -> None:
    first = [schedule("3", clients=9, seed=5)(r) for r in range(1, 30)]
    again = schedule("3", clients=9, seed=5)
    for round in random.Random(0).sample(range(1, 30), 29):
        np.random.seed(round)
        torch.manual_seed(round)
        assert again(round) == first[round - 1]
    assert [schedule("0.34", clients=9, seed=5)(r) for r in range(1, 30)] == first


def test_rounds_and_seeds_differ() -> None:
    by_round = [schedule("5", clients=20, seed=1)(r) for r in range(1, 40)]
    by_seed = [schedule("5", clients=20, seed=s)(1) for s in range(40)]
    assert len(set(by_round)) > 35
    assert len(set(by_seed)) > 35


def test_every_client_is_as_likely_as_any_other() -> None:
    """2,000 rounds of 3 in 10: 600 each with standard deviation 20.5; five of them is 103."""
    turnout = schedule("3", clients=10, seed=0)
    times = Counter(k for r in range(1, 2001) for k in turnout(r).participants)
    assert max(abs(times[k] - 600) for k in range(10)) < 103


@pytest.mark.parametrize(
    "spec", ["", "0", "-1", "11", "0.0", "-0.3", "1.5", "nan.", "half", "0,3", "inf", "1e-1", "Full", "."]
)
def test_what_is_no_schedule_is_refused_with_what_would_be(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        schedule(spec, clients=10, seed=0)
    said = str(caught.value)
    assert repr(spec) in said
    assert "'full', a share such as 0.3, or a number of clients from 1 to 10" in said
    assert caught.value.exit_code == 2


def test_the_listed_specs_are_accepted() -> None:
    for spec in SPECS:
        assert schedule(spec, clients=10, seed=0)(1).participants
