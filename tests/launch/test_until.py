"""--until: a run ends with the first evaluated round that has the target accuracy, with the bits of a run of
so many rounds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from click.testing import CliRunner

import fedsim
from fedsim.errors import UsageError
from launch.cli import main
from launch.configuration.target_accuracy import TargetAccuracy, parsed
from launch.numbers import below_target, target
from launch.runs.folder import RunFolder
from launch.runs.manifest import digest
from launch.sweep.recipe import Recipe
from tests.support.commands import fedsim as command, start
from tests.support.reproducible import without_seconds

SMALL: dict[str, Any] = {"algo": "fedlap_cov", "model": "logistic", "clients": 4, "quiet": True}
OPTIONS = ("--algo", "fedlap_cov", "--model", "logistic", "--clients", "4", "--rounds", "8")


def test_an_accuracy_is_a_share_or_a_percentage() -> None:
    assert [parsed(text, "--until") for text in ("0.78", "78%", " 76.4% ", "1", "100%")] == [
        *(0.78, 0.78, 0.764, 1.0, 1.0)
    ]
    for text in ("", "0", "78", "-0.1", "101%", "nan", "inf", "x%", "%"):
        with pytest.raises(UsageError, match=r"--until .*: give an accuracy, such as 0.75 or 75%"):
            parsed(text, "--until")


def test_a_target_is_shown_as_it_was_asked_for_and_what_was_reached_is_never_rounded_up() -> None:
    assert [target(x) for x in (0.78, 0.7638, 0.7825, 1.0, 0.07)] == [
        *("78 %", "76.38 %", "78.25 %", "100 %", "7 %")
    ]
    assert [below_target(x) for x in (0.78, 0.77999, 0.7638, 1.0)] == [
        *("78.0 %", "77.9 %", "76.3 %", "100.0 %")
    ]


def test_the_target_counts_evaluated_rounds_after_the_start() -> None:
    def lines(*accuracies: float | None) -> list[dict[str, Any]]:
        return [{"round": 2 * n, "test_accuracy": a} for n, a in enumerate(accuracies)]

    reached = TargetAccuracy(0.5).after(lines(0.9, 0.4, None, 0.5, 0.8))
    assert (reached.reached, reached.best, reached.best_round) == (6, 0.8, 8)
    assert reached.outcome(60_417_000) == "reached 50 % after round 6 with 60.42 MB"
    missed = TargetAccuracy(0.78).after(lines(0.9, 0.764, 0.5, 0.764))
    assert missed.outcome(None) == "78 % was not reached; the best was 76.4 % (round 2)"
    assert TargetAccuracy(0.78).after(lines(0.9)).outcome(None).endswith("no round was evaluated")
    assert TargetAccuracy(0.0).after(lines(0.1, 0.9)).reached is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> fedsim.Run:
    """Eight rounds without a target."""
    return fedsim.run(**SMALL, rounds=8, out=tmp_path_factory.mktemp("whole") / "run")


def level(whole: fedsim.Run, number: int) -> float:
    """An accuracy that this round is the first one to have."""
    accuracies = whole.metrics.test_accuracy
    assert accuracies[number] > max(accuracies[1:number])
    return float(accuracies[number])


@pytest.fixture(scope="module")
def short(whole: fedsim.Run, tmp_path_factory: pytest.TempPathFactory) -> fedsim.Run:
    """Three rounds without a target."""
    return fedsim.run(**SMALL, rounds=3, out=tmp_path_factory.mktemp("short") / "run")


def same(one: fedsim.Run, other: fedsim.Run) -> None:
    keys = ("rounds", "model_sha256", "clients_sha256", "bytes_down", "bytes_up", "took_part", "folded")
    assert {key: one.summary[key] for key in keys} == {key: other.summary[key] for key in keys}
    assert metrics(one) == metrics(other)
    assert rows(one).equals(rows(other))


def metrics(run: fedsim.Run) -> list[dict[str, object]]:
    return without_seconds(map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines()))


def rows(run: fedsim.Run) -> pandas.DataFrame:
    key = [c for c in run.ledger.columns if c != "worker"]
    return run.ledger[run.ledger.kind == "algorithm"][key].sort_values(key).reset_index(drop=True)


def test_the_run_ends_with_the_bits_of_one_of_so_many_rounds(
    whole: fedsim.Run, short: fedsim.Run, tmp_path: Path
) -> None:
    until = level(whole, 3)
    run = fedsim.run(**SMALL, rounds=8, until=until, out=tmp_path / "run")
    same(run, short)
    summary = run.summary
    assert (summary["status"], summary["until"], summary["reached"]) == ("done", until, 3)
    assert summary["bytes_to_until"] == {"down": summary["bytes_down"], "up": summary["bytes_up"]}
    assert sum(summary["bytes_to_until"].values()) == whole.bytes_to(accuracy=until)
    assert run.manifest["experiment"]["until"] == until and run.manifest["experiment"]["rounds"] == 8


def test_a_target_that_is_not_reached_changes_no_bit(whole: fedsim.Run, tmp_path: Path) -> None:
    run = fedsim.run(**SMALL, rounds=8, until=1.0, out=tmp_path / "run")
    same(run, whole)
    assert (run.summary["until"], run.summary["reached"], run.summary["bytes_to_until"]) == (1.0, None, None)
    assert (whole.summary["until"], whole.summary["reached"]) == (None, None)


def test_only_evaluated_rounds_count(whole: fedsim.Run, tmp_path: Path) -> None:
    run = fedsim.run(**SMALL, rounds=8, eval_every=2, until=level(whole, 3), out=tmp_path / "run")
    accuracies = whole.metrics.test_accuracy
    first = next(r for r in (2, 4, 6, 8) if accuracies[r] >= level(whole, 3))
    assert run.summary["reached"] == run.summary["rounds"] == first > 3
    assert sum(run.summary["bytes_to_until"].values()) == run.summary["bytes_down"] + run.summary["bytes_up"]


def test_a_run_that_has_ended_goes_on_with_a_higher_target_or_without_one(
    whole: fedsim.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fedsim.run(**SMALL, rounds=8, until=level(whole, 2), out=tmp_path / "run")
    before = run.summary
    for options in ({}, {"rounds": 9}, {"until": 0.2}):
        fedsim.resume(run, **options)  # type: ignore[arg-type]
        assert re.search(r"has reached .* after round [12]; a higher --until", capsys.readouterr().out)
    assert fedsim.open(run.path).summary == before
    run = fedsim.resume(run, until=level(whole, 3), quiet=True)
    assert (run.summary["reached"], run.summary["rounds"]) == (3, 3)
    run = fedsim.resume(run, until=0.0, quiet=True)
    same(run, whole)
    assert (run.summary["until"], run.summary["reached"]) == (None, None)
    fedsim.resume(run)
    assert "is complete: all 8 rounds; --rounds gives it more" in capsys.readouterr().out


def test_a_target_that_is_named_later_is_charged_up_to_its_round(whole: fedsim.Run, tmp_path: Path) -> None:
    """The last rounds of a killed run were not evaluated yet: more rounds are committed than it needed."""
    run = fedsim.run(**SMALL, rounds=8, out=tmp_path / "run")
    lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.path / "metrics.jsonl").write_text("".join(lines[:8]))  # rounds 0 to 7
    (run.path / "summary.json").unlink()
    manifest = json.loads((run.path / "manifest.json").read_text())
    manifest["experiment"]["until"] = level(whole, 3)
    manifest["experiment_sha256"] = digest(manifest["experiment"])
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    run = fedsim.resume(run, quiet=True)
    assert (run.summary["reached"], run.summary["rounds"]) == (3, 8)
    assert sum(run.summary["bytes_to_until"].values()) == whole.bytes_to(accuracy=level(whole, 3))


@pytest.mark.process
def test_a_killed_run_goes_on_to_its_target(whole: fedsim.Run, short: fedsim.Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    until = ("--until", f"{level(whole, 3)}")
    running = start("launch", *OPTIONS, *until, "--workers", "2", "--out", str(folder))
    running.wait_for("round 1/8")
    running.kill()
    (folder / "summary.json").unlink(missing_ok=True)  # if it was not killed in time
    output = command("resume", str(folder), "--workers", "1")
    assert output.splitlines()[-1].startswith("reached ")
    same(RunFolder.open(folder), short)  # type: ignore[arg-type]
    assert RunFolder.open(folder).summary["test_accuracy"] == short.summary["test_accuracy"]


def test_a_run_that_has_passed_a_new_target_is_refused(tmp_path: Path) -> None:
    run = fedsim.run(**SMALL, rounds=2, out=tmp_path / "run")
    (run.path / "summary.json").unlink()
    with pytest.raises(UsageError, match=r"has reached 20 % after round 1 already; give a higher --until"):
        fedsim.resume(run, rounds=5, until=0.2, quiet=True)


def test_data_without_an_accuracy_are_refused_in_one_line(tmp_path: Path) -> None:
    def line() -> fedsim.Dataset:
        x = np.linspace(0, 1, 60, dtype=np.float32)[:, None]
        return fedsim.Dataset("line", x[:40], x[:40], x[40:], x[40:], 1, likelihood="gaussian")

    with pytest.raises(UsageError, match=r"line has no test accuracy .*: its targets are gaussian"):
        fedsim.run(algo="fedavg", dataset=line, model="mlp_small", clients=2, until=0.5, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_plan_is_an_upper_bound() -> None:
    options = ["plan", "--clients", "3", "--rounds", "2"]
    without, bounded = (CliRunner().invoke(main, [*options, *more]) for more in ([], ["--until", "78%"]))
    assert without.exit_code == bounded.exit_code == 0
    assert bounded.stdout.startswith(without.stdout)
    rest = bounded.stdout.removeprefix(without.stdout)
    assert rest == "at most: the run ends with the first evaluated round of 78 %\n"


def test_a_sweeps_runs_without_a_target_keep_their_names(tmp_path: Path) -> None:
    def names(more: str) -> set[str]:
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(
            f'title = "t"\n[experiment]\nmodel = "logistic"\n{more}\n[[variant]]\nlabel = "fedavg"\n'
            'experiment = {algo = "fedavg"}\n'
        )
        return {t.id for t in Recipe.read(recipe).trials()}

    assert names("") == names("until = 0.0") == {"fedavg-fe53036f689cafac"}
    assert names("until = 0.9") != names("")
