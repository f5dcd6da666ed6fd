"""The files in docs/examples do what they say, with data of a few rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fedsim

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_leaf_has_a_client_for_each_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = {"u10": [3, 61], "u2": [0], "gone": []}
    for part, of_part in (("train", users), ("test", users | {"gone": [1]})):
        rows = {user: {"x": [[y / 62] * 784 for y in ys], "y": ys} for user, ys in of_part.items()}
        counts = [len(ys) for ys in of_part.values()]
        (tmp_path / part).mkdir()
        (tmp_path / part / "all.json").write_text(
            json.dumps({"users": list(rows), "num_samples": counts, "user_data": rows})
        )
    monkeypatch.setenv("LEAF", str(tmp_path))
    run = fedsim.run(
        algo="fedavg",
        dataset=f"{EXAMPLES}/leaf.py:femnist",
        model="logistic",
        partition="natural",
        clients=2,
        rounds=1,
        quiet=True,
        out=tmp_path / "run",
    )
    experiment = run.manifest["experiment"]
    assert (experiment["client_sizes"], experiment["client_scores"]) == ([2, 1], "own test rows")
    assert run.summary["params"] == 784 * 62


def test_label_noise_is_a_share_of_the_training_labels() -> None:
    right, some = (fedsim.load_dataset(name) for name in ("digits", f"{EXAMPLES}/label_noise.py:digits_20"))
    wrong = right.train_targets != some.train_targets
    assert wrong.sum() == round(0.2 * len(wrong))
    assert set(some.train_targets[wrong].tolist()) == set(range(10))
    np.testing.assert_array_equal(right.test_targets, some.test_targets)
