"""Tallies against scikit-learn and against sums by hand, whole and in parts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch import Tensor

from fedsim.data.arrays import ARRAY_RULES
from fedsim.experiment import Experiment, build_algorithm
from fedsim.learning.gaussian import Gaussian, Point
from fedsim.learning.likelihoods import LIKELIHOODS, Tally, added, likelihood
from fedsim.learning.score_names import CALIBRATION, EXTRA
from fedsim.problem import Problem
from protocols.fedavg import FedAvg

CLASSES = 12


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def outputs_and_targets(kind: str, n: int = 40) -> tuple[Tensor, Tensor]:
    g = draws(3)
    if kind == "categorical":
        return torch.randn(n, CLASSES, generator=g).double(), torch.randint(CLASSES, (n,), generator=g)
    if kind == "bernoulli":
        outputs = torch.randn(n, CLASSES, generator=g).double() - 1
        targets = (torch.rand(n, CLASSES, generator=g) < 0.15).to(torch.uint8)
        targets[:3] = 0  # examples without a tag
        targets[:, 4], outputs[:, 4] = 0, -1  # a tag that neither occurs nor is predicted
        return outputs, targets
    if kind == "token_classes":
        outputs = 3 * torch.randn(n, 7, CLASSES, generator=g).double()
        return outputs, torch.randint(-1, CLASSES, (n, 7), generator=g)
    return torch.randn(n, 3, generator=g).double(), torch.randn(n, 3, generator=g)


def measured(kind: str) -> dict[str, float | None]:
    measure = LIKELIHOODS[kind]
    return measure.numbers(measure.tally(*outputs_and_targets(kind)))


# ---- what holds for all


def test_every_likelihood_is_measured_and_checked() -> None:
    assert set(LIKELIHOODS) == set(ARRAY_RULES)
    assert all(key == created.name for key, created in LIKELIHOODS.items())
    extra = {k for kind in LIKELIHOODS for k in measured(kind)} - {"test_accuracy", "test_nll"}
    assert extra == {*CALIBRATION, *EXTRA}


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_the_nll_is_the_mean_loss(kind: str) -> None:
    outputs, targets = outputs_and_targets(kind)
    result = measured(kind)["test_nll"]
    assert result == pytest.approx(float(likelihood(kind).loss(outputs, targets)), rel=1e-12)


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_a_model_that_is_not_a_number_has_a_score(kind: str) -> None:
    measure = LIKELIHOODS[kind]
    outputs, targets = outputs_and_targets(kind)
    numbers = measure.numbers(measure.tally(torch.full_like(outputs, math.nan), targets))
    assert math.isnan(numbers["test_nll"] or 0.0)
    assert numbers["test_accuracy"] is None or 0 <= numbers["test_accuracy"] <= 1


def test_tallies_of_different_lengths_do_not_add() -> None:
    with pytest.raises(ValueError, match="zip"):
        added((1.0, 2.0), (1.0,))


# ---- one by one


def test_classes() -> None:
    outputs, targets = outputs_and_targets("categorical")
    result = measured("categorical")
    assert result["test_accuracy"] == reference.accuracy_score(targets, outputs.argmax(1))
    assert result["test_nll"] == pytest.approx(
        reference.log_loss(targets, outputs.softmax(1), labels=range(CLASSES)), rel=1e-12
    )


def test_tags_against_scikit_learn() -> None:
    outputs, targets = outputs_and_targets("bernoulli")
    y, predicted = targets.numpy(), (outputs.sigmoid() > 0.5).numpy().astype(int)
    result = measured("bernoulli")
    assert result["test_accuracy"] == pytest.approx((y == predicted).mean(), rel=1e-12)
    expected = {
        "precision": reference.precision_score(y, predicted, average="micro"),
        "micro_f1": reference.f1_score(y, predicted, average="micro"),
        # scikit-learn's zero_division=0 is our rule for a tag that neither occurs nor is predicted
        "macro_f1": reference.f1_score(y, predicted, average="macro", zero_division=0),
    }
    assert {k: result[k] for k in expected} == pytest.approx(expected, rel=1e-12)
    top = np.argsort(-outputs.numpy(), axis=1)[:, :5]
    hits = np.take_along_axis(y, top, axis=1).sum(axis=1)
    tagged = y.sum(axis=1) > 0
    assert 0 < (~tagged).sum() < len(y)
    assert result["recall_at_5"] == pytest.approx((hits[tagged] / y[tagged].sum(axis=1)).mean(), rel=1e-12)
    assert result["micro_recall_at_5"] == pytest.approx(hits.sum() / y.sum(), rel=1e-12)
    assert result["recall_at_5"] != pytest.approx(result["micro_recall_at_5"], rel=1e-3)


def test_tags_of_a_model_of_zeros_and_of_no_tags() -> None:
    """Equal outputs are ordered by class, so that recall does not depend on the machine."""
    measure = LIKELIHOODS["bernoulli"]
    targets = torch.zeros(4, CLASSES, dtype=torch.uint8)
    none = measure.numbers(measure.tally(torch.zeros(4, CLASSES).double(), targets))
    assert none["test_accuracy"] == 1.0 and none["recall_at_5"] is None and none["micro_recall_at_5"] is None
    assert (none["precision"], none["micro_f1"], none["macro_f1"]) == (0.0, 0.0, 0.0)
    targets[0, 4] = targets[1, 5] = 1
    some = measure.numbers(measure.tally(torch.zeros(4, CLASSES).double(), targets))
    assert some["recall_at_5"] == 0.5


def test_tokens_by_hand() -> None:
    """Five tokens of two rows have a target; three are right."""
    targets = torch.tensor([[3, 9, 11, -1], [8, 1, -1, -1]])
    predicted = torch.tensor([[3, 9, 11, 5], [1, 9, 2, 2]])
    outputs = torch.nn.functional.one_hot(predicted, CLASSES).double()
    measure = LIKELIHOODS["token_classes"]
    tally = measure.tally(outputs, targets)
    right, wrong = math.log(math.e + 11) - 1, math.log(math.e + 11)
    assert tally[:3] == pytest.approx((5.0, 3.0, 3 * right + 2 * wrong))
    result = measure.numbers(tally)
    assert result["test_accuracy"] == 3 / 5
    assert result["test_nll"] == pytest.approx((3 * right + 2 * wrong) / 5)
    empty = measure.numbers(measure.tally(outputs, torch.full_like(targets, -1)))
    assert empty == dict.fromkeys(("test_accuracy", "test_nll", *CALIBRATION))


def test_regression() -> None:
    outputs, targets = outputs_and_targets("gaussian")
    result = measured("gaussian")
    assert result["test_accuracy"] is None
    half = reference.mean_squared_error(targets, outputs) * targets.shape[1] / 2
    assert result["test_nll"] == pytest.approx(half, rel=1e-6)


# ---- in a problem, where outputs are computed a few rows at a time

SOURCE = """
import numpy as np
from torch import nn
from fedsim.data import Dataset

