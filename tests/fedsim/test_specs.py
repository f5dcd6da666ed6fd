"""The grammar that all specs share."""

from __future__ import annotations

import math
import re
from dataclasses import fields

import pytest

from fedsim.errors import UsageError, nearest, unknown
from fedsim.experiment import Experiment
from fedsim.specs import Form, key_values, number, parse, split_modifiers, whole
from launch.configuration import names
from launch.configuration.execution import Execution

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


ALGORITHMS = names.names("algorithms")
HYPERPARAMETERS = {key: set(known.hyperparameters) for key, known in ALGORITHMS.items()}
SCHEDULES, CODECS = (set(names.names(k)) for k in ("schedules", "codecs"))
OPTIONS = {f.name for f in fields(Experiment)} | {f.name for f in fields(Execution)}


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        # misspelt
        ("fedlap_cow", set(ALGORITHMS), "fedlap_cov"),
        ("FedAvg", set(ALGORITHMS), "fedavg"),
        ("fed-prox", set(ALGORITHMS), "fedprox"),
        ("crs", CODECS, "csr"),
        ("round", OPTIONS, "rounds"),
        # what others call it
        ("learning-rate", HYPERPARAMETERS["fedlap_cov"], "lr"),
        ("local_epochs", HYPERPARAMETERS["fedavg"], "local.epochs"),
        ("num_clients", OPTIONS, "clients"),
        # the beginning of one, or one of a group
        ("partic", OPTIONS, "participation"),
        ("local", {"local.epochs", "local.lr", "delta"}, "local.lr"),
        # a guess would be worse than none
        ("rho", {"lr", "delta", "local.lr"}, None),
        ("nope", SCHEDULES | set(ALGORITHMS), None),
        ("int8", CODECS, None),
        ("learning_rate", {"covariance", "delta"}, None),
        ("fed", set(ALGORITHMS), None),
        ("", OPTIONS, None),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}", OPTIONS, None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_only_a_name_that_is_near_is_guessed(name: str, known: set[str], meant: str | None) -> None:
    assert nearest(name, known) == meant
    assert (f"did you mean {meant!r}" in str(unknown("name", name, known))) is (meant is not None)


def test_without_a_guess_the_names_are_listed_or_how_to_list_them() -> None:
    assert "full" in str(unknown("schedule", "bernoulli", SCHEDULES)) or "fedsim list schedules" in str(
        unknown("schedule", "bernoulli", SCHEDULES)
    )
    assert str(unknown("option", "zzz", ["b", "a"])) == "unknown option 'zzz' (known: a, b)"
