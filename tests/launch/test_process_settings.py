"""A run does not depend on settings of the program that calls it, nor on a global random generator."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fedsim
from fedsim.errors import UsageError
from fedsim.process_settings import SETTINGS, own_settings
from launch.cli import main
from tests.support.commands import fedsim as fedsim_command

OTHER: dict[str, Any] = {
    "torch's default dtype": torch.float64,
    "float32 matmul precision": "medium",
    "deterministic algorithms": (True, True, False),
    "autocast on cpu": True,
    "grad mode": False,
    "anomaly detection": (True, False),
    "numpy.seterr": dict.fromkeys(("divide", "over", "under", "invalid"), "raise"),
}


def run(out: Path, **changes: Any) -> str:
    described = {"algo": "fedlap_cov", "clients": 2, "rounds": 1, "hyperparameters": {"epochs": 1}} | changes
    return str(fedsim.run(workers=0, quiet=True, out=out, **described).summary["model_sha256"])


def test_a_setting_of_the_caller_changes_no_bit_and_is_kept(tmp_path: Path) -> None:
    expected = run(tmp_path / "plain")
    changed = [s for s in SETTINGS if s.name in OTHER]
    assert len(changed) == len(OTHER)
    before = [s.get() for s in SETTINGS]
    generators = random.getstate(), torch.get_rng_state()
    try:
        for setting in changed:
            setting.set(OTHER[setting.name])
        torch.set_default_device("meta")
        assert run(tmp_path / "changed") == expected
        with pytest.raises(UsageError):
            run(tmp_path / "failed", tree="5x5")
        assert torch.get_default_device().type == "meta"
        assert [s.get() for s in changed] == [OTHER[s.name] for s in changed]
    finally:
        torch.set_default_device(None)
        for setting, value in zip(SETTINGS, before, strict=True):
            setting.set(value)
    assert random.getstate() == generators[0] and torch.equal(torch.get_rng_state(), generators[1])


SETS = """
import torch
from torch import nn

{changes}

def model(shape, classes):
    {changes}
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes, dtype=torch.float32))
"""
CHANGES = (
    "torch.set_default_dtype(torch.float64); torch.set_float32_matmul_precision('medium'); "
    "torch.set_num_threads(2); torch.set_flush_denormal(False); torch.set_grad_enabled(False)"
)


@pytest.mark.process
def test_a_setting_that_a_file_changes_holds_nowhere(tmp_path: Path) -> None:
    ends = set()
    for name, changes, workers in (("plain", "pass", 0), ("changed", CHANGES, 0), ("changed", CHANGES, 1)):
        file = tmp_path / f"{name}.py"
        file.write_text(SETS.format(changes=changes))
        described = {"algo": "fedlap_cov", "clients": 2, "rounds": 1, "hyperparameters": {"epochs": 1}}
        out = tmp_path / f"{name}{workers}"
        ran = fedsim.run(workers=workers, quiet=True, out=out, model=f"{file}:model", **described)
        ends.add((ran.summary["model_sha256"], ran.summary["clients_sha256"]))
    assert len(ends) == 1


@pytest.mark.parametrize(
    ("block", "name"),
    [
        (lambda: FlopCounterMode(display=False), "FlopCounterMode"),
        pytest.param(
            lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
            "saved_tensors_hooks",
            marks=pytest.mark.skipif(
                not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
                reason="this torch does not tell whether there are hooks",
            ),
        ),
    ],
)
def test_what_intercepts_torch_is_named(block: Callable[[], Any], name: str) -> None:
    with block(), pytest.raises(UsageError, match=name), own_settings():
        pass


class Noisy(nn.Module):
    """It draws from numpy.random: at the start, or in a forward pass of training."""

    at_start = False

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(64, classes)
        if self.at_start:
            nn.init.constant_(self.out.bias, np.random.default_rng().uniform())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = np.random.default_rng().uniform() if self.training and not self.at_start else 1.0
        return self.out(x.flatten(1) * factor)


class NoisyStart(Noisy):
    at_start = True


def drawn() -> fedsim.data.Dataset:
    x = np.random.default_rng().normal(size=(20, 64)).astype(np.float32)
    y = np.arange(20) % 2
    return fedsim.data.Dataset("drawn", x, y, x, y, 2, 1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": Noisy}, "Noisy gives other numbers each time: its results of training"),
        ({"model": NoisyStart}, "NoisyStart gives other numbers each time: its weights at the start"),
        ({"dataset": drawn}, "drawn gives other numbers each time: its data"),
    ],
)
def test_what_draws_by_itself_is_refused_and_leaves_no_folder(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        run(tmp_path / "run", algo="fedavg", **changes)
    assert not (tmp_path / "run").exists()


FILE = """
import numpy as np
import torch
from torch import nn
import fedsim

{draw}

def data():
    x = np.full((20, 64), SHIFT, dtype=np.float32) + np.arange(20, dtype=np.float32)[:, None]
    y = np.arange(20) % 2
    return fedsim.data.Dataset("drawn", x, y, x, y, 2, 1.0)

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.out = nn.Linear(64, classes)
        nn.init.constant_(self.out.bias, SHIFT)

    def forward(self, x):
        return self.out(x.flatten(1))
"""
COMMON = ("--algo", "fedavg", "--clients", "2", "--rounds", "1")


@pytest.mark.parametrize(
    ("option", "words"), [("--dataset", "own:data gives other"), ("--model", "own:Net gives other")]
)
def test_a_draw_at_the_top_of_a_file_is_noticed(option: str, words: str, tmp_path: Path) -> None:
    """A process executes a file once, so the file is executed again."""
    (tmp_path / "own.py").write_text(FILE.format(draw="SHIFT = np.random.default_rng().uniform()"))
    name = "data" if option == "--dataset" else "Net"
    options = (option, f"{tmp_path / 'own.py'}:{name}", "--workers", "0", "--out", str(tmp_path / "run"))
    done = CliRunner(catch_exceptions=False).invoke(main, ["launch", *COMMON, *options])
    assert (done.exit_code, (tmp_path / "run").exists()) == (2, False)
    assert words in done.stderr


@pytest.mark.process
def test_numbers_that_differ_between_processes_are_no_drift(tmp_path: Path) -> None:
    """No --allow-drift lets them pass. Here by the process's number, as the order of a set would differ."""
    (tmp_path / "own.py").write_text(FILE.format(draw="import os\nSHIFT = float(os.getpid())"))
    options = ("--dataset", f"{tmp_path / 'own.py'}:data", "--workers", "2", "--out", str(tmp_path / "run"))
    output = fedsim_command("launch", *COMMON, *options, "--allow-drift", code=4)
    assert "own:data gives other numbers in every process" in output
    assert "Traceback" not in output and "machines of one kind" not in output
