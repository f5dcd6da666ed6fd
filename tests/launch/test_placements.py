"""The GPU, or the cores, of each worker; tested without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from fedsim.errors import UsageError
from fedsim.experiment import Experiment
from launch.configuration import worker_count
from launch.configuration.config import Overrides
from launch.configuration.execution import AUTO, Execution
from launch.configuration.worker_count import lanes_of
from launch.session.run import launch
from protocols import find
from tests.support.harness import problem_of
from workers import devices
from workers.devices import assign_devices

UUIDS = ("GPU-aa11-1", "GPU-aa22-2", "GPU-bb33-3")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes a machine with so many GPUs of this one, as /dev and the driver show them."""

    def created(gpus: int) -> None:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev" / "nvidiactl").touch()
        for i in range(gpus):
            (tmp_path / "dev" / f"nvidia{i}").touch()
            information = tmp_path / "proc/driver/nvidia/gpus" / f"0000:{i:02}:00.0" / "information"
            information.parent.mkdir(parents=True)
            information.write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t {UUIDS[i % 3]}\n")
        monkeypatch.setattr(devices, "ROOT", tmp_path)
        monkeypatch.setattr(devices, "_torch_has_cuda", lambda: True)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return created


def test_worker_i_is_on_gpu_i_mod_n(monkeypatch: pytest.MonkeyPatch, machine: Callable[[int], None]) -> None:
    machine(7)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert [p.gpu for p in assign_devices("auto", 5, 1)] == ["4", "6", "4", "6", "4"]
    assert [p.gpu for p in assign_devices("cuda:1", 2, 1)] == ["6", "6"]
    assert [p.gpu for p in assign_devices("cpu", 2, 1)] == [None, None]
    assert all(p.device == "cuda" for p in assign_devices("auto", 2, 1))
    assert devices.remark("auto") == ""


@pytest.mark.parametrize(
    ("options", "workers"),
    [({}, 2), ({"devices": "cuda:1"}, 1), ({"devices": "cpu"}, 10), ({"workers": 5}, 5)],
)
def test_one_worker_a_gpu_is_the_default(
    options: dict[str, Any], workers: int, machine: Callable[[int], None]
) -> None:
    machine(2)
    assert Overrides.of({"algo": "fedavg", **options}).resolve()[1].workers == workers


@pytest.mark.parametrize(
    ("lanes", "workers", "device", "clients", "expected"),
    [
        (AUTO, 2, "cuda", 40, 10),
        (AUTO, 4, "cuda", 80, 5),  # two share a GPU
        (AUTO, 40, "cuda", 80, 1),
        (6, 4, "cuda", 10, 6),
        (AUTO, 4, "cpu", 40, 1),
        (AUTO, 0, "cuda", 40, 1),
    ],
)
def test_as_many_lanes_as_clients_a_worker(
    lanes: int, workers: int, device: Any, clients: int, expected: int, machine: Callable[[int], None]
) -> None:
    machine(2)
    problem = problem_of(find("fedavg"), clients=clients, device=device)
    assert lanes_of(Execution(workers=workers, lanes=lanes), problem) == expected
    remote = Execution(workers=workers, lanes=lanes, remote_workers=workers, devices="cuda")
    if device == "cuda" and workers == 40:
        assert lanes_of(remote, problem) == 2, "nobody knows which of them share a GPU"


def test_a_large_model_has_one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_count, "LARGE", 640)
    assert lanes_of(Execution(workers=1), problem_of(find("fedavg"), device="cuda")) == 1


@pytest.mark.parametrize(("workers", "device"), [(1, "cpu"), (0, "cuda")])
def test_lanes_without_a_worker_on_a_gpu_are_refused(workers: int, device: Any) -> None:
    problem = problem_of(find("fedavg"), device=device)
    with pytest.raises(UsageError, match="--lanes 2: lanes are streams of a worker's GPU"):
        lanes_of(Execution(workers=workers, lanes=2), problem)


