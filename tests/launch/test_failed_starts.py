"""A start that failed or was interrupted leaves nothing, and the same command works afterwards."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fedsim.errors import UsageError
from launch.cli import main
from launch.configuration.config import Overrides
from launch.configuration.listen_address import check_bind
from launch.runs import manifest
from launch.runs.writer import RunDir
from tests.support.commands import DEADLINE, ran
from workers.storage.atomic_files import RunLock

ROOT = Path(__file__).resolve().parents[2]
JOB = ("--clients", "2", "--rounds", "1", "--model", "logistic", "--set", "local.epochs=1")

SLOW = """
import time

def never():
    time.sleep(600)
"""
ELSEWHERE = "192.0.2.1"  # an address for documentation (RFC 5737), of no machine


def _on_a_terminal(*arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """The command with its output on a terminal, and the other end of that."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "launch", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    return process, ours


def _read_until(terminal: int, text: str) -> str:
    """All that the terminal shows until it contains the text; '' is the end."""
    shown, until = "", time.monotonic() + DEADLINE
    while not text or text not in shown:
        assert select.select([terminal], [], [], max(0.0, until - time.monotonic()))[0], shown
        try:
            shown += os.read(terminal, 4096).decode()
        except OSError:  # the process has ended
            assert not text, shown
            return shown
    return shown


