"""Workers that die, stop, hang or are slow: the run completes with the bits of an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from launch.runs.folder import RunFolder
from tests.launch.test_resume import same
from tests.support.commands import DEADLINE, Command, fedsim, start

pytestmark = pytest.mark.process

CLIENTS = """
import os, signal, time
from dataclasses import dataclass
from pathlib import Path
from protocols.fedavg import FedAvg

MARK = Path(__file__).with_suffix(".mark")

@dataclass(frozen=True)
class Kills(FedAvg):
    name = "kills"
    def client_update(self, client, down, shard, task):
        if (task.round, task.client) == (2, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().client_update(client, down, shard, task)

@dataclass(frozen=True)
class HangsAndIsSlow(FedAvg):
    name = "hangs"
    def client_update(self, client, down, shard, task):
        if (task.round, task.client) == (2, 1) and not MARK.exists():
            MARK.touch()
            while True:
                pass
        for _ in range(20 if (task.round, task.client) == (3, 2) else 0):
            time.sleep(0.2)
            shard.net.logits(task.start, shard.floats(shard.inputs[:1]))
        return super().client_update(client, down, shard, task)
"""
RUN = ("--clients", "4", "--rounds", "4", "--model", "logistic")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "clients.py"
    path.write_text(CLIENTS)
    return path


def workers(folder: Path) -> list[int]:
    """Of processes.json, those that have not ended."""
    known = json.loads((folder / "processes.json").read_text())
    return [p["pid"] for p in known if p["role"] == "worker" and not p["ended"]]


def disturbed(running: Command, folder: Path, signals: dict[int, signal.Signals], of: int) -> None:
    """Send a signal to the oldest living worker when each of these rounds has been reported."""
    for r, number in signals.items():
        running.wait_for(f" {r}/{of} ")
        until = time.monotonic() + DEADLINE
        while not workers(folder) and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(workers(folder)[0], number)


def test_killed_and_stopped_workers_are_replaced(tmp_path: Path) -> None:
    options = ("--algo", "fedlap_cov", "--clients", "5", "--rounds", "8", "--model", "logistic")
    options += ("--set", "local.epochs=40")
    folder = tmp_path / "run"
    running = start("launch", "--workers", "2", "--lease", "2", "--out", str(folder), *options)
    kill = signal.SIGKILL
    disturbed(running, folder, {1: kill, 2: kill, 4: signal.SIGSTOP}, 8)
    output = running.rest()
    assert output.count("was killed by SIGKILL") >= 1, "one may have ended between two reports"
    assert "was silent for 2 s" in output
    fedsim("launch", "--workers", "0", "--out", str(tmp_path / "plain"), *options)
    same(RunFolder.open(folder), RunFolder.open(tmp_path / "plain"))
    known = json.loads((folder / "processes.json").read_text())
    assert len([p for p in known if p["role"] == "worker"]) >= 4 and all(p["ended"] for p in known)


def test_a_task_that_kills_its_workers_stops_the_run(file: Path, tmp_path: Path) -> None:
    """After three: exit 1, named, what was committed is there, and no worker was started afterwards.

    A worker that dies before the answer to its task before has left it is counted at that one, so that
    there may be more than three deaths in all.
    """
    folder = tmp_path / "run"
    output = fedsim("launch", "--workers", "2", "--algo", f"{file}:Kills", "--out", str(folder), *RUN, code=1)
    assert (
        "was killed by SIGKILL in round 2, at client 1" in output and "3 workers have ended there" in output
    )
    assert (folder / "checkpoints" / "000001.checkpoint").exists()
    known = json.loads((folder / "processes.json").read_text())
    replaced = output.count("is gone: was killed by SIGKILL")
    assert replaced >= 2
    assert len([p for p in known if p["role"] == "worker"]) == 2 + replaced


def test_a_hung_worker_is_killed_and_a_slow_one_is_not(file: Path, tmp_path: Path) -> None:
    """The lease is shorter than the slow task."""
    output = fedsim(
        *("launch", "--workers", "2", "--lease", "2", "--algo", f"{file}:HangsAndIsSlow"),
        *("--out", str(tmp_path / "hung"), *RUN),
    )
    assert "was silent for 2 s in round 2, at client 1" in output and "done" in output
    assert output.count("silent") == 1
    ledger = RunFolder.open(tmp_path / "hung").ledger
    beats = ledger[(ledger.message == "heartbeat") & (ledger.layer == "header")]
    assert len(beats) >= 3 and set(beats.kind) == {"control"}, "heartbeats are in the books"
    fedsim("launch", "--workers", "0", "--algo", "fedavg", "--out", str(tmp_path / "plain"), *RUN)
    ends = {RunFolder.open(tmp_path / name).summary["model_sha256"] for name in ("hung", "plain")}
    assert len(ends) == 1


STARTS = """
import os, signal
from pathlib import Path
from torch import nn

def turn(name):
    # how many processes were here before this one, however often each comes
    for number in range(99):
        file = Path(__file__).with_suffix(f".{name}.{number}")
        try:
            with open(file, "x") as created:
                created.write(str(os.getpid()))
            return number
        except FileExistsError:
            if file.read_text() == str(os.getpid()):
                return number

def plain(inputs, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def stops(inputs, outputs):
    if turn("stops") == 1:  # the coordinator is the first
        os.kill(os.getpid(), signal.SIGSTOP)
    return plain(inputs, outputs)

def dies(inputs, outputs):
    if turn("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(inputs, outputs)
"""


def test_a_process_that_hangs_while_it_starts_is_replaced(tmp_path: Path) -> None:
    """The first that sets itself up is stopped."""
    file, ends = tmp_path / "starts.py", []
    file.write_text(STARTS)
    options = ("--algo", "fedadmm", "--clients", "4", "--rounds", "3")
    for name, how in (("stops", ("--workers", "2", "--lease", "4")), ("plain", ("--workers", "0"))):
        out = str(tmp_path / name)
        output = fedsim("launch", "--model", f"{file}:{name}", "--out", out, *options, *how)
        hung = "is gone: was silent for 4 s while it started, and is killed" in output
        assert hung == (name == "stops"), output
        ends.append(RunFolder.open(tmp_path / name).summary)
    assert ends[0]["model_sha256"] == ends[1]["model_sha256"]
    assert ends[0]["clients_sha256"] == ends[1]["clients_sha256"]


def test_a_worker_that_dies_whenever_it_starts_ends_the_run(tmp_path: Path) -> None:
    file = tmp_path / "starts.py"
    file.write_text(STARTS)
    output = fedsim(
        "launch", "--model", f"{file}:dies", "--workers", "1", "--out", str(tmp_path / "run"), code=1
    )
    assert "worker 0 was killed by SIGKILL while it started: 3 workers have ended there" in output
