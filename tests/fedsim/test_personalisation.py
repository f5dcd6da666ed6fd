"""A model per client at the end of a run, and its scores beside the global model's (--personalise)."""

from __future__ import annotations

import json
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedsim
from fedsim.errors import UsageError
from fedsim.learning.score_names import PERSONAL_NUMBERS
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.personalisation import PersonalScores, check_personalised, personal_scores
from fedsim.problem import Problem
from fedsim.seeds import RandomStream
from launch.results.compare import Comparison
from protocols import find
from tests.support.harness import play, problem_of

EPOCHS = 3
SGD = {"optimiser": "sgd", "lr": 0.1}
DATA = """
import numpy as np
from fedsim import Dataset

def rotated():
    # three clients, whose classes have other inputs each
    rng = np.random.default_rng(0)
    centres, targets = np.repeat(np.arange(3), 40), np.tile(np.arange(4), 30)
    inputs = (np.eye(4)[(targets + centres) % 4] + rng.normal(0, 0.3, (120, 4))).astype(np.float32)
    test = np.arange(120) % 5 == 0
    return Dataset(
        "rotated", train_inputs=inputs[~test], train_targets=targets[~test], test_inputs=inputs[test],
        test_targets=targets[test], classes=4, centres=centres[~test],
        test_centres=np.where(centres[test] == 1, -1, centres[test]))
"""


def scored(problem: Problem, folder: Path) -> tuple[PersonalScores, Any]:
    check_personalised(problem)
    run = play(problem, folder)
    scores = personal_scores(problem, run.outcome.server, lambda k: run.states[k], 2, run.outcome.folds)
    return scores, run


def own_model(problem: Problem, mean: Tensor, k: int) -> Tensor:
    """FedAvg's client k after EPOCHS epochs from `mean`."""
    rng, how = RandomStream(problem.experiment.seed, "personal", 3, k), problem.algorithm.unwrapped.local
    how = LocalTraining(**{**vars(how), "epochs": EPOCHS})
    return minimise(problem.shard(k), mean.float(), how=how, rng=rng, round=3).solution


