"""Schedules of asynchronous rounds: pure functions of sizes, links and computers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from fedsim.asynchrony import AsyncRule, AsyncSchedule, async_rule
from fedsim.errors import UsageError
from fedsim.virtual_clock import Clock, clock
from protocols import find
from tests.support.harness import problem_of

STEPS = 30


def clock_of(sizes: tuple[int, ...], compute: str = "1ms,noise=0.5") -> Clock:
    created = clock("", compute, "", clients=len(sizes), seed=3)
    assert created is not None
    return created


def schedule_of(sizes: tuple[int, ...], buffer: int, compute: str = "1ms,noise=0.5") -> AsyncSchedule:
    return AsyncSchedule(AsyncRule(buffer), clock_of(sizes, compute), sizes, 1000, 1000)


@st.composite
def federations(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    sizes = draw(st.lists(st.integers(1, 500), min_size=1, max_size=8).map(tuple))
    return sizes, draw(st.integers(1, len(sizes)))


@settings(max_examples=60, deadline=None)
@given(federations())
def test_every_client_answers_the_broadcast_that_it_got_after_its_last_upload(
    federation: tuple[tuple[int, ...], int],
) -> None:
    """Played by hand: instants of arrival, who waits, and which broadcasts are in use."""
    sizes, buffer = federation
    schedule, c = schedule_of(sizes, buffer), clock_of(sizes)
    got = dict.fromkeys(range(len(sizes)), 1)
    arrival = {k: c.seconds(1, k, n, 1000, 1000) for k, n in enumerate(sizes)}
    now = 0.0
    for r in range(1, STEPS + 1):
        step = schedule.step(r)
        assert step.in_use == frozenset(got.values()) and r in step.in_use
        first = sorted(arrival, key=lambda k: (arrival[k], got[k], k))[:buffer]
        assert step.participants == tuple(sorted(first))
        assert step.answered == tuple(got[k] for k in step.participants)
        before, now = now, max(arrival[k] for k in first)
        assert step.seconds == pytest.approx(now - before, rel=1e-9, abs=1e-12)
        assert step.waits == pytest.approx([now - arrival[k] for k in step.participants], abs=1e-12)
        for k in first:
            got[k], arrival[k] = r + 1, now + c.seconds(r + 1, k, sizes[k], 1000, 1000)


@settings(max_examples=30, deadline=None)
@given(federations(), st.integers(1, STEPS))
def test_a_step_does_not_depend_on_when_it_is_asked_for(
    federation: tuple[tuple[int, ...], int], round: int
) -> None:
    straight = schedule_of(*federation)
    for r in range(1, round):
        straight.step(r)
    assert schedule_of(*federation).step(round) == straight.step(round)


def test_with_equal_clocks_the_older_broadcast_comes_first() -> None:
    """Else the clients of low ids would answer again and again, and the others never."""
    schedule = schedule_of((10, 10, 10, 10), 2, "1ms")
    took = Counter(k for r in range(1, 11) for k in schedule.step(r).participants)
    assert set(took.values()) == {5}


def test_weights_are_those_of_fedbuff() -> None:
    schedule = schedule_of((1, 1), 1)
    assert [schedule.weight(s, 0.5) for s in (0, 3, 8)] == pytest.approx([1, 1 / 2, 1 / 3])
    assert schedule.weight(7, 0.0) == 1.0
    damped = AsyncSchedule(AsyncRule(1, 1.0), clock_of((1,)), (1,), 1, 1)
    assert damped.weight(3, 0.5) == 0.25


@pytest.mark.parametrize(
    "text",
    [
        "fedbuff",
        "fedbuff:",
        "fedbuff:0",
        "fedbuff:6",
        f"fedbuff:{'9' * 5000}",
        "fedbuff:2.5",
        "other:3",
        "fedbuff:2+damp:-1",
    ],
)
def test_a_rule_that_does_not_fit_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        async_rule(text, clients=5)
    assert async_rule("fedbuff:5+damp:0.25", clients=5) == AsyncRule(5, 0.25)


def test_damping_is_an_exponent_and_may_be_larger_than_one() -> None:
    assert async_rule("fedbuff:2+damp:2", clients=5) == AsyncRule(2, 2.0)
    for text in ("-1", "nan", "inf", "x", ""):
        with pytest.raises(UsageError, match="is no exponent"):
            async_rule(f"fedbuff:2+damp:{text}", clients=5)


RUN = {"asynchronous": "fedbuff:2", "compute": "1ms"}


@pytest.mark.parametrize(
    ("algorithm", "changes", "words"),
    [
        ("fedavg", {"compute": ""}, "needs the virtual clock"),
        ("mime", {}, "several exchanges"),
        ("fedlap_func", {}, "no rule"),
        ("ivon_admm", {}, "silent=last"),
        ("feddyn", {}, "of different ages"),
        ("pooled", {}, "--async"),
    ],
)
def test_what_cannot_be_asynchronous_says_why(algorithm: str, changes: dict[str, object], words: str) -> None:
    settings = {key: changes[key] for key in ("damping", "rho") if key in changes}
    others = {key: value for key, value in changes.items() if key not in settings}
    with pytest.raises(UsageError, match=words):
        problem_of(find(algorithm), settings, **(RUN | others)).schedule()


@pytest.mark.parametrize(("asynchronous", "counted"), [("fedbuff:2", 3), ("", 2)])
def test_asynchronous_runs_count_all_clients(asynchronous: str, counted: int) -> None:
    """No clients share a broadcast there, so 1/|S| is 1/K."""
    problem = problem_of(find("fedlap"), None, asynchronous=asynchronous, compute="1ms")
    assert problem.task(1, 1, 0, asked=2).at.value("1/|S|") == 1 / counted
    assert problem.context(1, 1, asked=2).at(0).value("1/|S|") == 1 / counted
