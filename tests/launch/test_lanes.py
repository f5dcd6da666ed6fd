"""--lanes: a run's bits depend neither on how many workers there are nor on what befalls them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from launch.runs.reader import Run
from tests.launch.test_resume import rows, same
from tests.launch.test_supervision import workers
from tests.support.commands import fedsim, start

pytestmark = [pytest.mark.process, pytest.mark.slow]

CLIENTS = """
import time
from dataclasses import dataclass
from protocols.fedavg import FedAvg

@dataclass(frozen=True)
class Slow(FedAvg):
    name = "slow"
    def client_update(self, client, down, shard, task):
        for _ in range(10):
            time.sleep(0.15)
            shard.net.logits(task.start, shard.floats(shard.inputs[:1]))
        return super().client_update(client, down, shard, task)

@dataclass(frozen=True)
class Fails(FedAvg):
    name = "fails"
    def client_update(self, client, down, shard, task):
        result = super().client_update(client, down, shard, task)
        if (task.round, task.client) == (2, 3):
            raise ValueError("of this client alone")
        return result
"""
RUN = ("--clients", "9", "--fraction", "0.4", "--participation", "7", "--rounds", "3", "--lanes", "3")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "clients.py"
    path.write_text(CLIENTS)
    return path


def launched(folder: Path, *options: str, workers: int = 0) -> Run:
    fedsim("launch", "--workers", str(workers), "--out", str(folder), *options)
    return Run.open(folder)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedlap_cov", "ivon_admm", "scaffold", "mime"])
def test_any_number_of_workers(algorithm: str, tmp_path: Path) -> None:
    """The same bits, other ones than without lanes, and the bytes of no lanes."""
    options = ("--algo", algorithm, *RUN)
    inside = launched(tmp_path / "0", *options)
    for count in (1, 2):
        same(inside, launched(tmp_path / str(count), *options, workers=count))
    plain = launched(tmp_path / "plain", *options, "--lanes", "1")
    assert rows(plain).equals(rows(inside))
    assert inside.summary["model_sha256"] != plain.summary["model_sha256"]
    assert inside.summary["experiment_sha256"] != plain.summary["experiment_sha256"]
    assert json.loads((inside.path / "manifest.json").read_text())["experiment"]["lanes"] == 3
    assert "lanes" not in json.loads((plain.path / "manifest.json").read_text())["experiment"]


def test_a_killed_workers_lanes_are_computed_again(tmp_path: Path) -> None:
    options = ("--algo", "fedlap_cov", *RUN[:-4], "--rounds", "8", "--lanes", "3", "--set", "local.epochs=20")
    running = start("launch", "--workers", "2", "--out", str(tmp_path / "run"), *options)
    for r in (1, 3, 5):
        running.wait_for(f" {r}/8 ")
        os.kill(workers(tmp_path / "run")[0], signal.SIGKILL)
    assert "was killed by SIGKILL" in running.rest()
    same(Run.open(tmp_path / "run"), launched(tmp_path / "plain", *options))


def test_a_worker_whose_lanes_take_longer_than_a_lease(file: Path, tmp_path: Path) -> None:
    """Three slow tasks at once last 4.5 s, and the worker says meanwhile that it is alive."""
    options = ("--algo", f"{file}:Slow", "--clients", "3", "--rounds", "1", "--lanes", "3", "--lease", "3")
    output = fedsim("launch", "--workers", "1", "--out", str(tmp_path / "run"), *options)
    assert "silent" not in output and Run.open(tmp_path / "run").summary["status"] == "done"


@pytest.mark.parametrize("count", ["0", "2"])
def test_the_error_of_a_client_names_it(count: str, file: Path, tmp_path: Path) -> None:
    options = ("--algo", f"{file}:Fails", *RUN, "--participation", "full", "--out", str(tmp_path / "run"))
    output = fedsim("launch", "--workers", count, *options, code=1)
    assert "client 3" in output and "of this client alone" in output


def test_a_run_is_found_again_bit_for_bit(tmp_path: Path) -> None:
    launched(tmp_path / "run", "--algo", "fedlap_cov", *RUN, workers=2)
    output = fedsim("verify", str(tmp_path / "run"), "--twice")
    assert "different" not in output and "model_sha256 is identical" in output


def test_a_run_goes_on(tmp_path: Path) -> None:
    options = ("--algo", "ivon_admm", *RUN)
    launched(tmp_path / "run", *options, workers=2)
    fedsim("resume", str(tmp_path / "run"), "--rounds", "5", "--workers", "1")
    same(Run.open(tmp_path / "run"), launched(tmp_path / "whole", *options, "--rounds", "5"))


def test_remote_workers(tmp_path: Path) -> None:
    options = ("--algo", "fedlap_cov", *RUN, "--bind", "tcp://127.0.0.1:*", "--out", str(tmp_path / "run"))
    running = start("launch", "--remote-workers", "2", *options)
    running.wait_for("waiting for")
    remote = [start("worker", "--join", str(tmp_path / "run" / "join.json")) for _ in range(2)]
    for command in (running, *remote):
        command.rest()
    plain = launched(tmp_path / "plain", "--algo", "fedlap_cov", *RUN)
    for key in ("model_sha256", "clients_sha256", "test_accuracy"):
        assert Run.open(tmp_path / "run").summary[key] == plain.summary[key]


def test_edge_servers_as_processes(tmp_path: Path) -> None:
    options = ("--algo", "fedavg", *RUN, "--tree", "2x5", "--clients", "10")
    apart = launched(tmp_path / "run", *options, "--edge-processes", workers=2)
    plain = launched(tmp_path / "plain", *options)
    assert apart.summary["model_sha256"] == plain.summary["model_sha256"]


def test_a_model_that_draws_is_refused(tmp_path: Path) -> None:
    options = ("--dataset", "digits", "--model", "resnet20", "--lanes", "2", "--out", str(tmp_path / "run"))
    output = fedsim("launch", *options, code=2)
    assert "--lanes" in output and "dropout" in output and "Traceback" not in output