draws = np.random.RandomState(0)
words = draws.randint(0, 9, (90, 4))
following = np.where(words[:, ::-1] == 0, -1, words[:, ::-1])

def sentences():
    return Dataset("s", words.astype(np.int32), following, words[:70].astype(np.int32), following[:70], 9,
                   likelihood="token_classes")

class Table(nn.Embedding):
    def __init__(self, shape, classes): super().__init__(classes, classes)
    def forward(self, ids): return super().forward(ids.long())

def made(targets, classes, likelihood):
    x = draws.rand(90, 3).astype(np.float32)
    return Dataset("m", x, targets, x, targets, classes, likelihood=likelihood)

def tags(): return made((draws.rand(90, 6) < .3).astype(np.uint8), 6, "bernoulli")
def curve(): return made(draws.rand(90, 1).astype(np.float32), 1, "gaussian")
"""


@pytest.mark.parametrize(
    ("name", "kind", "model"),
    [
        ("sentences", "token_classes", "own.py:Table"),
        ("tags", "bernoulli", "mlp_small"),
        ("curve", "gaussian", "mlp_small"),
    ],
)
def test_a_problem_scores_in_pieces_what_is_right_as_a_whole(
    name: str, kind: str, model: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    experiment = Experiment(
        algo="fedavg",
        dataset=f"{path}:{name}",
        model=model.replace("own.py", str(path)),
        partition="iid",
        clients=2,
        eval_samples=4,
    )
    problem = Problem.build(experiment, build_algorithm(FedAvg, {}), None)
    assert problem.evaluation.measure is LIKELIHOODS[kind]
    assert problem.evaluation.samples == 0  # only classes have predictions to average
    score = problem.evaluation.score(Gaussian.at(problem.start, 4.0), 0, 1)
    assert score == problem.evaluation.score(Point(problem.start), 0, 1)
    assert score.ensemble == ()
    inputs = problem.read(torch.tensor(problem.dataset.test_inputs))
    outputs = problem.net.logits(problem.start, inputs).double()
    whole: Tally = problem.evaluation.measure.tally(outputs, torch.tensor(problem.dataset.test_targets))
    np.testing.assert_allclose(score.tally, whole, rtol=1e-5)
    assert problem.shard(0).targets.dtype == torch.tensor(problem.dataset.train_targets).dtype
