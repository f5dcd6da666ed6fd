"""Megabytes at the limits: sums over the rounds, and the curves beside a line of a sweep's picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from launch.cli import main
from launch.results.figures import Figure, Line
from launch.runs.tables import metrics_table
from launch.sweep import table


def coded(label: str, algorithm: str, spread: str) -> str:
    return f"""
[[variant]]
label = "{label}"
experiment = {{algo = "{algorithm}"}}
[variant.codecs]
"up.mean" = "sigma:0.05"
"down.mean" = "sigma:0.05+last"
"up.{spread}" = "ratio:0.25"
"down.{spread}" = "ratio:0.25+last"
"""


RECIPE = f"""
title = "Limits"
[experiment]
clients = 2
rounds = 2
model = "logistic"
[[variant]]
label = "dense"
experiment = {{algo = "fedlap_cov"}}
{coded("coded", "fedlap_cov", "precision")}
{coded("no precision", "fola", "curvature")}
[[plot]]
file = "limits.png"
y = "test_accuracy"
x = "MB"
limits = ["coded", "no precision"]
"""
DOWN = {"mean": {"bits": 2.0, "entropy": 1.5}, "precision": {"bits": 2.0, "entropy": 0.5}}
UP = {"mean": {"bits": 3.0, "entropy": 2.0}, "precision": {"bits": 1.0, "entropy": 1.0}}


def line(number: int, **limits: object) -> dict[str, object]:
    return {
        "round": number,
        "bytes_down": 2e6 * (number > 0),
        "bytes_up": 4e6 * (number > 0),
        "limits": limits,
    }


def test_the_limits_are_shares_of_what_was_sent_summed_over_the_rounds() -> None:
    curve = metrics_table([line(0), line(1, down=DOWN, up=UP, kl=0.04), line(2, down=DOWN, up=UP, kl=0.02)])
    assert list(curve["MB entropy"]) == pytest.approx([0.0, 1.0 + 3.0, 8.0])
    assert list(curve["MB KL"]) == pytest.approx([0.0, 0.04, 0.06])  # of 4 bits a parameter, 4 MB


def test_a_round_without_a_limit_counts_whole_and_has_no_divergence() -> None:
    lines = line(0), line(1, down=DOWN, up=UP, kl=0.04), line(2), line(3, down=DOWN, up=UP, kl=0.04)
    curve = metrics_table(lines)
    assert list(curve["MB entropy"]) == pytest.approx([0.0, 4.0, 10.0, 14.0])
    first, second, *rest = list(curve["MB KL"])
    assert (first, second) == (0.0, pytest.approx(0.04)) and all(math.isnan(v) for v in rest)


def test_a_line_of_an_archive_may_have_null_in_place_of_limits() -> None:
    curve = metrics_table([line(0), {**line(1), "limits": None}])
    assert list(curve["MB entropy"]) == pytest.approx([0.0, 6.0]) and math.isnan(curve["MB KL"].iloc[-1])


@pytest.mark.process
def test_a_picture_has_the_limits_beside_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Line] = {}
    chart = table.chart

    def recorded(lines: list[Line], *labels: str, **options: Any) -> list[Figure]:
        drawn.update({line.name: line for line in lines})
        return chart(lines, *labels, **options)

    monkeypatch.setattr(table, "chart", recorded)
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "limits.toml"
    path.write_text(RECIPE)
    command = ["sweep", str(path), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert [name for name in drawn if ":" in name] == [
        "coded: entropy",
        "coded: KL of uploads",
        "no precision: entropy",
    ]
    whole, entropy, kl = (drawn[name] for name in ("coded", "coded: entropy", "coded: KL of uploads"))
    assert (entropy.y == whole.y).all() and (kl.y == whole.y).all()
    assert (kl.x[1:] < entropy.x[1:]).all() and (entropy.x[1:] < whole.x[1:]).all()
    # 650 parameters: tables of frequencies and headers are much
    assert (entropy.x[1:] > 0.3 * whole.x[1:]).all()
