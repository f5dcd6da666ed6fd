"""Every pair of features that exclude each other is refused with its reason, and the page has the table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedsim import feature_pairs as on
from fedsim.errors import UsageError
from protocols import find
from tests.support.harness import problem_of

LIMITS = Path(__file__).resolve().parents[2] / "docs" / "limits.md"
OPTIONS: dict[str, dict[str, Any]] = {
    on.ASYNC: {"asynchronous": "fedbuff:2", "compute": "1ms"},
    on.DEADLINE: {"deadline": "9s", "compute": "1ms"},
    on.TREE: {"tree": "2x2"},
    on.EVENT: {"participation": "full+event:norm:1"},
    on.QUIET: {"participation": "full+quiet:1"},
    on.LAST: {"codecs": {"down.precision": "ratio:0.25+last"}},
    on.OWN: {"codecs": {"down.mean": "sigma:0.1+own"}},
    on.NOT_FULL: {"participation": "0.5"},
    on.SERVER_LINK: {"link": "up=1mbit,server_up=1gbit"},
    on.SHARED_LINK: {"link": "up=1mbit,edge_clients_up=1mbit", "tree": "2x2"},
}


@pytest.mark.parametrize("pair", on.PAIRS, ids=lambda pair: f"{pair.one} {pair.other}")
def test_a_pair_is_refused_with_its_reason(pair: on.Pair) -> None:
    one, other = OPTIONS[pair.one], OPTIONS[pair.other]
    codecs = {**one.get("codecs", {}), **other.get("codecs", {})}
    options = one | other | ({"codecs": codecs} if codecs else {})
    words = f"{pair.one} does not go with {pair.other}: {pair.reason}. Leave one of them out"
    with pytest.raises(UsageError, match=re.escape(words)):
        problem_of(find("fedlap_cov"), **({"clients": 4, "rounds": 1} | options))


@pytest.mark.parametrize("feature", OPTIONS)
def test_a_feature_alone_is_allowed(feature: str) -> None:
    on.check_pairs({feature})
    name = "pvi" if feature == on.EVENT else "fedlap_cov"
    problem_of(find(name), **({"clients": 4, "rounds": 1} | OPTIONS[feature]))


def test_the_page_of_limits_has_the_table() -> None:
    rows = [f"| {pair.one} | {pair.other} | {pair.reason} |" for pair in on.PAIRS]
    assert "\n".join(rows) in LIMITS.read_text(encoding="utf-8")
