"""fedsim runs: one line per run, also of damaged and killed ones."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import fedsim
from launch.cli import main
from launch.runs.folder import DAMAGED, MISSING, RunFolder
from tests.support.commands import DEADLINE, start
from workers.storage.atomic_files import RunLock, is_locked

SMALL: dict[str, Any] = {"model": "logistic", "clients": 2, "quiet": True}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> fedsim.Run:
    out = tmp_path_factory.mktemp("finished") / "run"
    return fedsim.run(algo="fedavg", rounds=2, seed=3, **SMALL, out=out)


@pytest.fixture
def folder(finished: fedsim.Run, tmp_path: Path) -> Path:
    shutil.copytree(finished.path, tmp_path / "runs" / "one")
    return tmp_path / "runs"


def runs(*arguments: str) -> Result:
    result = CliRunner(env={"COLUMNS": "240"}).invoke(main, ["runs", *arguments])
    assert result.exit_code == 0, result.output
    return result


def listed(*arguments: str) -> list[dict[str, Any]]:
    return list(json.loads(runs(*arguments, "--json").stdout))


def change(run: Path, name: str, **values: Any) -> None:
    content = json.loads((run / name).read_text())
    (run / name).write_text(json.dumps(content | values))


@contextmanager
def locked(run: Path) -> Iterator[None]:
    lock = RunLock(run)
    yield
    lock.release()


def test_a_forked_process_does_not_hold_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    fork = multiprocessing.get_context("fork")
    begun, ended = fork.Event(), fork.Event()
    child = fork.Process(target=lambda: (begun.set(), ended.wait(DEADLINE)))
    child.start()
    try:
        assert begun.wait(DEADLINE) and is_locked(tmp_path)
        lock.release()
        assert not is_locked(tmp_path)
    finally:
        ended.set()
        child.join()


def test_a_finished_run_is_one_line_with_the_numbers_of_its_summary(
    folder: Path, finished: fedsim.Run
) -> None:
    summary, manifest = finished.summary, finished.manifest
    assert listed(str(folder)) == [
        {
            "run": str(folder / "one"),
            "state": "done",
            "started": manifest["started"],
            "algo": "fedavg",
            "dataset": "digits",
            "seed": 3,
            "rounds_done": 2,
            "rounds": 2,
            "until": None,
            "test_accuracy": summary["test_accuracy"],
            "bytes_down": summary["bytes_down"],
            "bytes_up": summary["bytes_up"],
            "error": None,
        }
    ]
    head, line = runs(str(folder)).stdout.splitlines()
    assert " ".join(head.split()) == "run algorithm data seed state rounds accuracy bytes started"
    accuracy, kilobytes = summary["test_accuracy"], (summary["bytes_down"] + summary["bytes_up"]) / 1e3
    cells = [str(folder / "one"), "fedavg", "digits", "3", "done", "2/2", f"{100 * accuracy:.1f}", "%"]
    assert line.split()[:10] == [*cells, f"{kilobytes:.1f}", "kB"]
    assert listed(str(folder / "one")) == listed(str(folder))  # a run folder itself


@pytest.mark.parametrize(
    ("status", "state"), [("interrupted", "interrupted"), ("failed", "failed"), (None, "killed")]
)
def test_the_state_is_what_the_summary_says_or_killed(folder: Path, status: str | None, state: str) -> None:
    """A run that is not done is counted from its journal."""
    before = listed(str(folder))[0]
    if status is None:
        (folder / "one" / "summary.json").unlink()
    else:
        change(folder / "one", "summary.json", status=status, error="why it failed", bytes_down=0)
    error = "why it failed" if status == "failed" else None
    assert listed(str(folder)) == [before | {"state": state, "error": error}]
    with locked(folder / "one"):
        assert listed(str(folder))[0]["state"] == "running"
    assert state in runs(str(folder)).stdout
    if status == "failed":
        change(folder / "one", "summary.json", error="worker 1 failed:\n  the reason is below\n")
        assert "worker 1 failed: the reason is below" in runs(str(folder)).stdout


def test_runs_are_in_the_order_in_which_they_were_begun(folder: Path) -> None:
    for name, started in (("a", "2026-01-02T00:00:00+00:00"), ("b", "2026-01-01T00:00:00+00:00")):
        shutil.copytree(folder / "one", folder / name)
        change(folder / name, "manifest.json", started=started)
    assert [Path(r["run"]).name for r in listed(str(folder))] == ["b", "a", "one"]
    twice = [str(folder), str(folder / "a")]
    assert [Path(r["run"]).name for r in listed(*twice)] == ["b", "a", "one"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("manifest.json", "{"),
        ("manifest.json", "[]"),
        ("manifest.json", '{"format": 1}'),
        ("manifest.json", '{"format": 99}'),
        ("summary.json", "{"),
        ("summary.json", '{"status": "done"}'),
    ],
)
def test_a_damaged_run_is_one_line_and_the_others_are_listed(
    folder: Path, name: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # a line holds the longest path
    shutil.copytree(folder / "one", folder / "broken")
    (folder / "broken" / name).write_text(content)
    result = runs(str(folder))
    assert len(result.stdout.splitlines()) == 3 and not result.stderr
    last = result.stdout.splitlines()[-1]
    assert last.startswith("damaged: ") and str(folder / "broken") in last
    states = {Path(r["run"]).name: r["state"] for r in listed(str(folder))}
    assert states == {"broken": "damaged", "one": "done"}


def test_a_folder_without_a_manifest_is_damaged_only_if_it_was_a_run(folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "text.md").touch()
    (folder / "one" / "manifest.json").unlink()
    (only,) = listed(str(folder))
    assert only["state"] == "damaged" and "not a run folder" in only["error"]


def test_no_runs_are_no_error_and_no_folder_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert runs().stdout == "no runs in runs\n"
    assert listed() == []
    result = CliRunner().invoke(main, ["runs", "nowhere"])
    assert (result.exit_code, result.stderr) == (2, "fedsim: there is no folder nowhere\n")


@pytest.mark.process
def test_a_run_that_is_killed_is_running_before_and_killed_after(tmp_path: Path) -> None:
    out = tmp_path / "run"
    running = start(
        "launch", "--workers", "0", "--rounds", "100000", "--model", "logistic", "--out", str(out)
    )
    running.wait_for("round      2/100000")
    (line,) = listed(str(tmp_path))
    assert line["state"] == "running" and line["rounds_done"] >= 2 and line["bytes_up"] > 0
    running.kill()
    (line,) = listed(str(tmp_path))
    assert line["state"] == "killed" and line["rounds"] == 100000


def _look(run: str, stop: Any) -> None:
    while not stop.is_set():
        is_locked(Path(run))


def test_looking_at_a_lock_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    RunLock(tmp_path).release()
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    looking = context.Process(target=_look, args=(str(tmp_path), stop), daemon=True)
    looking.start()
    try:
        for _ in range(300):
            RunLock(tmp_path).release()
    finally:
        stop.set()
        looking.join(DEADLINE)
    assert not is_locked(tmp_path)


def test_a_folder_that_is_not_there_is_missing_and_one_without_a_manifest_damaged(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "none").status == MISSING
    (tmp_path / "empty").mkdir()
    assert RunFolder(tmp_path / "empty").status == DAMAGED
