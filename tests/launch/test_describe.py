"""fedsim describe: every hyperparameter is shown with its meaning, of a user's algorithm too."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.cli import main
from launch.configuration import names
from launch.results.describe import hyperparameter_rows, message_rows
from protocols import REGISTRY, AnyAlgorithm

USERS = '''
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from protocols.fedavg import FedAvg


@dataclass(frozen=True)
class Mine(FedAvg):
    """Wire: P down, P up."""

    strength: Annotated[float, Meta(gt=0, description="how strongly the clients agree")] = 1.0
    rule: Annotated[float | None, Meta(description="of the server, in [a, 1 - a]")] = None
    silent: int = 3
'''


@pytest.mark.parametrize("algorithm", REGISTRY, ids=lambda a: a.name)
def test_every_hyperparameter_has_a_meaning_that_is_more_than_its_name(algorithm: type[AnyAlgorithm]) -> None:
    rows = list(hyperparameter_rows(algorithm()))
    assert rows
    for name, _, _, meaning in rows:
        words = set(re.findall(r"\w+", meaning.lower())) - set(name.lower().split("_"))
        assert len(words) >= 3, f"{name}: {meaning!r} says no more than the name"


WIDTHS = ("40", "80", "")
"""Columns of a terminal; '' is a pipe."""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("algorithm", REGISTRY, ids=lambda a: a.name)
def test_describe_cuts_no_name_default_value_or_meaning(algorithm: type[AnyAlgorithm], width: str) -> None:
    result = CliRunner(catch_exceptions=False).invoke(
        main, ["describe", algorithm.name], env={"COLUMNS": width or None}
    )
    assert result.exit_code == 0 and "…" not in result.stdout
    table = result.stdout[result.stdout.index("\nhyperparameter") :]
    rows = list(hyperparameter_rows(algorithm()))
    assert not Counter(" ".join(map(" ".join, rows)).split()) - Counter(table.split())
    for name, default, _, _ in rows:
        assert re.search(rf"^{re.escape(name)} +{re.escape(default)}( |$)", table, re.MULTILINE), name
    fields = " ".join(" ".join(row) for row in message_rows(algorithm()))
    assert not Counter(fields.split()) - Counter(result.stdout.split())
    if not width:  # one line each
        assert len(table.splitlines()) == 2 + len(rows)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", names.KINDS)
def test_list_cuts_no_word(kind: str, width: str) -> None:
    result = CliRunner(catch_exceptions=False).invoke(main, ["list", kind], env={"COLUMNS": width or None})
    cells = " ".join(" ".join((name.usage, *name.cells)) for name in names.names(kind).values())
    assert "…" not in result.stdout
    assert not Counter(cells.split()) - Counter(result.stdout.split())


def test_describe_prints_the_meanings_of_a_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "mine.py").write_text(USERS)
    result = CliRunner(catch_exceptions=False).invoke(main, ["describe", f"{tmp_path}/mine.py:Mine"])
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert "number > 0" in lines["strength"] and "how strongly the clients agree" in lines["strength"]
    assert "of the server, in [a, 1 - a]" in lines["rule"]
    assert lines["silent"].split() == ["silent", "3", "whole", "number"]
