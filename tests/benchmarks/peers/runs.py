"""The job, and one run of it by fedsim or by a peer."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedsim.experiment import Experiment, build_algorithm
from fedsim.problem import Problem
from protocols import find
from tests.benchmarks.common import FEW, FULL, fashion_shaped, summary
from tests.benchmarks.peers.environments import HERE, Peer, python_of
from tests.benchmarks.peers.measure import Measured, run

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


def data_folder(scratch: Path, tiny: bool) -> tuple[Path, str]:
    """FashionMNIST's folder, or random data of its shape."""
    known = os.environ.get("FEDSIM_DATA")
    if known and (Path(known) / "FashionMNIST").is_dir() and not tiny:
        return Path(known), "FashionMNIST"
    return fashion_shaped(scratch / "data", FEW if tiny else FULL), "random data of FashionMNIST's shape"


def peer_run(peer: Peer, place: Place, workers: int, kill_after: int = 0, deadline: float = 0.0) -> Measured:
    """One run of a peer's program in its environment; deadline 0: the peer's own."""
    command, environment = prepared(peer, place, workers)
    return run(command, environment, deadline or peer.deadline, kill_after, peer.worker)


def prepared(peer: Peer, place: Place, workers: int, **more: int) -> tuple[list[str], dict[str, str]]:
    """The command of a peer's program and its environment; more: settings of its job."""
    settings = {"data": str(place.scratch / "data.npz"), "clients": 10, "rounds": place.rounds, **more}
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
    return [str(python_of(peer, place.environments)), str(peer.source)], environment


def arguments(place: Place, clients: int = 10) -> list[str]:
    experiment = place.experiment()
    return [
        *("--algo", "fedavg", "--clients", str(clients), "--dataset", "fashion_mnist", "--fraction", "0.1"),
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
