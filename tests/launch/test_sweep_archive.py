"""The archive beside a sweep's page: it is written again, or with more seeds, without the run folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pandas
import pytest
import zstandard
from click.testing import CliRunner, Result
from hypothesis import given, strategies as st

from fedsim.errors import DataError
from launch.cli import main
from launch.sweep.finished import FinishedRun, columns_of, read_archive, rounded, write_archive

RECIPE = """
title = "A small sweep"
seeds = [0, 1]
[experiment]
clients = 2
rounds = 2
model = "logistic"
[[variant]]
label = "fedavg"
experiment = {algo = "fedavg"}
[[variant]]
label = "fedprox"
experiment = {algo = "fedprox"}
[[table]]
columns = ["test_accuracy@2", "client_accuracy_worst@2", "train_loss@2", "MB@end"]
[[plot]]
file = "lines.png"
y = "test_nll"
x = "MB"
"""


def sweep(folder: Path, *more: str) -> Result:
    command = ["sweep", str(folder / "small.toml"), "--runs", str(folder / "runs"), *more]
    return CliRunner(catch_exceptions=False).invoke(main, command)


def lines(archive: bytes) -> list[bytes]:
    return zstandard.decompress(archive).splitlines()


def files(out: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in out.iterdir()}


@pytest.mark.process
def test_a_page_outlives_its_run_folders(tmp_path: Path) -> None:
    recipe, out = tmp_path / "small.toml", tmp_path / "out"
    recipe.write_text(RECIPE)
    assert sweep(tmp_path, "--out", str(out)).exit_code == 0
    written = files(out)
    assert {"small.md", "small_runs.jsonl.zst", "lines.png"} == written.keys()
    shutil.rmtree(tmp_path / "runs")

    assert sweep(tmp_path, "--out", str(out), "--no-run").exit_code == 0
    assert files(out) == written

    recipe.write_text(RECIPE.replace("[0, 1]", "[0, 1, 2]"))  # a further seed, on a new machine
    again = sweep(tmp_path, "--out", str(out), "--dry-run")
    assert "6 runs to do" in again.output  # who repeats a page runs it
    listed = sweep(tmp_path, "--out", str(out), "--archived", "--dry-run").output.splitlines()
    assert sum(line.startswith("archived") for line in listed) == 4
    assert sum(line.startswith("to do") for line in listed) == 2
    assert sweep(tmp_path, "--out", str(out), "--archived").exit_code == 0
    assert len(list((tmp_path / "runs").glob("fed*"))) == 2
    assert "seeds 0, 1, 2" in (out / "small.md").read_text() and "6 runs, " in (out / "small.md").read_text()
    before, after = (
        lines(text) for text in (written["small_runs.jsonl.zst"], files(out)["small_runs.jsonl.zst"])
    )
    assert set(before) < set(after)

    (tmp_path / "other.toml").write_text(
        RECIPE.replace("fedprox", "fedadmm").replace('label = "fedavg"', 'label = "mine"')
    )
    other = ["sweep", str(tmp_path / "other.toml"), "--runs", str(tmp_path / "runs"), "--out", str(out)]
    shutil.rmtree(tmp_path / "runs")
    listed = CliRunner().invoke(main, [*other, "--archived", "--dry-run"]).output.splitlines()
    states = [(line[:8].strip(), line[9:].partition(":")[0]) for line in listed if ", seed " in line]
    assert states == [
        ("archived", "mine, seed 0"),
        ("archived", "mine, seed 1"),
        ("to do", "fedadmm, seed 0"),
        ("to do", "fedadmm, seed 1"),
    ]

    archive = out / "small_runs.jsonl.zst"
    assert [json.loads(line)["seed"] for line in lines(archive.read_bytes())] == [0, 1, 2, 0, 1, 2]
    table = pandas.read_json(archive, lines=True)  # as docs/sweeps.md says
    assert list(table["seed"]) == [0, 1, 2, 0, 1, 2]
    recipe.write_text(RECIPE.replace("seeds = [0, 1]", "seeds = [2]"))
    assert sweep(tmp_path, "--out", str(out)).exit_code == 0
    assert len(read_archive(archive)) == 2  # those of the recipe


def test_a_damaged_archive_of_another_recipe_is_named_and_not_used(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RECIPE)
    (tmp_path / "other_runs.jsonl.zst").write_bytes(zstandard.compress(b"{}\n"))
    listed = sweep(tmp_path, "--out", str(tmp_path), "--archived", "--dry-run")
    assert listed.exit_code == 0 and "4 runs to do" in listed.output
    assert "not used: " in listed.output and "other_runs.jsonl.zst is damaged" in listed.output


@pytest.mark.process
def test_runs_that_fail_do_not_empty_the_archive(tmp_path: Path) -> None:
    recipe, out = tmp_path / "small.toml", tmp_path / "out"
    recipe.write_text(RECIPE)
    assert sweep(tmp_path, "--out", str(out)).exit_code == 0
    archived = (out / "small_runs.jsonl.zst").read_bytes()
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    for run in read_archive(out / "small_runs.jsonl.zst"):  # a file stands where the folder of the run should
        (tmp_path / "runs" / run).write_text("")
    assert sweep(tmp_path, "--out", str(out)).exit_code == 1
    assert "not run" in (out / "small.md").read_text()
    assert (out / "small_runs.jsonl.zst").read_bytes() == archived


def test_mistakes_with_an_archive_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RECIPE)
    alone = sweep(tmp_path, "--archived")
    assert alone.exit_code == 2 and "--archived reads the archives of --out" in alone.output
    invalid, archive = "line 1 is no finished run", tmp_path / "small_runs.jsonl.zst"
    texts = {
        zstandard.compress(b"{}\n"): invalid,
        zstandard.compress(b"[1\n"): invalid,
        b"{}\n": "is damaged: ",
    }
    for text, what in texts.items():
        archive.write_bytes(text)
        for how in (["--archived"], ["--no-run"], []):
            damaged = sweep(tmp_path, "--out", str(tmp_path), *how)
            assert damaged.exit_code == 2 and what in damaged.output and "Traceback" not in damaged.output
            assert archive.read_bytes() == text
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("metrics", "what"),
    [
        ({"round": [0, 1], "test_nll": [1.0, 2.0, 3.0]}, "the columns of line 2 do not fit its rounds"),
        ({"round": [], "test_nll": []}, "the columns of line 2 do not fit"),
        ({"round": [0, None]}, "the columns of line 2 do not fit"),
        ({"round": [0, 0.5]}, "the columns of line 2 do not fit"),
        ({"test_nll": [1.0]}, "the columns of line 2 do not fit"),
        ({"round": [0], "test_nll": ["low"]}, "line 2 is no finished run"),
    ],
)
def test_a_damaged_line_is_named(metrics: dict[str, list[Any]], what: str, tmp_path: Path) -> None:
    path, run = (
        tmp_path / "a_runs.jsonl.zst",
        FinishedRun("a-1", "a", 0, 1.0, "c", "m", {}, {"round": [0, 1]}),
    )
    write_archive(path, [run])
    assert read_archive(path) == {"a-1": run}
    write_archive(path, [run, msgspec.structs.replace(run, metrics=metrics)])
    with pytest.raises(DataError, match=what):
        read_archive(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"0.759", b"0.859"), (b',"test_nll":[2.5,1.25]', b""), (b'"seed":3', b'"seed":4'), (b"1.25", b"1.250")],
)
def test_a_changed_line_is_refused(old: bytes, new: bytes, tmp_path: Path) -> None:
    """Each line has a digest, so a changed digit or a lost column is no other table."""
    metrics: dict[str, list[Any]] = {"round": [0, 1], "test_accuracy": [0.1, 0.759], "test_nll": [2.5, 1.25]}
    path, run = tmp_path / "a_runs.jsonl.zst", FinishedRun("a-1", "a", 3, 1.0, "c", "m", {}, metrics)
    write_archive(path, [run])
    (line,) = lines(path.read_bytes())
    assert line.count(old) == 1
    path.write_bytes(zstandard.compress(line.replace(old, new) + b"\n"))
    if new == b"1.250":  # the same number
        assert read_archive(path) == {"a-1": run}
        return
    with pytest.raises(DataError, match=r"line 1 \(a, seed [34]\) has changed"):
        read_archive(path)


NUMBERS = st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(0, 2**40)


@given(st.lists(NUMBERS, min_size=2, max_size=6), st.integers(0, 5), st.dictionaries(st.text(), NUMBERS))
def test_lines_come_back_from_theircolumns_of(values: list[Any], first: int, limits: dict[str, Any]) -> None:
    """Every number with its first digits, also where a metric begins late or is a mapping, without lists."""
    lines = [{"round": at, "loss": x, "limits": limits} for at, x in enumerate(values)]
    for line in lines[:first]:
        del line["loss"]
    columns = json.loads(json.dumps(columns_of(tuple(line | {"clients": [1, 2]} for line in lines))))
    run = FinishedRun("a-1", "a", 0, 1.0, "c", "m", {}, columns)
    assert run.lines == [{key: rounded(x) for key, x in line.items()} for line in lines]
