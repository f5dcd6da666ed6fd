"""Edge servers as processes: the bits, rows and sums of a run whose coordinator adds up in their place, also
if some of them are killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest

from launch.runs.folder import RunFolder
from tests.support.commands import DEADLINE, Command, fedsim, start
from tests.support.reproducible import without_seconds

pytestmark = pytest.mark.process

MIXED = ("--participation", "coin:0.8+gone:0.1+lost:0.1")
LOSSY = ("--codec", "edge.mean=sigma:auto+dither", "--codec", "edge.precision=ratio:0.25")
SHORT = ("--clients", "6", "--rounds", "3", "--model", "logistic")


def launch(folder: Path, *options: str) -> RunFolder:
    fedsim("launch", "--quiet", "--out", str(folder), *options)
    return RunFolder.open(folder)


def rows(run: RunFolder, *kinds: str) -> pandas.DataFrame:
    key = [c for c in run.ledger.columns if c != "worker"]
    return run.ledger[run.ledger.kind.isin(kinds)][key].sort_values(key).reset_index(drop=True)


def metrics(run: RunFolder) -> list[dict[str, object]]:
    return without_seconds(map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines()))


def same(one: RunFolder, other: RunFolder) -> None:
    """Model, every client's state, metrics, and the rows of both hops."""
    for key in ("status", "rounds", "model_sha256", "clients_sha256", "took_part", "folded", "dual_mismatch"):
        assert one.summary[key] == other.summary[key], key
    assert metrics(one) == metrics(other)
    for kind in ("algorithm", "edge"):
        assert rows(one, kind).equals(rows(other, kind)), kind


@pytest.mark.parametrize(
    "options",
    [
        ("--algo", "fedlap_cov", "--tree", "2x3", *MIXED, "--codec", "up.mean=bf16"),
        ("--algo", "fedavg", "--tree", "1x6"),  # uploads are passed on
        ("--algo", "mime", "--tree", "3x2", *MIXED),  # two exchanges
        ("--algo", "precond_admm", "--tree", "2x3"),  # a set-up, whose uploads are passed on
        ("--algo", "ivon_admm", "--tree", "2x3", "--participation", "full+lost:1"),  # nothing is ever folded
        ("--algo", "pvi", "--tree", "2x3", *MIXED, *LOSSY),
    ],
    ids=lambda options: options[1],
)
def test_the_bits_and_rows_are_those_of_one_process(options: tuple[str, ...], tmp_path: Path) -> None:
    alone = launch(tmp_path / "alone", *SHORT, *options, "--workers", "0")
    how = ("--workers", "3", "--edge-processes", "--verify-bytes")
    edges = launch(tmp_path / "edges", *SHORT, *options, *how)
    same(edges, alone)
    residuals = edges.summary["edge_residuals"]
    assert residuals and all(left == {"down": 0, "up": 0} for left in residuals.values())
    assert edges.summary["kernel_residual"] == {"down": 0, "up": 0}
    roles = [p["role"] for p in json.loads((edges.path / "processes.json").read_text())]
    assert roles.count("edge server") == len(residuals)


def edge_pids(folder: Path) -> list[int]:
    listed = json.loads((folder / "processes.json").read_text())
    return [p["pid"] for p in listed if p["role"] == "edge server" and p["ended"] is None]


def rounds_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def listen_until(running: Command, folder: Path, rounds: int) -> None:
    """Until so many rounds are evaluated, the start model's included."""
    until = time.monotonic() + DEADLINE
    while rounds_of(folder) < rounds and time.monotonic() < until:
        running.listen(0.02)


def disturbed(folder: Path, draws: random.Random, signal_to: Callable[[int], None], *options: str) -> Command:
    """A run of which one edge server after the other is struck, at any instant after round 1.

    processes.json is a little older than the processes: a server that was struck can still be in it, and the
    last ones can have ended with the run.
    """
    running, struck = start("launch", "--out", str(folder), *options), set[int]()
    for _ in range(2):
        listen_until(running, folder, 2)
        running.listen(draws.uniform(0.0, 0.7))
        pids = [pid for pid in edge_pids(folder) if pid not in struck]
        if pids:
            pid = draws.choice(pids)
            with contextlib.suppress(ProcessLookupError):
                signal_to(pid)
                struck.add(pid)
    assert struck, "no edge server was struck: the run was over too soon"
    return running


LONG = ("--algo", "fedlap_cov", "--clients", "6", "--rounds", "25", "--tree", "2x3", *MIXED, *LOSSY)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_an_edge_server_that_is_killed_is_made_good(seed: int, tmp_path: Path) -> None:
    """Its round's uploads are computed again, and come through a new one."""
    alone = launch(tmp_path / "alone", *LONG, "--workers", "0")
    running = disturbed(
        tmp_path / "run", random.Random(seed), kill, *LONG, "--workers", "4", "--edge-processes"
    )
    running.rest()
    same(RunFolder.open(tmp_path / "run"), alone)


@pytest.mark.slow
def test_a_ledger_that_cannot_be_compared_does_not_make_a_run_fail(tmp_path: Path) -> None:
    """The kernel's count of a connection ends with it. That is an error of --verify-bytes, not of the run."""
    options = (*LONG, "--workers", "4", "--edge-processes", "--verify-bytes")
    running = disturbed(tmp_path / "run", random.Random(0), kill, *options)
    assert "the run is done, but its ledger is not compared" in running.rest(1)
    assert RunFolder.open(tmp_path / "run").summary["status"] == "done"


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.slow
def test_an_edge_server_that_hangs_is_replaced(tmp_path: Path) -> None:
    alone = launch(tmp_path / "alone", *LONG, "--workers", "0")
    options = (*LONG, "--workers", "2", "--edge-processes", "--lease", "4")
    running = disturbed(tmp_path / "run", random.Random(0), stop, *options)
    running.rest()
    same(RunFolder.open(tmp_path / "run"), alone)


@pytest.mark.slow
def test_a_run_with_edge_servers_goes_on(tmp_path: Path) -> None:
    """kill -9 of the coordinator, and another number of workers."""
    alone, folder = launch(tmp_path / "alone", *LONG, "--workers", "0"), tmp_path / "run"
    running = start("launch", "--out", str(folder), *LONG, "--workers", "2", "--edge-processes")
    listen_until(running, folder, 5)
    running.kill()
    fedsim("resume", str(folder), "--workers", "3")
    same(RunFolder.open(folder), alone)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--edge-processes", "--workers", "2"), "needs --tree"),
        (("--edge-processes", "--workers", "1", "--tree", "2x3"), "2 edge servers need --workers 2"),
        (("--edge-processes", "--workers", "0", "--tree", "2x3"), "give --workers K"),
        (
            ("--edge-processes", "--workers", "2", "--tree", "2x3", "--bad-uploads", "skip"),
            "the root sees no upload",
        ),
        (("--tree", "2x4"), "2 x 4 = 8 clients; there are 6"),
    ],
)
def test_a_mistake_is_one_line(options: tuple[str, ...], says: str, tmp_path: Path) -> None:
    output = fedsim("launch", *SHORT, "--out", str(tmp_path / "run"), *options, code=2)
    assert says in output and "Traceback" not in output
    assert not (tmp_path / "run").exists()
