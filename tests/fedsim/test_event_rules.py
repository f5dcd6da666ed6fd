"""The rules of +event and +quiet: their grammar, and when they fire."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from fedsim.errors import UsageError
from fedsim.event_rules import GAIN, START, Rule, Trigger, split
from launch.configuration.names import check_schedule


def test_rules_stand_behind_any_schedule() -> None:
    assert split("full") == ("full", None, None)
    assert split("0.3+lost:0.1+event:kl:0.001+quiet:2") == (
        "0.3+lost:0.1",
        Rule("kl", 0.001),
        Rule("norm", 2.0),
    )
    assert split("trace:a+b.csv+event:norm:30%")[:2] == ("trace:a+b.csv", Rule("norm", 0.3, share=True))
    assert split("full+event:norm:1e+3+lost:0.1")[:2] == ("full+lost:0.1", Rule("norm", 1000.0))
    assert split("full+event:budget:2e3")[1] == Rule("budget", 2000.0)
    assert split("full+quiet:kl:1")[2] == Rule("kl", 1.0)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("full+event:5", "write a rule such as norm:0.5, norm:30%"),
        ("full+event", "write a rule"),
        ("full+event:norm:-1", "write a rule"),
        ("full+event:norm:inf", "write a rule"),
        ("full+event:norm:", "write a rule"),
        ("full+event:kl:5%", "write a rule"),
        ("full+event:budget:0", "budget:30%"),
        ("full+quiet:budget:3", r"norm:0.5 \(or just 0.5\), kl:0.001"),
        ("full+quiet:3%", "write a rule"),
        ("full+event:kl:1+event:kl:2", r"\+event is given twice"),
        ("full+evnt:kl:1", r"behind a \+ stands gone:P or lost:P or event:RULE or quiet:RULE"),
    ],
)
def test_what_is_no_rule_says_what_is_one(spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_schedule(spec)


def test_the_first_message_is_sent_and_then_the_rule_decides() -> None:
    first = Trigger()
    assert first.sends(Rule("norm", 9.0), 0.0)
    sent = first.after(Rule("norm", 9.0), 4.0, 10, sends=True)
    assert sent == Trigger(1, 4.0)
    assert sent.sends(Rule("norm", 9.0), 9.0) and not sent.sends(Rule("norm", 9.0), 8.9)
    assert sent.sends(Rule("norm", 0.5, share=True), 2.0) and not sent.sends(Rule("norm", 0.5, True), 1.9)
    assert sent.after(Rule("norm", 9.0), 1.0, 10, sends=False) == Trigger(1, 4.0, waited=1)
    assert all(sent.sends(rule, math.nan) for rule in (Rule("norm", 9.0), Rule("budget", 0.5, share=True)))
    assert sent.sends(Rule("norm", 0.0), 0.0) and not sent.sends(Rule("budget", 0.5, share=True), 0.0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=60), st.floats(0.05, 0.95))
def test_bytes_of_a_budget_are_bounded_by_how_far_its_threshold_has_moved(
    changes: list[float], share: float
) -> None:
    """Relative 1e-9. After the first upload: |uploads - n share| = |log(threshold / first)| / GAIN."""
    rule, trigger = Rule("budget", share, share=True), Trigger()
    for change in changes:
        trigger = trigger.after(rule, change, 1000, trigger.sends(rule, change))
    beyond = trigger.sent - 1 - (len(changes) - 1) * share
    moved = math.log(trigger.threshold / (START * changes[0])) / GAIN
    assert abs(beyond - moved) < 1e-9 * len(changes)
    in_bytes, other = Rule("budget", 1000 * share), Trigger()
    for change in changes:
        other = other.after(in_bytes, change, 1000, other.sends(in_bytes, change))
    assert other.sent == trigger.sent
