"""A model or a number that was changed after its run is refused, by name of the file, wherever it is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.errors import FedsimError
from tests.support.kept_runs import command, flip, kept_run

ALGORITHMS: dict[str, dict[str, Any]] = {
    "a point": {"algo": "fedavg"},
    "a diagonal": {"algo": "fedlap_cov"},
    "a matrix": {"algo": "bayes_admm", "hyperparameters": {"covariance": "full"}},
    "samples": {"algo": "fald"},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_changed_model_is_neither_loaded_nor_started_from(name: str, tmp_path: Path) -> None:
    run = kept_run(tmp_path / "run", **ALGORITHMS[name])
    start = f"logistic+weights:{run / 'model.safetensors'}"
    loaded = fedsim.open(run).model()
    fedsim.run(algo="fedavg", model=start, clients=2, rounds=1, quiet=True)
    flip(run / "model.safetensors", 0.99)
    with pytest.raises(FedsimError, match=r"model.safetensors was changed.*[Rr]estore the original"):
        fedsim.open(run).model()
    with pytest.raises(FedsimError, match=r"model.safetensors: the file was changed.*Restore the original"):
        fedsim.run(algo="fedavg", model=start, clients=2, rounds=1, quiet=True)
    assert loaded.training is False


CHANGES: dict[str, Any] = {
    "test_accuracy": lambda value: value + 0.01,
    "test_brier": lambda value: None,
    "bytes_up": lambda value: value - 1,
    "reached": lambda value: 1 if value != 1 else 2,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept_run(tmp_path_factory.mktemp("changed") / "run", algo="fedavg", until=0.99)


@pytest.mark.parametrize("key", CHANGES)
def test_a_changed_number_of_the_summary_is_named(key: str, whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    for name in ("verify", "report", "compare"):
        assert command(name, run).code == 0
    summary = json.loads((run / "summary.json").read_text())
    summary[key] = CHANGES[key](summary[key])
    (run / "summary.json").write_text(json.dumps(summary))
    for name in ("verify", "report", "compare", "card"):
        done = command(name, run)
        assert done.code == 2 and f"summary.json was changed: its {key} is" in done.err.replace("\n", " "), (
            done
        )


def test_a_changed_file_has_one_exit_code(whole: Path, tmp_path: Path) -> None:
    readers = {"ledger.csv": ("verify", "report", "ledger"), "metrics.jsonl": ("verify", "report")}
    for file, names in readers.items():
        run = Path(shutil.copytree(whole, tmp_path / file))
        flip(run / file)
        assert [command(name, run).code for name in names] == [2] * len(names)
