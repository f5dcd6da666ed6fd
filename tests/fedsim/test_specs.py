"""The grammar that all specs share."""

from __future__ import annotations

import math
import re

import pytest

from fedsim.errors import UsageError
from fedsim.specs import Form, key_values, number, parse, split_modifiers, whole

FORMS = {
    form.name: form
    for form in (
        Form("plain"),
        Form("file", ("PATH",)),
        Form("pair", ("A", "B")),
        Form("some", ("A", "B"), 2, "two numbers"),
    )
}


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("plain", ("plain", ())),
        ("file:a,b:c", ("file", ("a,b:c",))),
        ("pair:1,2", ("pair", ("1", "2"))),
        ("some", ("some", ())),
        ("some:1", ("some", ("1",))),
    ],
)
def test_name_and_arguments_are_split(text: str, parsed: tuple[str, tuple[str, ...]]) -> None:
    assert parse(text, "thing", FORMS) == parsed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("plane", "unknown thing 'plane'; did you mean 'plain'? (known: file:PATH, pair:A,B, "),
        ("some_:1", "did you mean 'some:A,B'?"),
        ("plain:1", "thing 'plain:1': write plain"),
        ("file", "write file:PATH"),
        ("file:", "write file:PATH"),
        ("pair:1", "write pair:A,B"),
        ("pair:1,", "write pair:A,B"),
        ("some:1,2,3", "thing 'some:1,2,3': write some:A,B or just some, two numbers"),
    ],
)
def test_spec_that_does_not_fit_is_a_usage_error(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        parse(text, "thing", FORMS)


def test_modifiers_are_split_from_the_head() -> None:
    assert split_modifiers("0.3", "thing", ("a", "b")) == ("0.3", {})
    assert split_modifiers("x:1+b:0.5+a:1", "thing", ("a", "b")) == ("x:1", {"b": 0.5, "a": 1.0})
    for text in ("x+c:1", "x+a:1+a:1", "x+a", "x+a:2", "x+a:nan", "x+"):
        with pytest.raises(UsageError, match=r"a:P or b:P, once each|no probability from 0 to 1"):
            split_modifiers(text, "thing", ("a", "b"))


def test_numbers_that_cannot_be_read_are_marked() -> None:
    assert number("0.5") == 0.5 and math.isnan(number("half"))
    assert whole("12") == 12
    assert [whole(text) for text in ("", "-1", "1.5", "x", "\u0663")] == [-1] * 5


def test_key_values_keep_their_order() -> None:
    assert key_values("up=1,down=2,rtt") == (("up", "1"), ("down", "2"), ("rtt", ""))
    assert key_values("") == ()
