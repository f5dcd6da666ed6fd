"""The probe digest: equal where the bits are equal, different where they are not, whatever the labels say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedsim.experiment import Experiment, build_algorithm
from fedsim.problem import Problem
from launch.runs.folder import RunFolder
from protocols import find
from protocols.fedlap import FedLap
from protocols.fedlap_cov import FedLapCov
from tests.support.commands import fedsim, start
from tests.support.harness import ALGORITHMS, Class, problem_of
from workers.portable import PORTABLE
from workers.probe import SHORT, probe_digest, shortened

JOB = ("--workers", "0", "--clients", "2", "--model", "logistic", "--algo", "fedlap_cov")


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_it_is_a_function_of_the_problem(algorithm: Class) -> None:
    problem = problem_of(algorithm)
    assert probe_digest(problem) == probe_digest(problem) == probe_digest(problem_of(algorithm))


def test_it_sees_the_start_and_the_algorithm() -> None:
    own = probe_digest(problem_of(FedLapCov, model="mlp_small"))
    assert own != probe_digest(problem_of(FedLapCov, model="mlp_small", seed=1))
    assert own != probe_digest(problem_of(FedLap, model="mlp_small"))


def test_a_users_own_algorithm_is_never_called(tmp_path: Path) -> None:
    """Its code may keep something from call to call, and then a probe would change the run."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom protocols.fedavg import FedAvg\n\n@dataclass(frozen=True)\n"
        "class Mine(FedAvg):\n    def client_update(self, *_):\n        raise ZeroDivisionError\n"
    )
    spec = f"{tmp_path / 'mine.py'}:Mine"
    experiment = Experiment(algo=spec, clients=2, model="logistic")
    problem = Problem.build(experiment, build_algorithm(find(spec), {}), None)
    assert probe_digest(problem) == probe_digest(problem)


def test_short_hyperparameters_are_never_longer_than_the_own() -> None:
    problem = problem_of(ALGORITHMS[0])
    assert problem.algorithm.local.epochs == shortened(problem.algorithm).local.epochs == SHORT["epochs"]


@pytest.mark.process
def test_resume_refuses_a_process_that_computes_other_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instruction set is hidden from torch and from the manifest's labels: only the probe can tell."""
    run = tmp_path / "run"
    for name in PORTABLE:
        monkeypatch.delenv(name, raising=False)
    start("launch", *JOB, "--rounds", "1", "--out", str(run), **PORTABLE).rest()
    manifest = json.loads((run / "manifest.json").read_text())
    fedsim("launch", *JOB, "--rounds", "1", "--out", str(tmp_path / "here"))
    ours = RunFolder.open(tmp_path / "here").manifest["platform"]
    assert ours["probe"] != manifest["platform"]["probe"]
    manifest["platform"]["processor"] = ours["processor"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    refused = fedsim("resume", str(run), "--rounds", "2", code=3)
    for digest in (ours["probe"]["cpu"], manifest["platform"]["probe"]["cpu"]):
        assert digest in refused
    fedsim("resume", str(run), "--rounds", "2", "--allow-drift")
