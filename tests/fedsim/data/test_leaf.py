"""LEAF's JSON: users' rows, what is refused, and scores of clients on their own test rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedsim
from fedsim.data.datasets import Dataset, load_dataset
from fedsim.errors import DataError, FedsimError, UsageError
from fedsim.experiment import Experiment
from fedsim.problem import Problem
from protocols import find


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def written(name: str, rows: dict[str, tuple[list[Any], list[Any]]], **more: Any) -> None:
    """Write the rows x and y of users."""
    path = Path(f"d/{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(rows),
        "num_samples": [len(y) for _, y in rows.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in rows.items()},
    }
    path.write_text(json.dumps(content | more))


def rows_of(labels: list[Any], start: float = 0) -> tuple[list[Any], list[Any]]:
    """Rows of four numbers from `start`, with these labels."""
    return [[start + i / 4, 0.0, 1.0, 2.0] for i in range(len(labels))], labels


def test_users_of_all_files_are_centres_in_the_order_of_their_names() -> None:
    written("train/b", {"u10": rows_of([0, 1], 10), "u2": rows_of([2], 2)}, hierarchies=["x", "y"])
    written("train/a", {"u1": rows_of([1, 1, 0], 1), "gone": ([], [])})
    written("test/a", {"u2": rows_of([0, 1], 2), "stranger": rows_of([2], 7), "u1": rows_of([1], 1)})
    dataset = load_dataset("leaf:d")
    assert dataset.train_inputs[:, 0].tolist() == [1, 1.25, 1.5, 10, 10.25, 2]
    assert dataset.train_targets.tolist() == [1, 1, 0, 0, 1, 2]
    assert dataset.centres is not None and dataset.centres.tolist() == [0, 0, 0, 1, 1, 2]
    assert dataset.test_inputs[:, 0].tolist() == [7, 1, 2, 2.25]
    assert dataset.test_centres is not None and dataset.test_centres.tolist() == [-1, 0, 2, 2]
    assert (dataset.classes, dataset.train_inputs.dtype) == (3, np.float32)
    images = load_dataset("leaf:d,shape=1x2x2,classes=5", Path())
    assert (images.train_inputs.shape, images.classes) == ((6, 1, 2, 2), 5)


def test_one_file_for_each_part_and_names_as_labels() -> None:
    written("train", {"a": rows_of(["no", "yes"])})
    written("test", {"a": rows_of(["yes"])})
    assert load_dataset("leaf:d").test_targets.tolist() == [1]


@pytest.mark.parametrize(
    ("rows", "more", "words"),
    [
        ({"a": ([[1, 2], [3]], [0, 1])}, {}, "x of user a of train is no lists of numbers of one shape"),
        ({"a": (["to be", "or"], [0, 1])}, {}, "x of user a of train is text; an input is a list of numbers"),
        ({"a": ([1, 2], [0, 1])}, {}, "x of user a of train is no lists of numbers of one shape"),
        ({"a": ([[1, None]], [0])}, {}, "x of user a of train is no lists of numbers of one shape"),
        ({"a": ([[2**24 + 1, 0]], [0])}, {}, "user a of train has whole numbers that float32 rounds"),
        ({"a": rows_of([0]), "b": ([[1, 2]], [1])}, {}, "x of user b of train has the shape (2,), not (4,)"),
        ({"a": rows_of([0, None])}, {}, "row 1 of user a (counted from 0), column y has no value"),
        ({"a": rows_of([0, [1]])}, {}, "column y has other things in train, numbers in test"),
        ({"a": (rows_of([0])[0], [0, 1])}, {}, "user a of train has 1 x, 2 y and num_samples 2"),
        ({"a": rows_of([0])}, {"num_samples": [3]}, "user a of train has 1 x, 1 y and num_samples 3"),
        ({"a": rows_of([0])}, {"num_samples": []}, "has 1 users, and num_samples of 0"),
        ({"a": rows_of([0])}, {"users": ["b"]}, "user b has no user_data"),
        ({"a": rows_of([0])}, {"users": ["a", "a"], "num_samples": [1, 1]}, "user a is given twice"),
        (
            {"a": rows_of([0])},
            {"users": [], "num_samples": []},
            "has user_data of a, who is not in its users",
        ),
        ({"a": rows_of([0])}, {"users": 3}, "is no file of LEAF: Expected `array`, got `int` - at `$.users`"),
        ({"a": ([], [])}, {}, "no user has train rows"),
        ({"a": rows_of([0, 2])}, {}, "column y of test has classes that train has not: 1"),
    ],
)
def test_what_leaf_files_must_not_have(rows: dict[str, Any], more: dict[str, Any], words: str) -> None:
    written("train/a", rows, **more)
    written("test/a", {"a": rows_of([1])})
    with pytest.raises(DataError) as caught:
        load_dataset("leaf:d")
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("leaf:none", "none does not exist; relative folders lie in --data-dir"),
        ("leaf:d", "d/test.json does not exist; it needs the folders train and test, or train.json and test"),
        ("leaf:", "write leaf:FOLDER[,KEY=VALUE,...], where KEY is one of shape, classes"),
        ("leaf:d,shape=2x", "write leaf:FOLDER"),
        ("leaf:d,label=y", "unknown key of data set 'leaf:d,label=y': 'label'"),
        ("leaf:e", "e/train has no files .json"),
        ("leaf:f", "f/train.json is no file of LEAF: Input data was truncated"),
    ],
)
def test_folders_that_are_refused(spec: str, words: str) -> None:
    written("train/a", {"a": rows_of([0])})
    Path("e/train").mkdir(parents=True)
    Path("f").mkdir()
    for part in ("train", "test"):
        Path(f"f/{part}.json").write_text("{")
    with pytest.raises(FedsimError) as caught:
        load_dataset(spec)
    assert words in str(caught.value)


def separate(test_user: str = "a") -> None:
    """Users a and b, whose rows differ in the first number and in how it gives the class."""
    draws = np.random.default_rng(0)
    parts: dict[str, dict[str, Any]] = {"train": {}, "test": {}}
    for part, count in (("train", 40), ("test", 7)):
        for user, sign in (("a" if part == "train" else test_user, 1), ("b", -1)):
            x = draws.normal(size=(count + ord(user) % 3, 4))
            y = (x[:, 0] * sign > 0).astype(int).tolist()
            parts[part][user] = (x.tolist(), y)
        written(f"{part}/x", parts[part])


def test_clients_are_scored_on_their_own_test_rows(tmp_path: Path) -> None:
    separate()
    run = fedsim.run(
        algo="fedavg",
        dataset=f"leaf:{Path('d').resolve()}",
        model="logistic_bias",
        partition="natural",
        clients=2,
        rounds=1,
        quiet=True,
        out=tmp_path / "run",
    )
    assert run.manifest["experiment"]["client_scores"] == "own test rows"
    dataset, weights = load_dataset("leaf:d"), run.model()
    with torch.no_grad():
        outputs = weights(torch.from_numpy(np.array(dataset.test_inputs))).numpy()
    right = outputs.argmax(axis=1) == dataset.test_targets
    expected = [right[dataset.test_centres == k].mean() for k in (0, 1)]
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["client_accuracies"] == pytest.approx(expected, abs=1e-6)
    assert last["client_accuracy_worst"] == min(expected) != max(expected)


def problem(partition: str, **changes: Any) -> Problem:
    named = {"algo": "fedavg", "dataset": "leaf:d", "partition": partition, "model": "logistic", **changes}
    return Problem.build(Experiment(**named), find(named["algo"])(), None)


def test_whose_test_rows_are_whose_follows_the_partition() -> None:
    separate()
    natural = problem("natural", clients=2)
    tested = load_dataset("leaf:d").test_centres
    assert natural.test_clients is not None and tested is not None
    np.testing.assert_array_equal(natural.test_clients, tested)
    alone = problem("natural+least:42", clients=1)  # b, who has more rows
    assert alone.test_clients is not None
    np.testing.assert_array_equal(alone.test_clients, np.where(tested == 1, 0, -1))
    assert problem("iid", clients=2).test_clients is None
    pooled = problem("natural", clients=2, algo="pooled")
    np.testing.assert_array_equal(pooled.test_clients, tested)
    held = problem("natural", clients=2, evaluate_on="fold:1/4")
    assert held.test_clients is not None and set(held.test_clients.tolist()) == {0, 1}
    assert natural.data_digest != problem("iid", clients=2).data_digest


def test_test_users_without_training_rows_leave_scores_by_class() -> None:
    separate(test_user="c")
    mixed = problem("natural", clients=1)
    assert mixed.test_clients is None  # b is not among the clients
    assert mixed.client_scoring is mixed.label_shares is not None


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