def test_clients_are_scored_on_their_own_test_rows(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(DATA)
    changes = {"dataset": f"{tmp_path}/data.py:rotated", "partition": "natural", "model": "logistic_bias"}
    problem = problem_of(find("fedavg"), SGD, personalise=EPOCHS, **changes)
    scores, run = scored(problem, tmp_path / "run")
    assert scores.personal.scored.tolist() == [True, False, True]
    data, accuracies = problem.dataset, []
    for k in (0, 2):
        rows = np.flatnonzero(data.test_centres == k)
        inputs, targets = (torch.from_numpy(x[rows]) for x in (data.test_inputs, data.test_targets))
        outputs = problem.net.logits(own_model(problem, run.outcome.model.mean, k), problem.read(inputs))
        accuracies.append(float((outputs.argmax(1) == targets).double().mean()))
    assert scores.personal.accuracy.tolist() == accuracies
    assert scores.common.accuracy.tolist() == [
        a for a in run.metrics[-1]["client_accuracies"] if a is not None
    ]
    gain = scores.numbers()["personal_accuracy_gain"]
    assert gain == pytest.approx(np.mean(accuracies) - scores.common.accuracy.mean())
    assert gain > 0
    assert scores.to_json(EPOCHS)["client_accuracies"][1] is None


def test_without_own_test_rows_classes_are_weighted_as_in_the_training_rows(tmp_path: Path) -> None:
    problem = problem_of(find("fedavg"), SGD, personalise=EPOCHS, fraction=0.1)
    scores, run = scored(problem, tmp_path / "run")
    data, shares = problem.dataset, problem.label_shares.shares
    for k in range(3):
        weights = own_model(problem, run.outcome.model.mean, k)
        outputs = problem.net.logits(weights, problem.read(torch.from_numpy(np.array(data.test_inputs))))
        right = outputs.argmax(1).numpy() == data.test_targets
        by_class = [right[data.test_targets == c].mean() for c in range(10)]
        assert scores.personal.accuracy[k] == pytest.approx(shares[k] @ by_class, rel=1e-12)
    assert scores.common.accuracy.mean() == run.metrics[-1]["client_accuracy_mean"]


@pytest.mark.parametrize("flag", ["+own", "+last"])
def test_a_codec_relative_to_earlier_broadcasts_does_not_coarsen_the_start(flag: str, tmp_path: Path) -> None:
    """Relative to nothing, sigma:10% would leave out 90 % of the model's weights."""
    codecs = {"down.mean": f"sigma:10%{flag}", "down.precision": f"ratio:1{flag}"}
    problem = problem_of(find("fedlap_cov"), personalise=1, fraction=0.1, codecs=codecs)
    run = play(problem, tmp_path / "run")
    dense = copy(problem)
    vars(dense)["codecs"] = {"down": {}, "up": problem.codecs["up"]}
    each = [
        personal_scores(
            p, run.outcome.server, lambda k: run.states[k], 2, run.outcome.folds
        ).personal.accuracy
        for p in (problem, dense)
    ]
    assert each[0].tolist() == each[1].tolist()


def test_fedivons_personal_models_have_the_prior_of_the_others(tmp_path: Path) -> None:
    """The power changes personal models alone; the run, and the scores of its global model, stay the same."""
    each = []
    for power in (0.0, 1.0):
        settings = {"prior_power": power}
        problem = problem_of(find("fedivon"), settings, personalise=2, fraction=0.2)
        each.append(scored(problem, tmp_path / str(power)))
    (free, one), (pulled, other) = each
    assert one.bits == other.bits
    assert free.common.nll.tolist() == pulled.common.nll.tolist()
    assert free.personal.nll.tolist() != pulled.personal.nll.tolist()


@pytest.mark.parametrize("algo", ["fedavgm", "ivon_admm", "fedlap_func", "scaffold"])
def test_every_kind_of_upload_has_the_local_weights(algo: str, tmp_path: Path) -> None:
    """An increment, a posterior, a message with an optional part, and a state of the client's."""
    problem = problem_of(find(algo), personalise=1, fraction=0.1)
    scores, _ = scored(problem, tmp_path / "run")
    assert scores.personal.scored.all()
    assert np.isfinite([x for x in scores.numbers().values() if x is not None]).all()
    again, _ = scored(problem, tmp_path / "again")
    assert scores.numbers() == again.numbers()


@pytest.mark.parametrize(
    ("algo", "changes", "reason"),
    [
        ("pooled", {}, "not federated"),
        ("mime", {}, "several exchanges"),
        ("bcm", {}, "no weights from which a client could start"),
        ("pvi", {}, "do not train in epochs"),
        ("fedpd", {}, "does not have the client's weights"),
        (
            "fedavgm",
            {"error_feedback": True, "codecs": {"up.delta": "topk:0.1"}},
            "what earlier ones have lost",
        ),
    ],
)
def test_what_has_no_model_per_client_is_refused(algo: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=f"--personalise: .*{reason}"):
        check_personalised(problem_of(find(algo), personalise=1, **changes))


def test_a_run_has_the_scores_in_its_summary_and_compare_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common: dict[str, Any] = {"clients": 3, "rounds": 1, "fraction": 0.1, "model": "logistic"}
    plain = fedsim.run(algo="fedavg", quiet=True, out=tmp_path / "plain", **common)
    run = fedsim.run(algo="fedavg", personalise=2, out=tmp_path / "run", **common)
    assert "personalised by 2 local epochs: mean accuracy" in capsys.readouterr().out
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["model_sha256"] == plain.summary["model_sha256"]
    assert set(PERSONAL_NUMBERS) <= summary.keys()
    assert len(summary["personalised"]["client_accuracies"]) == 3
    (row,) = Comparison.of([run.path], (), ()).to_json()["groups"]
    assert row["personal_accuracy_gain_mean"] == summary["personal_accuracy_gain"]
    assert run.lines[-1]["personal_accuracy_mean"] == summary["personal_accuracy_mean"]
