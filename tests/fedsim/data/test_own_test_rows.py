"""Clients' own test rows: which they are for a partition, and the scores on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedsim
from fedsim.data.datasets import Dataset, load_dataset
from fedsim.errors import DataError, UsageError
from fedsim.experiment import Experiment
from fedsim.problem import Problem
from protocols import find

SPEC = "train.csv,label=y,client=user,test=test.csv"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def separate(test_user: str = "a") -> None:
    """Users a and b, whose rows differ in the first number and in how it gives the class."""
    draws = np.random.default_rng(0)
    for part, count in (("train", 40), ("test", 7)):
        lines = ["p,q,r,s,y,user"]
        for user, sign in (("a" if part == "train" else test_user, 1), ("b", -1)):
            for row in draws.normal(size=(count + ord(user) % 3, 4)):
                lines.append(",".join(map(repr, row.tolist())) + f",{int(row[0] * sign > 0)},{user}")
        Path(f"{part}.csv").write_text("\n".join(lines) + "\n")


def test_clients_are_scored_on_their_own_test_rows(tmp_path: Path) -> None:
    separate()
    run = fedsim.run(
        algo="fedavg",
        dataset=f"{tmp_path}/{SPEC}",
        model="logistic_bias",
        partition="natural",
        clients=2,
        rounds=1,
        quiet=True,
        out=tmp_path / "run",
    )
    assert run.manifest["experiment"]["client_scores"] == "own test rows"
    dataset, weights = load_dataset(SPEC), run.model()
    with torch.no_grad():
        outputs = weights(torch.from_numpy(np.array(dataset.test_inputs))).numpy()
    right = outputs.argmax(axis=1) == dataset.test_targets
    expected = [right[dataset.test_centres == k].mean() for k in (0, 1)]
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["client_accuracies"] == pytest.approx(expected, abs=1e-6)
    assert last["client_accuracy_worst"] == min(expected) != max(expected)


def problem(partition: str, **changes: Any) -> Problem:
    named = {"algo": "fedavg", "dataset": SPEC, "partition": partition, "model": "logistic", **changes}
    return Problem.build(Experiment(**named), find(named["algo"])(), None)


def test_whose_test_rows_are_whose_follows_the_partition() -> None:
    separate()
    natural = problem("natural", clients=2)
    tested = load_dataset(SPEC).test_centres
    assert natural.evaluation.test_clients is not None and tested is not None
    np.testing.assert_array_equal(natural.evaluation.test_clients, tested)
    alone = problem("natural+least:42", clients=1)  # b, who has more rows
    assert alone.evaluation.test_clients is not None
    np.testing.assert_array_equal(alone.evaluation.test_clients, np.where(tested == 1, 0, -1))
    assert problem("iid", clients=2).evaluation.test_clients is None
    pooled = problem("natural", clients=2, algo="pooled")
    np.testing.assert_array_equal(pooled.evaluation.test_clients, tested)
    held = problem("natural", clients=2, evaluate_on="fold:1/4")
    assert held.evaluation.test_clients is not None and set(held.evaluation.test_clients.tolist()) == {0, 1}
    assert natural.data_digest != problem("iid", clients=2).data_digest


def test_test_users_without_training_rows_leave_scores_by_class() -> None:
    separate(test_user="c")
    mixed = problem("natural", clients=1)
    assert mixed.evaluation.test_clients is None  # b is not among the clients
    assert mixed.evaluation.client_scoring is mixed.evaluation.label_shares is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"centres": None}, "there are no centres"),
        ({"test_centres": np.zeros(3, np.int64)}, "3 test_centres but 2 test rows"),
        ({"test_centres": np.array([0, 2])}, "test_centres reach from 0 to 2; the centres are 0 to 1"),
        ({"test_centres": np.array([0.0, 1.0])}, "test_centres must be int64, not float64"),
    ],
)
def test_clients_of_test_rows_fit_a_users_data_set(changes: dict[str, Any], words: str) -> None:
    x, y = np.zeros((2, 1), np.float32), np.arange(2)
    values = {"centres": np.arange(2), "test_centres": np.arange(2), **changes}
    with pytest.raises((DataError, UsageError)) as caught:
        fedsim.run(dataset=lambda: Dataset("mine", x, y, x, y, 2, **values), quiet=True)
    assert words in str(caught.value)
