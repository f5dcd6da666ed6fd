"""--workers auto: cores, clients, GPUs and memory, whichever is least, and the line that says so."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fedsim.errors import UsageError
from fedsim.experiment import Experiment, build_algorithm
from fedsim.problem import Problem
from launch.configuration import worker_count
from launch.configuration.config import Overrides
from launch.configuration.execution import AUTO
from launch.configuration.worker_count import by_cores, by_memory, check_room, decide
from protocols import find
from tests.support.commands import fedsim


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Eight cores, and the control groups of tmp_path."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(worker_count, "GROUP", tmp_path)
    monkeypatch.setattr(worker_count, "OWN_GROUPS", tmp_path / "own")


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("threads", "clients", "gpus", "expected"),
    [
        (1, 10, 0, (8, "8 cores")),
        (3, 10, 0, (2, "8 cores with 3 threads a worker")),
        (16, 10, 0, (1, "8 cores with 16 threads a worker")),
        (1, 5, 0, (5, "5 clients")),
        (1, 8, 0, (8, "8 cores")),
        (1, 10, 2, (2, "2 GPUs")),
    ],
)
def test_the_least_of_cores_gpus_and_clients(
    threads: int, clients: int, gpus: int, expected: tuple[int, str]
) -> None:
    assert by_cores(threads, clients, gpus) == expected


V1 = {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"}


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/", {"cpu.max": "100000 100000"}, 1),
        ("0::/", {"cpu.max": "250000 100000"}, 3),
        ("0::/", {"cpu.max": "1000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "1600000 100000"}, 8),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2),
        ("0::/../../x", {"cpu.max": "200000 100000"}, 2),
        ("4:cpu,cpuacct:/docker/x", {f"cpu,cpuacct/{name}": text for name, text in V1.items()}, 2),
        ("4:cpu,cpuacct:/x", {f"cpu,cpuacct/x/{name}": text for name, text in V1.items()}, 2),
        ("4:cpu:/\n0::/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("3:cpuset:/\n2:memory:/", {f"cpu/{name}": text for name, text in V1.items()}, 2),
        ("", {"cpu.max": "nonsense"}, 8),
        ("", {"cpu.max": "300000 100000"}, 3),
    ],
)
def test_a_control_groups_quota_counts(
    own: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "own").write_text(f"{own}\n" if own else "")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    workers, why = by_cores(1, 100, 0)
    assert workers == expected
    assert ("with a CPU quota of" in why) == (expected < 8)


def problem(algo: str) -> Problem:
    experiment = Experiment(algo=algo, model="mlp_small", clients=4)
    return Problem.build(experiment, build_algorithm(find(algo), {}), None)


def test_memory_counts_vectors_and_the_state_of_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = 4 * problem("fedavg").net.layout.size
    monkeypatch.setattr(worker_count, "PROCESS_BYTES", 0)
    monkeypatch.setattr(worker_count, "available_memory", lambda: int(210 * vector / worker_count.SHARE))
    assert by_memory(problem("fedavg")) == 9  # ten processes, of which one is the coordinator
    assert by_memory(problem("fedlap_cov")) == 3  # its state has four vectors of float32
    monkeypatch.setattr(worker_count, "available_memory", lambda: 0)
    assert by_memory(problem("fedavg")) == 1


def test_the_line_names_what_is_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_count, "by_memory", lambda problem: 3)
    monkeypatch.setattr(worker_count, "available_memory", lambda: 5 * 2**30)
    p = problem("fedavg")
    assert decide(2, "2 cores", p) == (2, "workers auto: 2, for there are 2 cores")
    workers, line = decide(8, "8 cores", p)
    assert workers == 3
    assert "5 GiB of memory" in line
    assert "8 cores would allow 8" in line


def test_the_page_cache_of_a_control_group_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group with a limit of 64 MiB: 48 MiB are in use, of which 30 MiB are files that were read once."""
    monkeypatch.setattr(worker_count, "GROUP", tmp_path)
    machine = worker_count.available_memory()
    for name, text in (
        ("memory.max", f"{64 << 20}\n"),
        ("memory.current", f"{48 << 20}\n"),
        (
            "memory.stat",
            f"anon {10 << 20}\nfile {38 << 20}\ninactive_file {30 << 20}\nactive_file {8 << 20}\n",
        ),
    ):
        (tmp_path / name).write_text(text)
    assert worker_count.available_memory() == 46 << 20 < machine
    (tmp_path / "memory.max").write_text("max\n")
    assert worker_count.available_memory() > 46 << 20


def test_auto_is_a_word_and_its_number_is_refused() -> None:
    assert Overrides.of({"workers": "auto"}).resolve()[1].workers == AUTO
    with pytest.raises(UsageError, match="a number of at least 0, or auto"):
        Overrides.of({"workers": AUTO}).resolve()
    with pytest.raises(UsageError, match="this machine alone"):
        Overrides.of({"workers": "auto", "remote_workers": 1, "bind": "tcp://127.0.0.1:*"}).resolve()


@pytest.mark.process
def test_a_run_says_how_many_and_why(tmp_path: Path) -> None:
    options = ("--algo", "fedavg", "--clients", "4", "--rounds", "1", "--model", "logistic")
    done = fedsim("launch", "--workers", "auto", "--out", str(tmp_path / "run"), *options)
    expected, _ = by_cores(1, 4, 0)
    assert f"workers auto: {expected}, for there are" in done
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["execution"]["workers"] == expected
    assert "give a number of at least 0, or auto" in fedsim("launch", "--workers", "many", code=2)


def test_more_workers_than_clients_are_never_started(tmp_path: Path) -> None:
    """One line says so, and the manifest has the number that was started."""
    options = ("--algo", "fedavg", "--clients", "2", "--rounds", "1", "--model", "logistic")
    done = fedsim("launch", "--workers", "500", "--out", str(tmp_path / "run"), *options)
    assert "--workers 500: 2 are started, one for each of 2 clients\n" in done
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["execution"]["workers"] == 2
    again = fedsim("resume", str(tmp_path / "run"), "--rounds", "2", "--workers", "40")
    assert "--workers 40: 2 are started" in again


def test_more_workers_than_memory_allows_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker_count, "available_memory", lambda: 3 * worker_count.PROCESS_BYTES)
    check_room(3)
    with pytest.raises(UsageError, match=r"--workers 4: 0\.2 GiB of memory are available, .* 3 at most"):
        check_room(4)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("own", ["0::/a", "7:pids:/a"])
def test_more_workers_than_processes_are_allowed_are_refused(own: str, tmp_path: Path) -> None:
    (tmp_path / "own").write_text(f"{own}\n")
    group = tmp_path / ("pids/a" if "pids" in own else "a")
    group.mkdir(parents=True)
    (group / "pids.current").write_text("10\n")
    (group / "pids.max").write_text("max\n")
    check_room(3)
    (group / "pids.max").write_text("22\n")
    check_room(3)
    with pytest.raises(UsageError, match=r"pids.max of the control group\) is reached, .* 3 at most"):
        check_room(4)
