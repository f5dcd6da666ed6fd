"""Odd machines (F14): folders that cannot be written, few open files, a clock that jumps."""

from __future__ import annotations

import itertools
import resource
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedsim.errors import UsageError
from launch.cli import main
from launch.session import run
from launch.session.run import SPARE, allow_open_files
from protocols import find
from tests.support.commands import ran
from tests.support.harness import play, problem_of

ROOT = Path(__file__).resolve().parents[2]
JOB = ("--clients", "2", "--rounds", "1", "--model", "logistic", "--set", "local.epochs=1")


def test_a_folder_that_cannot_be_made() -> None:
    folder = "/proc/run"
    done = CliRunner(catch_exceptions=False).invoke(main, ["launch", "--workers", "0", "--out", folder, *JOB])
    assert done.exit_code == 5
    assert done.stderr.startswith(f"fedsim: cannot make the run folder {folder}: ")


@pytest.mark.process
@pytest.mark.parametrize(("limit", "code"), [("-n 16", 2), ("-Sn 16", 0)], ids=["hard", "soft"])
def test_few_open_files(limit: str, code: int, tmp_path: Path) -> None:
    """libzmq aborts a process without any; a limit that can be raised is."""
    command = [sys.executable, "-m", "launch", "launch", "--workers", "2", *JOB]
    command += ["--out", str(tmp_path / "run")]
    shell = f'ulimit {limit}; exec "$@"'
    done = ran(["bash", "-c", shell, "bash", *command], cwd=ROOT)
    assert done.returncode == code, done.stderr
    assert (f"2 workers need {SPARE + 8} open files" in done.stderr) == bool(code)
    assert "Traceback" not in done.stderr


def test_a_limit_that_is_high_enough_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(run.resource, "setrlimit", lambda what, pair: raised.append(pair))
    monkeypatch.setattr(run.resource, "getrlimit", lambda what: (1024, 4096))
    allow_open_files(200)
    assert raised == []
    allow_open_files(500)
    assert raised == [(SPARE + 2000, 4096)]
    with pytest.raises(UsageError, match="this shell allows 4096"):
        allow_open_files(1000)
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(run.resource, "getrlimit", lambda what: infinite)
    allow_open_files(100_000)
    assert len(raised) == 1


def test_a_clock_that_jumps_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Deadlines, leases and pauses are of the monotonic clock."""
    plain = play(problem_of(find("fedavg")), tmp_path / "plain")
    hours, now = itertools.cycle((3600.0, -3600.0)), time.time
    monkeypatch.setattr(time, "time", lambda: now() + next(hours))
    jumping = play(problem_of(find("fedavg")), tmp_path / "jumping")
    assert jumping.bits == plain.bits


@pytest.mark.process
def test_an_address_space_that_torch_does_not_fit_into_is_one_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = ran(
        [sys.executable, "-m", "launch", "launch", "--workers", "1", "--out", str(out)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 * 10**9, 2 * 10**9)),
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("fedsim: out of memory: ") and "allows 2.0 GB of addresses" in done.stderr
    assert not out.exists()
