"""docs/adding-an-algorithm.md does what it says: its files run, cost what they say and pass the battery."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.cli import main

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "adding-an-algorithm.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", GUIDE, re.DOTALL))
DEADLINE = 60.0
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide's files, in a folder away from the repository."""
    created = tmp_path_factory.mktemp("brought")
    for name, source in FILES.items():
        (created / name).write_text(source, encoding="utf-8")
    return created


def test_the_guide_has_an_algorithm_a_model_and_data() -> None:
    assert set(FILES) == {"mine.py", "net.py", "blobs.py"}
    assert GUIDE.count("```python") == 3


@pytest.mark.process
def test_a_users_algorithm_model_and_data_run_and_cost_what_they_say(folder: Path) -> None:
    selected = "--algo mine.py:Scaffold --model net.py:Net --dataset blobs.py:blobs"
    job = f"launch --workers 2 --clients 3 --rounds 4 --set lr=0.1 --out run {selected}"
    done = subprocess.run(
        [sys.executable, "-m", "launch", *job.split()],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        cwd=folder,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    header = done.stdout.splitlines()[:2]
    assert re.fullmatch(r"mine:Scaffold on blobs:blobs, \d+ of 300 training examples, 90 test", header[0])
    assert header[1].startswith("model net:Net, P = 99; 3 clients")
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
        str(folder / name): sha256(source.encode()).hexdigest() for name, source in FILES.items()
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
def test_a_users_algorithm_passes_the_battery(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_battery.py"],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        cwd=ROOT,
        env=ENVIRONMENT | {"FEDSIM_BATTERY": f"{folder}/mine.py:Scaffold"},
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"^(\d+) passed in", done.stdout, re.MULTILINE)
    assert passed is not None, done.stdout
    assert int(passed[1]) > 20


def test_describe_reads_a_users_file(folder: Path) -> None:
    done = CliRunner(catch_exceptions=False).invoke(main, ["describe", f"{folder}/mine.py:Scaffold"])
    assert done.exit_code == 0
    for word in ("Karimireddy", "gradient", "2P down, P up", "server_lr", "number > 0"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--algo nowhere.py:Mine", "--algo nowhere:Mine: there is no file /"),
        ("--algo mine.py", "say what in the file is meant"),
        ("--algo mine.py:Scafold", "did you mean 'Scaffold'"),
        ("--algo mine.py:Server", "no subclass of fedsim.algorithm.Algorithm"),
        ("--algo mine.py:Scaffold --set server_lr=-1", "server_lr = -1"),
        ("--algo mine.py:Scaffold --set optimiser=adam", "option II holds for plain SGD"),
        (
            "--algo broken.py:Mine",
            "importing it failed in line 2: NameError: name 'Algorithm'",
        ),
        ("--model net.py:math", "is a module"),
        ("--model net.py:Nets", "did you mean 'Net'"),
        ("--model blobs.py:blobs", "calling it with shape (1, 8, 8) and 10 classes failed: TypeError"),
        ("--dataset blobs.py:blob", "did you mean 'blobs'"),
        ("--dataset net.py:Net", "calling it failed: TypeError"),
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
    assert done.stdout == ""
    assert not (folder / "mistake").exists()
