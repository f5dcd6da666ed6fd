"""fedsim watch: what it says of runs that other processes carry out."""

from __future__ import annotations

import json
import os
import platform
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.commands import watch as module
from launch.commands.watch import GRACE, follow
from launch.runs.folder import RunFolder
from tests.support.commands import DEADLINE, Command, start
from tests.support.kept_runs import command, files, kept_run
from workers.storage.atomic_files import RunLock

OPTIONS = ("--workers", "1", "--algo", "fedavg", "--model", "logistic", "--clients", "2", "--devices", "cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is done. Not to be changed."""
    return kept_run(tmp_path_factory.mktemp("whole") / "run", algo="fedavg", rounds=3)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


@pytest.fixture
def going(tmp_path: Path) -> Iterator[tuple[Path, Command]]:
    """A run of many rounds, one of which is evaluated at least."""
    folder = tmp_path / "going"
    launched = start("launch", *OPTIONS, "--rounds", "100000", "--out", str(folder))
    try:
        launched.wait_for("round      1/")
        yield folder, launched
    finally:
        launched.kill()


def rounds_in(lines: list[str]) -> list[int]:
    return [int(line.split("/")[0].removeprefix("round")) for line in lines if line.startswith("round")]


def test_a_run_that_is_done_is_shown_as_launch_shows_it(run: Path) -> None:
    before = files(run)
    output = command("watch", run)
    lines = output.out.splitlines()
    assert output.code == 0 and files(run) == before
    assert rounds_in(lines) == [0, 1, 2, 3] and lines[-1].startswith(
        "done after 3 evaluated rounds, test acc"
    )
    spent = sum(json.loads(x)["bytes_down"] for x in (run / "metrics.jsonl").read_text().splitlines())
    assert spent > 0 and "so far" in lines[-2]


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("failed", 1), ("interrupted", 130)])
def test_the_exit_code_is_that_of_the_run(status: str, code: int, run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    why = "worker 1 died" if status == "failed" else None
    (run / "summary.json").write_text(json.dumps(summary | {"status": status, "error": why}))
    output = command("watch", run)
    assert output.code == code and status in output.out.splitlines()[-1]
    assert ("worker 1 died" in output.out) == (status == "failed")
    assert ("fedsim resume" in output.out) == (status != "done")


def test_bytes_so_far_are_left_out_where_metrics_do_not_have_them_all(tmp_path: Path) -> None:
    run = kept_run(tmp_path / "run", algo="fedavg", rounds=4, eval_every=2)
    lines = [line for line in command("watch", run).out.splitlines() if line.startswith("round")]
    assert rounds_in(lines) == [0, 2, 4]
    assert ["so far" in line for line in lines] == [True, False, False]


def test_a_run_is_followed_to_its_end(going: tuple[Path, Command]) -> None:
    folder, launched = going
    watching = start("watch", str(folder), "--interval", "0.1")
    watching.wait_for("round      3/")
    launched.process.send_signal(signal.SIGINT)
    output = watching.rest(code=130)
    lines = output.splitlines()
    assert f"interrupted after {rounds_in(lines)[-1]:,} evaluated rounds" in output
    assert rounds_in(lines) == list(range(rounds_in(lines)[-1] + 1))
    in_file = [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rounds_in(lines) == in_file


def test_ctrl_c_ends_the_watch_and_not_the_run(going: tuple[Path, Command]) -> None:
    folder, launched = going
    watching = start("watch", str(folder), "--interval", "0.1")
    watching.wait_for("round      2/")
    watching.process.send_signal(signal.SIGINT)
    assert "fedsim: interrupted" in watching.rest(code=130)
    size = (folder / "metrics.jsonl").stat().st_size
    until = time.monotonic() + DEADLINE
    while (folder / "metrics.jsonl").stat().st_size == size and time.monotonic() < until:
        launched.listen(0.1)
    assert launched.process.poll() is None and (folder / "metrics.jsonl").stat().st_size > size


def test_a_run_without_workers_that_was_killed_is_killed(tmp_path: Path) -> None:
    """It has no processes.json, and nothing but its lock says that it is gone."""
    folder = tmp_path / "run"
    of = ("--algo", "fedavg", "--model", "logistic", "--clients", "2", "--rounds", "100000")
    launched = start("launch", *of, "--workers", "0", "--out", str(folder))
    launched.wait_for("round      1/")
    assert RunFolder(folder).status == "running"
    watching = start("watch", str(folder), "--interval", "0.1")
    watching.wait_for("round      2/")
    launched.kill()
    assert f"fedsim resume {folder} continues" in watching.rest(code=137)
    assert RunFolder(folder).status == "killed"


def test_a_terminal_has_a_line_that_is_replaced_and_the_cursor_again_after_it(run: Path) -> None:
    terminal, side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    arguments = [sys.executable, "-m", "launch", "watch", str(run)]
    watching = subprocess.Popen(arguments, stdin=side, stdout=side, stderr=side, env=environment)
    os.close(side)
    shown = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the end, as Linux says it of a terminal
            break
        if not piece:
            break
        shown += piece
    os.close(terminal)
    assert watching.wait(DEADLINE) == 0, shown
    assert b"done after 3 evaluated rounds" in shown
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l") >= 0


# ---- without other processes


def unended(run: Path, coordinator: int, node: str | None = None) -> None:
    (run / "summary.json").unlink()
    row = {"role": "coordinator", "index": 0, "pid": coordinator, "node": node or platform.node()}
    (run / "processes.json").write_text(json.dumps([row]))


def ended_process() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait(DEADLINE)
    return process.pid


def looked(run: Path, *times: float) -> list[str]:
    watched = module.WatchedRun(run)
    return [watched.update(now) for now in times]


def test_a_resume_may_begin_before_a_run_counts_as_killed(run: Path) -> None:
    unended(run, ended_process())
    assert looked(run, 0.0, GRACE / 2, GRACE) == ["", "", "killed"]


def test_the_lock_says_whether_a_run_is_running_and_not_a_process_id(run: Path) -> None:
    """Another process may have the id by now; and a run without worker processes writes none down."""
    unended(run, os.getpid())
    assert looked(run, 0.0, GRACE) == ["", "killed"]
    (run / "processes.json").unlink()
    assert looked(run, 0.0, GRACE) == ["", "killed"]
    lock = RunLock(run)
    assert looked(run, 0.0, 100 * GRACE) == ["", ""]
    lock.release()


def test_of_a_coordinator_on_another_machine_nothing_is_known(run: Path) -> None:
    unended(run, ended_process(), node="another")
    assert looked(run, 0.0, 100 * GRACE) == ["", ""]


def test_lines_of_before_a_resume_are_not_shown_again(run: Path) -> None:
    unended(run, os.getpid())
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    watched = module.WatchedRun(run)

    def new() -> list[int]:
        return [line["round"] for line in watched.look(0.0)]

    path.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # a line that is being written
    assert new() == [0, 1, 2]
    path.write_bytes(b"".join(lines[:2]))  # a resume has cut it
    assert new() == []
    path.write_bytes(b"".join(lines))
    assert new() == [3] and watched.spent is not None


def test_a_folder_of_runs_has_a_line_for_each(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE", 0.2)
    for name in ("a", "b"):
        shutil.copytree(whole, tmp_path / "pool" / name)
    assert follow(tmp_path / "pool", 0.05) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["a", "b"]
    unended(tmp_path / "pool" / "b", ended_process())
    assert follow(tmp_path / "pool", 0.05) == 137
    assert "b: killed after 3 evaluated rounds" in capsys.readouterr().out


def test_a_folder_that_is_removed_ends_the_watch(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "summary.json").unlink()
    monkeypatch.setattr(module.time, "sleep", lambda _: shutil.rmtree(run))  # between two looks
    assert follow(run) == 1
    assert capsys.readouterr().out.endswith("; its folder was removed\n")


def test_mistakes_are_one_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder, text in (
        (tmp_path / "empty", "not a run folder"),
        (tmp_path / "nothing", "there is no folder"),
    ):
        output = command("watch", folder)
        assert output.code == 2 and text in output.err and len(output.err.splitlines()) == 1
    for line in ("nonsense", '{"round": 1, "test_accuracy": 0.5}'):  # the second as of another program
        (run / "metrics.jsonl").write_text(f"{line}\n")
        output = command("watch", run)
        assert output.code == 2 and "metrics.jsonl is damaged" in output.err
    assert command("watch", run, "--interval", "0").code == 2
