"""docs/adding-an-algorithm.md does what it says: its files run, cost what they say and pass the battery."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import fedsim
from fedsim.experiment import Experiment, build_algorithm
from fedsim.problem import Problem
from launch.cli import main
from protocols import find
from tests.support.commands import ran
from tests.support.harness import CLIENTS, Step, steps

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "adding-an-algorithm.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", GUIDE, re.DOTALL))
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide's files, in a folder away from the repository."""
    created = tmp_path_factory.mktemp("brought")
    for name, source in FILES.items():
        (created / name).write_text(source, encoding="utf-8")
    return created


def test_the_guide_has_algorithms_a_model_and_data() -> None:
    short = {"averages.py", "sites.py", "gaussians.py"}
    assert set(FILES) == short | {"variant.py", "mine.py", "dane.py", "net.py", "blobs.py"}
    assert GUIDE.count("```python") == len(FILES)


def test_the_guides_scaffold_is_the_registered_file() -> None:
    assert FILES["mine.py"] == (ROOT / "protocols" / "related" / "scaffold.py").read_text(encoding="utf-8")


@pytest.mark.process
def test_a_users_algorithm_model_and_data_run_and_cost_what_they_say(folder: Path) -> None:
    selected = "--algo mine.py:Scaffold --model net.py:Net --dataset blobs.py:blobs"
    job = f"launch --workers 2 --clients 3 --rounds 4 --set lr=0.1 --out run {selected}"
    done = ran([sys.executable, "-m", "launch", *job.split()], cwd=folder, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    header = done.stdout.splitlines()[:4]
    assert header[1].startswith("mine:Scaffold on blobs:blobs, 4 rounds")
    assert re.match(r"\d+ of 300 training examples, 90 test; 3 clients", header[2])
    assert header[3].startswith("model net:Net, P = 99; ")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["params"]) == ("done", 4, 99)
    assert summary["test_accuracy"] > 0.8
    traffic, vector = summary["bytes"]["algorithm"], 4 * 3 * 4 * summary["params"]  # rounds, clients, bytes
    assert {name: layers.get("values") for name, layers in traffic["down"].items() if name} == {
        "mean": vector,
        "control": vector,
    }
    assert traffic["up"]["mean"] == {"values": vector}
    experiment = json.loads((folder / "run" / "manifest.json").read_text())["experiment"]
    assert experiment["sources"] == {
        str(folder / name): sha256(FILES[name].encode()).hexdigest()
        for name in ("mine.py", "net.py", "blobs.py")
    }
    assert experiment["model"] == f"{folder}/net.py:Net"
    assert experiment["inputs"] == "scaled"
    with (folder / "run" / "ledger.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if (r["kind"], r["layer"]) == ("algorithm", "values")]
    assert {(r["message"], r["field"], r["dense_bytes"]) for r in rows} == {
        ("task", "mean", "396"),
        ("task", "control", "396"),
        ("upload", "mean", "396"),
        ("upload", "train_loss", "8"),
    }


@pytest.mark.process
def test_the_guides_variant_sends_what_describe_says_with_any_number_of_workers(folder: Path) -> None:
    spec = f"{folder}/variant.py:ShortSteps"
    text = CliRunner().invoke(main, ["describe", spec]).stdout
    assert "A variant of fedlap (Swaroop" in text
    assert re.search(r"^up +moved +scalar", text, re.MULTILINE)
    assert re.search(r"^factor +0.5", text, re.MULTILINE)
    models = []
    for workers in (0, 2):
        out = folder / f"variant{workers}"
        rest = ["--workers", str(workers), "--clients", "3", "--rounds", "2", "--set", "factor=0.8"]
        done = CliRunner().invoke(main, ["launch", "--algo", spec, *rest, "--out", str(out)])
        assert done.exit_code == 0, done.output
        models.append((out / "model.safetensors").read_bytes())
    assert models[0] == models[1]
    with (folder / "variant2" / "ledger.csv").open() as file:
        booked = {row["field"] for row in csv.DictReader(file) if row["message"] == "upload"}
    assert {"mean", "train_loss", "moved"} <= booked
    assert '"moved":' in (folder / "variant2" / "metrics.jsonl").read_text()


def battery(algorithm: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The battery on a user's algorithm, as the guide says it."""
    return ran(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_battery.py", *arguments],
        cwd=ROOT,
        env=ENVIRONMENT | {"FEDSIM_BATTERY": algorithm},
    )


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("averages.py:Average", "fedavg"),
        ("sites.py:Sites", "fedlap"),
        ("gaussians.py:Gaussians", "fedlap_cov"),
    ],
)
def test_the_guides_short_files_compute_what_ours_do(name: str, ours: str, folder: Path) -> None:
    """The same bits, with lost uploads, and the same bytes; ours carry Adam's moments over only if told."""
    job: dict[str, Any] = {"clients": 3, "rounds": 3, "model": "logistic", "participation": "0.7+lost:0.2"}
    runs = [fedsim.run(algo=f"{folder}/{name}", **job, quiet=True)]
    runs.append(fedsim.run(algo=ours, hyperparameters={"carry": False}, **job, quiet=True))
    assert len({run.summary["model_sha256"] for run in runs}) == 1
    assert len({run.summary["bytes_up"] for run in runs}) == 1


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine.py:Scaffold", "dane.py:FedDane", "gaussians.py:Gaussians"])
def test_a_users_algorithm_passes_the_battery(name: str, folder: Path) -> None:
    done = battery(f"{folder}/{name}")
    assert done.returncode == 0, done.stdout
    passed = re.search(r"^(\d+) passed in|^(\d+) passed, 1 skipped in", done.stdout, re.MULTILINE)
    assert passed is not None, done.stdout
    assert int(passed[1] or passed[2]) > 20


