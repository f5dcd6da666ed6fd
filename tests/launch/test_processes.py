"""Real processes: what a user's shell sees, also when something dies."""

from __future__ import annotations

import csv
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from fedsim.wire.ledger_rows import COLUMNS
from tests.support.commands import DEADLINE, fedsim, ran
from tests.support.process_tree import alive
from tests.support.reproducible import without_seconds
from workers.storage.journal import read_journal

pytestmark = pytest.mark.process

CONTRACT = (
    *("manifest.json", "metrics.jsonl", "ledger.csv", "summary.json", "processes.json"),
    "model.safetensors",
)


def command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "launch", "launch", "--out", str(out), *arguments]


def run(out: Path, *arguments: str, code: int = 0) -> str:
    """What a command printed that ended with this code."""
    return fedsim("launch", "--out", str(out), *arguments, code=code)


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def until(condition: Callable[[], Any]) -> Any:
    """Wait for a condition on another process, with a deadline."""
    deadline = time.monotonic() + DEADLINE
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


def rounds_done(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def pids(out: Path, role: str | None = None) -> list[int]:
    return [p["pid"] for p in load(out / "processes.json") if role in (None, p["role"])]


def algorithm_rows(out: Path) -> list[tuple[str, ...]]:
    with (out / "ledger.csv").open() as file:
        rows = list(csv.DictReader(file))
    return sorted(
        tuple(v for k, v in row.items() if k != "worker") for row in rows if row["kind"] == "algorithm"
    )


def reproducible(metrics: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return without_seconds(lines)


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("in-process") / "run"
    run(out, "--workers", "0", "--rounds", "3", "--participation", "7")
    return out


@pytest.mark.parametrize(("workers", "transport"), [(1, "ipc"), (10, "ipc"), (3, "tcp")], ids=str)
def test_same_bits_whatever_the_processes(
    workers: int, transport: str, in_process: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run(
        out,
        *("--workers", str(workers), "--clients", "10", "--rounds", "3"),
        *("--participation", "7", "--transport", transport),
    )
    ours, theirs = load(out / "summary.json"), load(in_process / "summary.json")
    for key in ("model_sha256", "clients_sha256", "test_accuracy", "test_nll", "bytes_down", "bytes_up"):
        assert ours[key] == theirs[key], key
    assert algorithm_rows(out) == algorithm_rows(in_process)
    assert reproducible(out / "metrics.jsonl") == reproducible(in_process / "metrics.jsonl")
    until(lambda: not any(alive(pid) for pid in pids(out)))


def test_a_run_leaves_the_files_of_the_contract(tmp_path: Path) -> None:
    out = tmp_path / "run"
    output = run(out, "--workers", "2", "--rounds", "5", "--eval-every", "2", "--participation", "1")
    assert "accuracy" in output
    assert "per client and round" in output
    for name in CONTRACT:
        assert (out / name).is_file(), name
    summary = load(out / "summary.json")
    assert (summary["format"], summary["status"], summary["rounds"]) == (1, "done", 5)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [m["round"] for m in metrics] == [0, 2, 4, 5]
    assert all(len(m["participants"]) == 1 for m in metrics[1:])
    assert summary["test_accuracy"] == metrics[-1]["test_accuracy"]
    with (out / "ledger.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    for direction in ("down", "up"):
        total = sum(int(r["bytes"]) for r in rows if (r["kind"], r["direction"]) == ("algorithm", direction))
        assert total == summary[f"bytes_{direction}"]
    everything = sum(
        n
        for sides in summary["bytes"].values()
        for fields in sides.values()
        for layers in fields.values()
        for n in layers.values()
    )
    assert everything == sum(int(r["bytes"]) for r in rows)
    model = load_file(out / "model.safetensors")
    assert sum(v.size for k, v in model.items() if not k.startswith("precision.")) == summary["params"]
    assert (model["precision.fc1.weight"] > 0).all()
    processes = load(out / "processes.json")
    assert [p["role"] for p in processes] == ["coordinator", "forkserver", "worker", "worker"]
    assert all(p["ended"] for p in processes)
    journal = read_journal(out / "journal")
    assert [r["round"] for r in journal if r["what"] == "commit"] == [1, 2, 3, 4, 5]
    assert len([r for r in journal if r["what"] == "upload"]) == 5
    manifest = load(out / "manifest.json")
    assert manifest["experiment"]["hyperparameters"]["rho"] == "1/|S|"
    assert manifest["execution"]["workers"] == 2
    assert sorted(p.name for p in (out / "checkpoints").iterdir())[-3:] == [
        f"{r:06d}.checkpoint" for r in (3, 4, 5)
    ]


@pytest.fixture
def endless(tmp_path: Path) -> Any:
    """A run that would go on for hours, past its third round; killed afterwards if need be."""
    out = tmp_path / "run"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        command(out, "--workers", "3", "--rounds", "100000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
        start_new_session=True,
    )
    until(lambda: rounds_done(out) > 3)
    yield process, out, temporary
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_signal_stops_everything(endless: Any, number: signal.Signals) -> None:
    process, out, temporary = endless
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, stderr = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert "interrupted after round" in stderr
    assert "Traceback" not in stderr
    assert load(out / "summary.json")["status"] == "interrupted"
    assert not any(alive(pid) for pid in pids(out))
    assert not list(temporary.iterdir())  # no socket folder


def test_nobody_outlives_a_killed_coordinator(endless: Any) -> None:
    process, out, _ = endless
    stopped = pids(out, "worker")[0]
    os.kill(stopped, signal.SIGSTOP)
    process.kill()
    process.communicate()
    until(lambda: not any(alive(pid) for pid in pids(out)))


FAULTY = '''
from dataclasses import dataclass
from typing import ClassVar
from protocols.fedavg import FedAvg

@dataclass(frozen=True)
class Faulty(FedAvg):
    """FedAvg that cannot train client 2 in round 2."""
    name: ClassVar[str] = "faulty"

    def client_update(self, client, down, shard, task):
        if (task.round, task.client) == (2, 2):
            print("about to divide")
            1 / 0
        return super().client_update(client, down, shard, task)
'''


def test_an_exception_in_client_code_names_worker_client_and_round(tmp_path: Path) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY)
    output = run(tmp_path / "run", "--workers", "3", "--algo", f"{file}:Faulty", code=1)
    assert "failed on client 2 in round 2" in output
    line = 1 + FAULTY[: FAULTY.index("1 / 0")].count("\n")
    expected = f"faulty:Faulty: client_update of client 2 in round 2 failed in line {line}: ZeroDivisionError"
    assert expected in output
    assert "Traceback" not in output
    assert load(tmp_path / "run" / "summary.json")["status"] == "failed"


def test_a_hung_fold_ends_the_run_after_its_patience(tmp_path: Path) -> None:
    file = tmp_path / "hangs.py"
    sleeps = "    def server_update(self, *arguments):\n        import time\n\n        time.sleep(3)\n"
    file.write_text(FAULTY[: FAULTY.index("    def client_update")] + sleeps)
    output = run(tmp_path / "run", "--workers", "1", "--algo", f"{file}:Faulty", "--patience", "1", code=1)
    assert "nothing has happened for 1 s in round 1" in output
    assert "the fold hangs" in output
    assert "Traceback" not in output


def test_a_full_disk_is_said_so_and_loses_nothing(tmp_path: Path) -> None:
    """Files of at most 60 kB: the ledger grows too long."""
    out, limit = tmp_path / "run", (60_000, 60_000)
    done = ran(
        command(out, *["--workers", "2", "--rounds", "2000", "--algo", "fedavg", "--model", "logistic"]),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 5
    assert "ledger.csv" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert load(out / "summary.json")["status"] == "failed"
    assert not list(tmp_path.glob("fedsim-*"))
