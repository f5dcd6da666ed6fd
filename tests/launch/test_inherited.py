"""What a process inherits: a working folder that is gone, a parent that ignores SIGCHLD."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fedsim
from fedsim.errors import UsageError
from launch.inherited import children_kept
from tests.support.commands import DEADLINE, ran

SMALL = {"algo": "fedavg", "model": "logistic", "clients": 2, "rounds": 1, "quiet": True}
ROOT = Path(__file__).resolve().parents[2]

CALLS: dict[str, Callable[[], object]] = {
    "run": lambda: fedsim.run(quiet=True),
    "plan": lambda: fedsim.plan(),
    "open": lambda: fedsim.open("run"),
    "resume": lambda: fedsim.resume("run"),
    "sweep": lambda: fedsim.sweep(over={"algo": ["fedavg"]}),
    "compare": lambda: fedsim.compare("run"),
}


@pytest.fixture
def gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()


@pytest.mark.usefixtures("gone")
@pytest.mark.parametrize("name", CALLS)
def test_a_working_folder_that_is_gone_is_named(name: str) -> None:
    with pytest.raises(UsageError, match="the working folder has been removed"):
        CALLS[name]()


@pytest.mark.usefixtures("gone")
@pytest.mark.parametrize("words", ["launch --workers 0", "plan", "describe fedavg", "runs"])
def test_the_command_says_it_in_a_line(words: str) -> None:
    program = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom launch.__main__ import run\nrun()\n"
    command = [sys.executable, "-c", program, *words.split()]
    done = ran(command)
    assert done.returncode == 2
    assert done.stderr == "fedsim: the working folder has been removed; change to one that exists (cd)\n"


@pytest.fixture(params=[signal.SIG_IGN, lambda *_: _reap()], ids=["ignored", "reaped"])
def handled(request: pytest.FixtureRequest) -> Iterator[object]:
    """The user's program ignores SIGCHLD, or waits for all children itself."""
    before = signal.signal(signal.SIGCHLD, request.param)
    yield request.param
    signal.signal(signal.SIGCHLD, before)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def test_a_run_with_workers_ends(handled: object, tmp_path: Path) -> None:
    """The handler is the user's again afterwards."""
    assert fedsim.run(**SMALL, workers=1, out=tmp_path / "run").status == "done"
    assert signal.getsignal(signal.SIGCHLD) is handled


def test_so_does_one_in_another_thread(handled: object, tmp_path: Path) -> None:
    """No handler can be set there."""
    ended: list[str] = []
    work = threading.Thread(
        target=lambda: ended.append(fedsim.run(**SMALL, workers=1, out=tmp_path / "run").status)
    )
    work.start()
    work.join(DEADLINE)
    assert ended == ["done"]


def test_children_are_kept_in_the_block_only() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with children_kept():
            assert subprocess.run(["false"]).returncode == 1
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)