@pytest.mark.process
@pytest.mark.slow
def test_a_dual_step_that_forgets_decay_fails_the_battery(folder: Path) -> None:
    """The guide's SCAFFOLD once divided by lr in every round, where local training uses lr decay^(r-1)."""
    old = FILES["mine.py"].replace("self.local.in_round(at.round).lr", "self.local.lr")
    assert old != FILES["mine.py"]
    (folder / "old.py").write_text(old, encoding="utf-8")
    done = battery(f"{folder}/old.py:Scaffold", "-k", "decay")
    assert done.returncode == 1, done.stdout
    assert "client_commit ignores local.decay" in done.stdout
    assert re.search(r"^FAILED .*test_decay_means_a_learning_rate_per_round", done.stdout, re.MULTILINE)


def by_hand(folder: Path, name: str, **settings: Any) -> tuple[Problem, list[Step], list[Any]]:
    """Two rounds of a user's algorithm, method by method, with one full-batch step per local training."""
    spec = f"{folder}/{name}"
    settings = {"lr": 0.1, "epochs": 1, "batch_size": 10**6} | settings
    algorithm = build_algorithm(find(spec), settings)
    described = Experiment(algo=spec, model="logistic", clients=CLIENTS, rounds=2, hyperparameters=settings)
    problem = Problem.build(described, algorithm, None)
    created, servers, _ = steps(problem)
    return problem, created, servers


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_scaffolds_controls_are_the_clients_gradients(folder: Path, decay: float) -> None:
    """After one full-batch step, c_k is the gradient of the mean loss at x: y = x - eta (g_k - c_k + c)."""
    _, created, servers = by_hand(folder, "mine.py:Scaffold", decay=decay)
    for step in created:
        gradient = step.shard.gradient(step.down.mean).double() / step.shard.size
        # what is left is the rounding of y - x in float32, over eta
        assert float((step.committed.control - gradient).norm()) < 1e-4 * float(gradient.norm())
    controls = torch.stack([step.committed.control for step in created[-CLIENTS:]]).sum(0)
    assert torch.allclose(servers[-1].controls, controls, rtol=0, atol=1e-12)


def test_one_step_of_feddane_is_a_step_along_the_mean_gradient(folder: Path) -> None:
    """The correction makes every client's gradient at w that of the mean, and the proximal term has none."""
    problem, created, servers = by_hand(folder, "dane.py:FedDane", mu=3.0)
    assert [type(step.up).__name__ for step in created[: 2 * CLIENTS]] == CLIENTS * ["Answer"] + CLIENTS * [
        "Solved"
    ]
    gradients = [problem.shard(k).gradient(problem.start).double() / problem.sizes[k] for k in range(CLIENTS)]
    stepped = problem.start.double() - 0.1 * torch.stack(gradients).mean(0)
    assert torch.allclose(servers[2].mean, stepped, rtol=0, atol=1e-6)
    assert not torch.allclose(servers[2].mean, servers[0].mean, rtol=0, atol=1e-3)


@pytest.mark.process
def test_a_users_algorithm_of_two_exchanges_costs_what_it_says(folder: Path) -> None:
    job = "launch --algo dane.py:FedDane --model net.py:Net --dataset blobs.py:blobs --workers 2 --clients 3"
    done = ran(
        [sys.executable, "-m", "launch", *job.split(), "--rounds", "2", "--out", "dane"],
        cwd=folder,
        env=ENVIRONMENT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    vector = 2 * 3 * 4 * 99  # rounds, clients, bytes, P
    with (folder / "dane" / "ledger.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if (r["kind"], r["layer"]) == ("algorithm", "values")]
    costs = Counter[tuple[str, str, str]]()
    for row in rows:
        costs[row["exchange"], row["direction"], row["field"]] += int(row["bytes"])
    assert costs == {
        ("1", "down", "mean"): vector,
        ("1", "up", "gradient"): vector,
        ("2", "down", "mean"): vector,
        ("2", "down", "gradient"): vector,
        ("2", "up", "mean"): vector,
        ("2", "up", "train_loss"): 2 * 3 * 8,
    }


def test_describe_reads_a_users_file(folder: Path) -> None:
    done = CliRunner(catch_exceptions=False).invoke(main, ["describe", f"{folder}/mine.py:Scaffold"])
    assert done.exit_code == 0
    for word in ("Karimireddy", "gradient", "2P down, P up", "server_lr", "number > 0", "eta_g"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--algo nowhere.py:Mine", "--algo nowhere:Mine: there is no file /"),
        ("--algo mine.py", "say what in the file is meant"),
        ("--algo mine.py:Server", "no subclass of fedsim.algorithm.Algorithm"),
        ("--algo mine.py:Scaffold --set server_lr=-1", "server_lr = -1"),
        ("--algo mine.py:Scaffold --set optimiser=adam", "option II holds for plain SGD"),
        ("--algo broken.py:Mine", "importing it failed in line 2: NameError: name 'Algorithm'"),
        ("--model net.py:math", "is a module"),
        ("--model blobs.py:blobs", "calling it with shape (1, 8, 8) and 10 classes failed: TypeError"),
        ("--dataset blobs.py:blob", "did you mean 'blobs'"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "broken.py").write_text("\nclass Mine(Algorithm): pass\n")
    job = f"launch --workers 0 --out mistake {arguments}"
    done = CliRunner(catch_exceptions=False).invoke(main, job.split())
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert re.fullmatch(r"(run folder: .*\n.*\n)?", done.stdout)
    assert not (folder / "mistake").exists()
