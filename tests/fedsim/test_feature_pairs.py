"""Every pair of features that exclude each other is refused with its reason, and the page has the table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedsim.errors import UsageError
from fedsim.feature_pairs import (
    ASYNC,
    DEADLINE,
    EVENT,
    LAST,
    NOT_FULL,
    OWN,
    PAIRS,
    QUIET,
    SERVER_LINK,
    SHARED_LINK,
    TREE,
    Pair,
    check_pairs,
)
from protocols import find
from tests.support.harness import problem_of

LIMITS = Path(__file__).resolve().parents[2] / "docs" / "limits.md"
OPTIONS: dict[str, dict[str, Any]] = {
    ASYNC: {"asynchronous": "fedbuff:2", "compute": "1ms"},
    DEADLINE: {"deadline": "9s", "compute": "1ms"},
    TREE: {"tree": "2x2"},
    EVENT: {"participation": "full+event:norm:1"},
    QUIET: {"participation": "full+quiet:1"},
    LAST: {"codecs": {"down.precision": "ratio:0.25+last"}},
    OWN: {"codecs": {"down.mean": "sigma:0.1+own"}},
    NOT_FULL: {"participation": "0.5"},
    SERVER_LINK: {"link": "up=1mbit,server_up=1gbit"},
    SHARED_LINK: {"link": "up=1mbit,edge_clients_up=1mbit", "tree": "2x2"},
}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.one} {pair.other}")
def test_a_pair_is_refused_with_its_reason(pair: Pair) -> None:
    one, other = OPTIONS[pair.one], OPTIONS[pair.other]
    codecs = {**one.get("codecs", {}), **other.get("codecs", {})}
    options = one | other | ({"codecs": codecs} if codecs else {})
    words = f"{pair.one} does not go with {pair.other}: {pair.reason}. Leave one of them out"
    with pytest.raises(UsageError, match=re.escape(words)):
        problem_of(find("fedlap_cov"), **({"clients": 4, "rounds": 1} | options))


@pytest.mark.parametrize("feature", OPTIONS)
def test_a_feature_alone_is_allowed(feature: str) -> None:
    check_pairs({feature})
    name = "pvi" if feature == EVENT else "fedlap_cov"
    problem_of(find(name), **({"clients": 4, "rounds": 1} | OPTIONS[feature]))


def test_the_page_of_limits_has_the_table() -> None:
    rows = [f"| {pair.one} | {pair.other} | {pair.reason} |" for pair in PAIRS]
    assert "\n".join(rows) in LIMITS.read_text(encoding="utf-8")
