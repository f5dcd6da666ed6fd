"""fedsim describe: every hyperparameter is shown with its meaning, of a user's algorithm too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.cli import main
from launch.commands.catalogue import hyperparameter_rows
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
    rule: Annotated[Annotated[float, Meta(gt=0)] | None, Meta(description="of the server")] = None
    silent: int = 3
'''


@pytest.mark.parametrize("algorithm", REGISTRY, ids=lambda a: a.name)
def test_every_hyperparameter_has_a_meaning_that_is_more_than_its_name(algorithm: type[AnyAlgorithm]) -> None:
    rows = list(hyperparameter_rows(algorithm()))
    assert rows
    for name, _, _, meaning in rows:
        words = set(re.findall(r"\w+", meaning.lower())) - set(name.lower().split("_"))
        assert len(words) >= 3, f"{name}: {meaning!r} says no more than the name"


def test_describe_prints_the_meanings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner(catch_exceptions=False).invoke(main, ["describe", "fedlap"])
    assert result.exit_code == 0
    for words in ("meaning", "precision of the prior N(0, I/delta)", "lr * decay^(r-1)", "Adam goes on"):
        assert words in result.stdout


def test_describe_prints_brackets_and_an_algorithms_own_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner(catch_exceptions=False).invoke(main, ["describe", "fedpm"])
    assert "theta is held in [margin, 1 - margin] when training begins" in result.stdout
    assert "codec, unless --codec names another: up.probability=bernoulli" in result.stdout


def test_describe_prints_the_meanings_of_a_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "mine.py").write_text(USERS)
    result = CliRunner(catch_exceptions=False).invoke(main, ["describe", f"{tmp_path}/mine.py:Mine"])
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert "number > 0" in lines["strength"] and "how strongly the clients agree" in lines["strength"]
    assert "of the server" in lines["rule"]
    assert lines["silent"].split() == ["silent", "3", "whole", "number"]