@pytest.mark.parametrize(
    ("asked", "gpus"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("-1", []),
        ("2,0", ["2", "0"]),
        ("0,-1,1", ["0"]),
        ("1,0,1", []),
        ("0,GPU-aa22", ["0"]),
        ("GPU-aa22-2,GPU-bb", ["GPU-aa22-2", "GPU-bb33-3"]),
        ("GPU-aa", []),  # two begin so
        ("GPU-cc", []),
        ("MIG-1234,MIG-5678", ["MIG-1234", "MIG-5678"]),
    ],
)
def test_gpus_are_counted_as_cuda_counts(
    asked: str | None, gpus: list[str], monkeypatch: pytest.MonkeyPatch, machine: Callable[[int], None]
) -> None:
    machine(3)
    if asked is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    assert devices.visible_gpus() == gpus
    assert [p.gpu for p in assign_devices("auto", 3, 1)] == ([*gpus, *gpus, *gpus][:3] or [None] * 3)


@pytest.mark.parametrize("asked", ["0", "MIG-1234"])
def test_a_variable_that_names_no_gpu_gives_the_cpu_and_says_so(
    asked: str, monkeypatch: pytest.MonkeyPatch, machine: Callable[[int], None]
) -> None:
    machine(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    assert assign_devices("auto", 1, 1)[0].device == "cpu"
    why = f"CUDA_VISIBLE_DEVICES={asked} names no GPU that is here"
    assert devices.remark("auto") == f"{why}: --devices auto takes the CPU"
    assert devices.remark("cpu") == ""
    with pytest.raises(UsageError) as refused:
        assign_devices("cuda:0", 1, 1)
    assert str(refused.value) == f"--devices cuda:0: this machine shows 0 GPU(s) ({why})"


def test_nothing_is_said_where_no_gpu_is_expected(
    monkeypatch: pytest.MonkeyPatch, machine: Callable[[int], None]
) -> None:
    machine(0)
    for asked in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
        monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
        monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "GPU-1")
        assert (devices.visible_gpus(), devices.remark("auto")) == ([], "")


def test_a_torch_without_cuda_takes_the_cpu_beside_a_gpu_and_says_so(
    monkeypatch: pytest.MonkeyPatch, machine: Callable[[int], None]
) -> None:
    machine(2)
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: False)
    assert devices.remark("auto") == "torch is built without CUDA: --devices auto takes the CPU"
    with pytest.raises(UsageError, match=r"this machine shows 0 GPU\(s\) \(torch is built without CUDA\)"):
        assign_devices("cuda:1", 1, 1)


@pytest.mark.parametrize(
    ("version", "cuda"),
    [
        ("__version__ = '2.9.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", False),
        ("__version__ = '2.9.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", True),
        ("nothing = 1\n", True),
    ],
)
def test_what_torch_is_built_with_is_read_without_importing_it(
    version: str, cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(version)
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(devices, "find_spec", lambda name: spec)
    assert devices._torch_has_cuda() is cuda


@pytest.mark.parametrize("text", ["cuda:x", "cuda:-1", "auto,cpu", ""])
def test_what_is_no_list_of_devices_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="give auto, cpu, or a list such as cuda:0,cuda:1"):
        assign_devices(text, 1, 1)


@pytest.mark.process
def test_a_run_says_that_it_takes_the_cpu(
    monkeypatch: pytest.MonkeyPatch, machine: Callable[[int], None], tmp_path: Path, capsys: Any
) -> None:
    machine(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    experiment = Experiment(algo="fedavg", clients=2, rounds=1, model="logistic")
    launch(experiment, Execution(workers=1, out=str(tmp_path / "run")))
    assert "CUDA_VISIBLE_DEVICES=0 names no GPU that is here: --devices auto takes the CPU" in " ".join(
        capsys.readouterr().out.split()
    )