@pytest.mark.process
@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, "2"), (signal.SIGTERM, "0")])
@pytest.mark.parametrize("moment", ["starting", "reading and dividing the data"])
def test_the_first_signal_ends_a_start_and_leaves_nothing(
    moment: str, number: signal.Signals, workers: str, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    data = ("--dataset", f"{tmp_path / 'slow.py'}:never")
    process, terminal = _on_a_terminal(
        "launch", "--workers", workers, "--out", str(tmp_path / "runs/a"), *data
    )
    try:
        _read_until(terminal, moment)
        process.send_signal(number)
        rest = _read_until(terminal, "")
        assert process.wait(DEADLINE) == 130
        line = rest.split("\x1b[2K")[-1].strip()
        assert line == "fedsim: interrupted before the run began, and nothing was kept"
        assert [path.name for path in tmp_path.iterdir()] == ["slow.py"]
    finally:
        process.kill()
        process.wait(DEADLINE)
        os.close(terminal)


@pytest.mark.process
def test_ctrl_c_before_the_options_are_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(  # imported in the place of the library
        "import signal\nsignal.raise_signal(signal.SIGINT)\n"
    )
    done = ran(
        [sys.executable, "-m", "launch", "launch"], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fedsim: interrupted\n")


@pytest.mark.process
def test_a_disk_that_is_full_before_the_manifest_leaves_nothing(tmp_path: Path) -> None:
    """A limit of 0 on the length of files stands for the full disk."""
    command = [sys.executable, "-m", "launch", "launch", "--workers", "2", *JOB]
    command += ["--out", str(tmp_path / "runs/a")]
    full = ran(["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", *command], cwd=ROOT)
    assert full.returncode == 5, full.stderr
    assert re.match("fedsim: cannot make (the run folder|a temporary file)", full.stderr), full.stderr
    assert len(full.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    again = ran(command, cwd=ROOT)
    assert again.returncode == 0, again.stderr


def test_an_address_of_another_machine_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    remote = ("--remote-workers", "1", "--bind", f"tcp://{ELSEWHERE}:5555")
    arguments = ["launch", *remote, "--out", str(tmp_path / "run")]
    done = CliRunner(catch_exceptions=False).invoke(main, arguments)
    assert done.exit_code == 2
    assert (
        f"--bind tcp://{ELSEWHERE}:5555: {ELSEWHERE} is no address of this machine; write one" in done.stderr
    )
    assert list(tmp_path.iterdir()) == []


def test_a_port_of_another_program_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"another program listens on port {port}; choose another"):
            check_bind(f"tcp://127.0.0.1:{port}")
    check_bind(f"tcp://127.0.0.1:{port}")
    check_bind("tcp://127.0.0.1:*")
    check_bind(f"tcp://lo:{port}")  # an interface, which is left to ZeroMQ


def test_an_error_after_the_folder_is_made_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import launch.session.session

    def refuse(*arguments: object) -> None:
        raise UsageError("there is no endpoint")

    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(launch.session.session, "open_endpoint", refuse)
        for name in ("empty", "runs/a"):
            arguments = ["launch", "--workers", "0", *JOB, "--out", str(tmp_path / name)]
            done = CliRunner(catch_exceptions=False).invoke(main, arguments)
            assert (done.exit_code, done.stderr) == (2, "fedsim: there is no endpoint\n")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["empty"]
    assert CliRunner(catch_exceptions=False).invoke(main, arguments).exit_code == 0


def test_a_folder_whose_start_was_killed_may_be_launched_into(tmp_path: Path) -> None:
    RunDir(tmp_path).close()
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "logs" / "worker-000.log").write_text("killed")
    done = CliRunner(catch_exceptions=False).invoke(
        main, ["launch", "--workers", "0", *JOB, "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.stderr
    assert not (tmp_path / "logs" / "worker-000.log").exists()


def test_a_start_that_was_killed_before_its_model_was_made_is_listed_and_resumed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    experiment, execution = Overrides.of({"clients": 2, "rounds": 1, "workers": 0, "out": str(out)}).resolve()
    killed = RunDir(out)
    killed.write_json("manifest.json", manifest.draft(experiment, execution))
    killed.close()

    def fedsim(*words: str) -> Result:
        return CliRunner(catch_exceptions=False).invoke(main, words)

    def state() -> list[object]:
        (run,) = json.loads(fedsim("runs", str(tmp_path), "--json").stdout)
        return [run[key] for key in ("state", "rounds_done", "rounds", "error")]

    assert state() == ["killed", 0, 1, None]
    refused = fedsim("report", str(out))
    assert (refused.exit_code, f"fedsim resume {out} starts it again" in refused.stderr) == (2, True)
    assert fedsim("resume", str(out), "--runs", str(out)).exit_code == 2
    assert fedsim("resume", str(out)).exit_code == 0
    assert state() == ["done", 1, 1, None]


@pytest.mark.parametrize("extra", ["model.safetensors", "checkpoints/000001.checkpoint"])
def test_a_run_is_not_emptied(extra: str, tmp_path: Path) -> None:
    RunDir(tmp_path).close()
    (tmp_path / extra).write_text("mine")
    with pytest.raises(UsageError, match="this is a run; fedsim resume"):
        RunDir(tmp_path)
    assert (tmp_path / extra).read_text() == "mine"


FOREIGN = [
    *("notes.txt", "logs/thesis.txt", "state/notes", "state/12/a.state", "checkpoints/old/", "tracking.txt"),
    *("journal.txt", "logs/worker-000.log.bak", "data/ledger.csv", ".git/", "manifest.json~", "Lock"),
]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_file_that_fedsim_did_not_write_is_never_removed(
    foreign: str, marked: bool, tmp_path: Path
) -> None:
    """Neither in a folder whose names fit by chance, nor beside the files of a start that was killed."""
    if marked:
        RunDir(tmp_path).close()
    else:
        for name in ("checkpoints", "logs", "state"):
            (tmp_path / name).mkdir()
        (tmp_path / "lock").write_text("")
    path = tmp_path / foreign
    path.parent.mkdir(exist_ok=True, parents=True)
    path.mkdir() if foreign.endswith("/") else path.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=r"the folder is not empty \(it has .*choose another"):
        RunDir(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_links_in_the_place_of_our_files_are_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    run = tmp_path / "run"
    RunDir(run).close()
    (run / "spool").symlink_to(target)
    with pytest.raises(UsageError, match="it has spool"):
        RunDir(run)
    assert (target / "mine.txt").read_text() == "mine"


def test_a_folder_that_another_process_has_is_not_emptied(tmp_path: Path) -> None:
    RunDir(tmp_path).close()
    lock = RunLock(tmp_path)
    with pytest.raises(UsageError, match="is being run by process"):
        RunDir(tmp_path)
    lock.release()
    assert (tmp_path / "ledger.csv").exists()
