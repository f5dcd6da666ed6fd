"""fedsim compare: what groups are called, and what a reader is told that differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from launch.cli import main
from launch.results.groups import gather
from launch.results.labels import differences, labels, unnamed
from launch.runs.folder import RunFolder
from tests.launch.run_folders import Make

LR = "hyperparameters.local.lr"


def settings(algo: str, **changes: Any) -> dict[str, Any]:
    task = {"participation": "full", "clients": 10, "rounds": 5, "partition": "natural", "fraction": 1.0}
    return {"algo": algo, **task, "until": 0.0, LR: 0.1} | changes


def printed(*arguments: object, width: int = 120) -> str:
    result = CliRunner().invoke(main, ["compare", *map(str, arguments)], env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return result.output


def test_two_seeds_of_real_runs_are_one_line_also_through_their_folder(
    launched: Callable[..., Path], tmp_path: Path
) -> None:
    options = {"algo": "fedavg", "model": "logistic", "clients": 3, "rounds": 2}
    folders = [launched(f"seed{n}", seed=n, **options) for n in (0, 1)]
    data = {json.loads((f / "manifest.json").read_text())["experiment"]["data"] for f in folders}
    assert len(data) == 2, "the seed decides the split"
    assert folders[0].parent == folders[1].parent
    for runs in (folders, [folders[0].parent]):
        output = printed(*runs, "--out", tmp_path / "p.html")
        (line,) = [line for line in output.splitlines() if line.startswith("fedavg")]
        assert line.split()[1] == "2" and "±" in line and "different data" not in output


def test_runs_of_one_seed_that_saw_different_data_are_named(make: Make, tmp_path: Path) -> None:
    make("a0", seed=0, data="11112222")
    make("a1", seed=1, data="77778888")
    runs = make("b0", seed=0, data="33334444").parent
    output = " ".join(printed(runs, "--out", tmp_path / "p.html").split())
    assert "fedavg: runs with seed 0 and the same settings saw different data (11112222, 33334444)" in output
    assert "seed 1 and" not in output and "different data" in (tmp_path / "p.html").read_text()


def test_the_state_of_a_run_is_read_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = gather([make("a")])
    assert group.members[0].done
    monkeypatch.delattr(RunFolder, "status")
    assert group.members[0].done


def test_lists_of_names_are_in_no_label(make: Make) -> None:
    make("a", dataset="a.csv,label=y", features=["x"] * 9)
    runs = make("b", dataset="b.csv,label=y", features=["z"] * 9).parent
    names = ["fedavg (dataset a.csv,label=y)", "fedavg (dataset b.csv,label=y)"]
    assert sorted(g.label for g in gather([runs])) == names


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"codecs.up.precision": "csr:0.1"}, ["fedavg (dense)", "fedlap (up.precision csr:0.1)"]),
        ({"participation": "0.3"}, ["fedavg (participation full)", "fedlap (participation 0.3)"]),
        ({"until": 0.78}, ["fedavg (no until)", "fedlap (until 0.78)"]),
        ({LR: 0.01}, ["fedavg", "fedlap"]),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)
def test_a_setting_of_the_task_is_in_the_labels_also_across_algorithms(
    change: dict[str, Any], names: list[str]
) -> None:
    assert labels([settings("fedavg"), settings("fedlap", **change)]) == names


def test_settings_too_long_for_labels_stand_below_the_table(make: Make, tmp_path: Path) -> None:
    long = {"participation": "markov:0.2,0.4+lost:0.1+gone:0.05", "link": "up=10mbit,down=50mbit,rtt=40ms"}
    make("plain")
    runs = make("long", algo="fedlap", codecs={"up.mean": "bf16"}, clients=20, **long).parent
    groups = [g.settings for g in gather([runs])]
    assert sorted(labels(groups)) == ["fedavg", "fedlap"]
    assert unnamed(groups)["fedavg"] == "dense, participation full, clients 4, no link"
    output = printed(runs, "--out", tmp_path / "p.html")
    for text in ("fedlap: up.mean bf16", "participation markov:0.2,0.4+lost:0.1+gone:0.05", "clients 20"):
        assert text in output.replace("\n", " ")
    page = (tmp_path / "p.html").read_text()
    assert page.index("<h2>Results") < page.index("fedlap: up.mean bf16") < page.index("<h2>Learning")


def test_what_differs_has_hyperparameters_of_one_name_and_sets_an_algorithms_own_apart() -> None:
    table, own = differences(
        {
            "a": settings("fedavg", **{"hyperparameters.server_lr": 1.0}),
            "b": settings("fedlap", **{LR: 0.01, "hyperparameters.delta": 0.5}),
        }
    )
    assert table.heads == ("", "lr") and table.rows == [("a", "0.1"), ("b", "0.01")]
    assert own == {"fedavg": "server_lr 1.0", "fedlap": "delta 0.5"}


def test_a_hyperparameter_that_differs_between_algorithms_is_noted(make: Make, tmp_path: Path) -> None:
    make("a", hyperparameters={"local.lr": 0.1})
    runs = make("b", algo="fedlap", hyperparameters={"local.lr": 0.01, "delta": 3}).parent
    output = printed(runs, "--out", tmp_path / "p.html")
    assert "Hyperparameters of one name differ between algorithms: local.lr (0.1, 0.01)" in output
