"""Workers on GPUs are fresh interpreters; the way they start is tested without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedsim.experiment import Experiment
from launch.config import Execution
from launch.run import launch
from workers.devices import Placement, assign_devices


@pytest.mark.process
def test_a_fresh_interpreter_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    experiment = Experiment(algo="fedavg", clients=3, rounds=1, model="logistic")
    launch(experiment, Execution(workers=0, out=str(tmp_path / "in-process")), quiet=True)
    monkeypatch.setattr(Placement, "fresh", property(lambda self: True))
    launch(experiment, Execution(workers=1, out=str(tmp_path / "fresh")), quiet=True)
    digests = {
        json.loads((tmp_path / run / "summary.json").read_text())["model_sha256"]
        for run in ("in-process", "fresh")
    }
    assert len(digests) == 1


def test_worker_i_is_on_gpu_i_mod_n(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert [p.gpu for p in assign_devices("auto", 5, 1)] == ["4", "6", "4", "6", "4"]
    assert [p.gpu for p in assign_devices("cuda:1", 2, 1)] == ["6", "6"]
    assert [p.gpu for p in assign_devices("cpu", 2, 1)] == [None, None]
    assert all(p.fresh and p.device == "cuda" for p in assign_devices("auto", 2, 1))
