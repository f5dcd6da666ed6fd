"""The job, one run of it by fedsim or by a peer, and what a relay counts of one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedsim.experiment import Experiment, build_algorithm
from fedsim.problem import Problem
from protocols import find
from tests.benchmarks.common import summary
from tests.benchmarks.peers.environments import HERE, Peer, python_of
from tests.benchmarks.peers.measure import Measured, failure, run
from tests.support.relay import Relay

LR = 0.5
DEADLINE = 120.0
WORKERS = 2
FEDSIM = (sys.executable, "-m", "launch", "launch")
SETTINGS = {"epochs": 1, "carry": False, "optimiser": "sgd", "lr": LR}


@dataclass(frozen=True)
class Place:
    """Where a measurement has its files, and how long its runs are."""

    scratch: Path
    data: Path
    environments: Path
    rounds: int
    warm: int
    device: str = "cpu"

    def experiment(self) -> Experiment:
        return Experiment(
            algo="fedavg",
            dataset="fashion_mnist",
            fraction=0.1,
            partition="iid",
            inputs="scaled",
            model="mlp",
            clients=10,
            rounds=self.rounds,
            hyperparameters=SETTINGS,
        )

    def write_job(self) -> None:
        """The data and the start of the experiment as the peers' programs read them."""
        experiment = self.experiment()
        problem = Problem.build(experiment, build_algorithm(find("fedavg"), SETTINGS), self.data)
        shards = [problem.shard(k) for k in range(experiment.clients)]
        smallest = min(s.size for s in shards)
        np.savez(
            self.scratch / "data.npz",
            inputs=torch.stack([s.inputs[:smallest].reshape(smallest, -1) for s in shards]).numpy(),
            targets=torch.stack([s.targets[:smallest] for s in shards]).numpy(),
            test_inputs=np.asarray(problem.dataset.test_inputs).reshape(-1, 784),
            test_targets=np.asarray(problem.dataset.test_targets),
            start=problem.start.numpy(),
        )


def peer_run(
    peer: Peer, place: Place, workers: int, kill_after: int = 0, deadline: float = 0.0, **ports: int
) -> Measured:
    """One run of a peer's program in its environment; deadline 0: the peer's own."""
    settings = {"data": str(place.scratch / "data.npz"), "clients": 10, "rounds": place.rounds, **ports}
    settings["device"] = place.device
    job = place.scratch / f"job-{workers}.json"
    job.write_text(json.dumps({**settings, "workers": workers, "lr": LR, "batch": 32}))
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {
        **kept,
        "PEERS_JOB": str(job),
        "PYTHONPATH": str(HERE / "programs"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HOME": str(place.scratch),
        "PATH": f"{python_of(peer, place.environments).parent}:{os.environ['PATH']}",
    }
    command = [str(python_of(peer, place.environments)), str(peer.source)]
    return run(command, environment, deadline or peer.deadline, kill_after, peer.worker)


def peer_bytes(peer: Peer, place: Place) -> str:
    """What a relay between its clients and its server counts in a run of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with contextlib.closing(Relay(port)) as relay:
        measured = peer_run(peer, place, WORKERS, port=port, through=relay.port)
    counted = f"{sum(relay.bytes.values()):,}" if measured.code == 0 else f"not measured: {failure(measured)}"
    return f"{peer.sends} / {counted}"


def arguments(place: Place) -> list[str]:
    experiment = place.experiment()
    return [
        *("--algo", "fedavg", "--clients", "10", "--dataset", "fashion_mnist", "--fraction", "0.1"),
        *("--partition", "iid", "--inputs", experiment.inputs, "--model", "mlp"),
        *("--rounds", str(place.rounds), "--data-dir", str(place.data)),
        *(part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}".lower())),
    ]


def fedsim_run(place: Place, workers: int, kill_after: int = 0, deadline: float = DEADLINE) -> Measured:
    """One run of fedsim; the run folder is a new one."""
    out = Path(tempfile.mkdtemp(dir=place.scratch)) / "run"
    command = [*FEDSIM, *arguments(place), "--workers", str(workers), "--out", str(out)]
    command += ["--devices", "cuda:0" if place.device == "cuda" else "cpu"]
    measured = run(command, {**os.environ, "PYTHONUNBUFFERED": "1"}, deadline, kill_after)
    if measured.code == 0:
        measured.sha256 = summary(out)["model_sha256"]
        measured.accuracy = summary(out)["test_accuracy"]
    return measured


def fedsim_bytes(place: Place) -> str:
    """What the ledger books, and what a relay between the coordinator and two remote workers counts."""
    out = place.scratch / "relayed"
    command = [*FEDSIM, *arguments(place), "--remote-workers", "2", "--bind", "tcp://127.0.0.1:*"]
    started = [subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL)]
    try:
        keys, until = out / "join.json", time.monotonic() + DEADLINE
        while not keys.exists():
            if time.monotonic() > until or started[0].poll() is not None:
                return "not measured: the coordinator did not start"
            time.sleep(0.05)
        port = int(json.loads(keys.read_text())["url"].rpartition(":")[2])
        with contextlib.closing(Relay(port)) as relay:
            worker = (sys.executable, "-m", "launch", "worker", "--join", str(keys))
            for i in range(2):
                address = ("--connect", f"tcp://127.0.0.1:{relay.port}", "--worker", str(i))
                started.append(subprocess.Popen([*worker, *address], stdout=subprocess.DEVNULL))
            for process in started:
                process.wait(DEADLINE)
            counted = sum(relay.bytes.values())
    except (OSError, KeyError, subprocess.TimeoutExpired) as error:
        return f"not measured: {error}"
    finally:
        for process in started:
            process.kill()
            process.wait()
    directions = summary(out)["bytes"].values()
    claimed = sum(sum(sum(f.values()) for f in d.values()) for kind in directions for d in kind.values())
    return f"{claimed:,} / {counted:,}"
