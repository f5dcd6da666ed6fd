"""The probe digest: equal where the bits are equal, different where they are not, whatever the labels say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.runs.reader import Run
from protocols.fedlap import FedLap
from protocols.fedlap_cov import FedLapCov
from tests.support.harness import ALGORITHMS, Class, problem_of
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


def test_an_algorithm_that_fails_still_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(ALGORITHMS[0])
    sound = probe_digest(problem)

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(type(problem.algorithm), "client_update", fails)
    assert probe_digest(problem) == probe_digest(problem) != sound


def test_short_hyperparameters_are_never_longer_than_the_own() -> None:
    problem = problem_of(ALGORITHMS[0])
    assert problem.algorithm.local.epochs == shortened(problem.algorithm).local.epochs == SHORT["epochs"]


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launch", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )


@pytest.mark.process
def test_resume_refuses_a_process_that_computes_other_bits(tmp_path: Path) -> None:
    """The instruction set is hidden from torch and from the manifest's labels: only the probe can tell."""
    run = tmp_path / "run"
    done = command("launch", *JOB, "--rounds", "1", "--out", str(run), ATEN_CPU_CAPABILITY="default")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((run / "manifest.json").read_text())
    here = command("launch", *JOB, "--rounds", "1", "--out", str(tmp_path / "here"))
    assert here.returncode == 0, here.stderr
    ours = Run.open(tmp_path / "here").manifest["platform"]
    if ours["probe"] == manifest["platform"]["probe"]:
        pytest.skip("this machine has no instruction set beyond the default one")
    manifest["platform"]["processor"] = ours["processor"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    refused = command("resume", str(run), "--rounds", "2")
    assert refused.returncode == 3
    for digest in (ours["probe"]["cpu"], manifest["platform"]["probe"]["cpu"]):
        assert digest in refused.stderr
    assert command("resume", str(run), "--rounds", "2", "--allow-drift").returncode == 0
