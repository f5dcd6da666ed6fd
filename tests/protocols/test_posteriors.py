"""A posterior that is offered for sampling can be sampled from: one unit of precision and no absurd width."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import fedsim
from fedsim.learning.gaussian import Gaussian
from launch.cli import main
from launch.session.display import too_wide
from protocols import REGISTRY, find
from tests.support.harness import Class, has_setting, problem_of, steps

QUICK: dict[str, Any] = {"epochs": 5, "steps": 3, "samples": 2, "covariance": "diagonal"}
SAMPLED: dict[str, dict[str, Any]] = {"fola": {"posterior": True, "gamma": 0.1}}
"""Settings with which an algorithm offers its posterior at all."""
GAUSSIANS = {
    *SAMPLED,
    *("bayes_admm", "bregman_admm", "ivon_admm", "fedivon", "ba_ivon", "pvi", "ivon_pvi", "fedgvi", "fedep"),
    *("bcm", "fedlap_cov", "fedlap_cov_func"),
}
"""The algorithms whose model is a distribution; a new one belongs here."""
WIDE = dict.fromkeys(("fedlap_cov", "fedlap_cov_func"), "too wide to sample from")
"""Why a posterior is worse than its mean, as the algorithm's file says it."""


def settings(algorithm: Class) -> dict[str, Any]:
    quick = {name: value for name, value in QUICK.items() if has_setting(algorithm, name)}
    return quick | SAMPLED.get(algorithm.name, {})


@pytest.mark.parametrize("algorithm", REGISTRY, ids=lambda a: a.name)
def test_which_models_are_distributions(algorithm: Class) -> None:
    problem = problem_of(algorithm, SAMPLED.get(algorithm.name, {}), fraction=0.2)
    _, servers, _ = steps(problem)
    model = problem.algorithm.model(servers[-1], problem.context(2, 0))
    assert isinstance(model, Gaussian) == (algorithm.name in GAUSSIANS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(GAUSSIANS))
def test_the_average_over_samples_is_not_far_worse_than_the_mean(name: str, tmp_path: Path) -> None:
    run = fedsim.run(
        algo=name,
        clients=3,
        rounds=min(3, find(name).default_rounds),
        fraction=0.5,
        eval_samples=16,
        eval_every=3,
        hyperparameters=settings(find(name)),
        workers=0,
        quiet=True,
        out=str(tmp_path / "run"),
    )
    last = run.metrics.iloc[-1]
    assert too_wide(last["test_nll"], last["ensemble_nll"]) == (name in WIDE), last


@pytest.mark.parametrize("name", WIDE)
def test_an_algorithm_says_why_its_posterior_is_wide(name: str) -> None:
    (algorithm,) = (a for a in REGISTRY if a.name == name)
    text = sys.modules[algorithm.__module__].__doc__ or ""
    assert WIDE[name] in " ".join(text.split())


@pytest.mark.parametrize(("gamma", "warns"), [("1e-8", True), ("1.0", False)])
def test_a_run_says_that_its_posterior_is_too_wide(gamma: str, warns: bool, tmp_path: Path) -> None:
    options = ["--rounds", "2", "--clients", "2", "--workers", "0", "--eval-samples", "4"]
    hyperparameters = ["--set", "posterior=true", "--set", f"gamma={gamma}"]
    command = ["launch", "--algo", "fola", *options, *hyperparameters, "--out", str(tmp_path / "run")]
    done = CliRunner(catch_exceptions=False).invoke(main, command)
    assert done.exit_code == 0
    assert ("far worse than at the mean" in done.output) == warns
