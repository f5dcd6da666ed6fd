"""The four tasks of the FedPA paper from file to metrics, on small files and through the real launcher.

Real models, so few clients, examples and rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.experiment import Experiment
from launch.configuration.execution import Execution
from launch.session.run import launch
from tests.fedsim.data.federated_files import many_posts, write_cifar100, write_emnist, write_stackoverflow
from tests.support.commands import DEADLINE, over
from tests.support.reproducible import without_seconds

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", autouse=True)
def _numerics() -> Iterator[None]:
    """A launch in this process changes torch's settings, which other tests must not feel."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federated")
    write_emnist(folder, clients=3, rows=12, classes=4)
    write_cifar100(folder, clients=3, rows=4)
    write_stackoverflow(folder, many_posts(3, 12), many_posts(2, 9))
    return folder


FEDPA = {"burn_in_rounds": 1, "burn_in": 1, "steps_per_sample": 1, "samples": 2, "batch_size": 6}
FEDAVGM = {"epochs": 1, "batch_size": 6}


@pytest.mark.parametrize(
    ("dataset", "model", "algo", "settings", "params"),
    [
        ("emnist62", "cnn_emnist", "fedpa", FEDPA | {"lr": 0.05}, 1_206_590),
        pytest.param(
            *("cifar100_lda", "resnet18_gn", "fedavgm", FEDAVGM | {"lr": 0.01}, 11_227_812),
            marks=pytest.mark.slow,
        ),
        ("stackoverflow_nwp", "lstm", "fedpa", FEDPA | {"lr": 0.1}, 4_050_748),
        ("stackoverflow_lr:2", "logistic_bias", "fedavgm", FEDAVGM | {"lr": 10.0}, 5_000_500),
    ],
)
def test_a_task_runs_from_its_files_to_its_metrics(
    dataset: str, model: str, algo: str, settings: dict[str, Any], params: int, files: Path, tmp_path: Path
) -> None:
    experiment = Experiment(
        algo=algo,
        dataset=dataset,
        model=model,
        partition="natural",
        clients=2,
        rounds=2,
        hyperparameters=settings,
    )
    execution = Execution(workers=0, devices="cpu", data_dir=str(files), out=str(tmp_path / "run"))
    folder = launch(experiment, execution, quiet=True)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["params"]) == ("done", params)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2]
    assert all(0 <= line["test_accuracy"] <= 1 and line["test_nll"] >= 0 for line in lines)
    assert not any(key.startswith("ensemble") for key in lines[-1])
    if dataset.startswith("stackoverflow"):  # sentences that repeat one word, posts about their word
        assert lines[-1]["test_nll"] < lines[0]["test_nll"]
    tags = {"recall_at_5", "micro_recall_at_5", "precision", "micro_f1", "macro_f1"}
    assert set(summary) & tags == (tags if dataset.startswith("stackoverflow_lr") else set())
    if dataset.startswith("stackoverflow_lr"):
        assert lines[-1]["recall_at_5"] == summary["recall_at_5"] > 0.5


@pytest.mark.process
def test_two_worker_processes_and_none_give_the_same_bits(files: Path, tmp_path: Path) -> None:
    """The word model: what a worker is sent and sends back, its warm-up and its scores."""
    result = []
    for workers in (2, 0):
        job = (
            f"launch --workers {workers} --out run{workers} --data-dir {files} --dataset stackoverflow_nwp:2 "
            "--model lstm --clients 2 --partition natural --rounds 1 --algo fedavgm "
            "--set epochs=1 --set lr=0.1"
        )
        done = subprocess.run(
            [sys.executable, "-m", "launch", *job.split()],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        lines = (tmp_path / f"run{workers}" / "metrics.jsonl").read_text().splitlines()
        parsed = [json.loads(line) for line in lines]
        result.append(without_seconds(parsed))
    assert result[0] == result[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--dataset emnist62 --model cnn_emnist --clients 4", "there are 3: at most 3 clients, not 4"),
        ("--dataset stackoverflow_nwp --clients 2", "'mlp_small' has one row of outputs per example"),
        ("--dataset stackoverflow_lr --clients 2 --model lstm", "'lstm' has outputs at every place"),
        (
            "--dataset stackoverflow_lr --clients 2 --model logistic --partition two_dirichlet",
            "are not classes",
        ),
        (
            "--dataset stackoverflow_lr:x --clients 2",
            "or just stackoverflow_lr, the number of clients to read",
        ),
        ("--dataset emnist62 --clients 2 --partition pachinko", "for 'cifar100' (100 fine classes)"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: str, words: str, files: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from launch.cli import main

    job = f"launch --workers 0 --algo fedavg --model mlp_small --partition natural {arguments}"
    job += f" --data-dir {files} --out {tmp_path / 'run'}"
    done = CliRunner(catch_exceptions=False).invoke(main, over(*job.split()))
    assert done.exit_code == 2
    assert words in done.stderr and len(done.stderr.splitlines()) == 1
