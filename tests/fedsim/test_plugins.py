"""Objects from a user's own file, and what is said about one that does not do."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import protocols
from fedsim import plugins
from fedsim.algorithm import Algorithm
from fedsim.data import Dataset, load_dataset
from fedsim.errors import FedsimError, UsageError
from fedsim.learning.models.registry import build_model
from launch.configuration.config import Overrides
from launch.runs.writer import RunDir

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file mine.py; returns its path."""

    def created(source: str) -> str:
        (tmp_path / "mine.py").write_text(source)
        return str(tmp_path / "mine.py")

    return created


def complaint(call: Callable[[], Any]) -> str:
    """What a call says is wrong: always one line."""
    with pytest.raises(FedsimError) as caught:
        call()
    output = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in output
    return output


# ---- loading


def test_a_file_is_executed_once_and_anew_when_it_has_changed(write: Write) -> None:
    path = write("made = []\nmade.append(1)\ndef f(): return made\n")
    first = plugins.load(f"{path}:made", "--algo")
    function: Any = plugins.load(f"{path}:f", "--model")
    assert first == [1]
    assert function() is first
    before = plugins.sources([f"{path}:made", "digits", f"{path}:f"])
    assert before == {path: hashlib.sha256(Path(path).read_bytes()).hexdigest()}
    write("made = 'anew'\n")
    assert plugins.load(f"{path}:made", "--algo") == "anew"
    assert plugins.sources([f"{path}:made"]) != before
    assert not list(Path(path).parent.glob("__pycache__"))


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    kinds = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text("class Mine: pass\n")
        kinds.append(plugins.load(f"{tmp_path}/{folder}/mine.py:Mine", "--algo"))
    assert kinds[0] is not kinds[1]
    modules: list[ModuleType] = [sys.modules[kind.__module__] for kind in kinds]
    assert [m.Mine for m in modules] == kinds
    assert [Path(str(m.__file__)).parent.name for m in modules] == ["a", "b"]


def test_a_spec_means_the_same_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert plugins.absolute("sub/../mine.py:Mine") == f"{tmp_path}/mine.py:Mine"
    assert plugins.absolute("mine.py") == f"{tmp_path}/mine.py"
    assert plugins.short(f"{tmp_path}/mine.py:Mine") == "mine:Mine"
    assert [plugins.short(name) for name in ("fedlap", "mine.py")] == ["fedlap", "mine.py"]
    assert not plugins.is_spec("two_dirichlet:1,0.5")
    config = tmp_path / "job.toml"
    config.write_text("[experiment]\nmodel = 'net.py:Net'\ndataset = 'digits'\n")
    experiment, execution = Overrides.of({"algo": "mine.py:Mine", "config": str(config)}).resolve()
    assert experiment.algo == f"{tmp_path}/mine.py:Mine"
    assert experiment.model == f"{tmp_path}/net.py:Net"
    assert experiment.dataset == "digits"
    path = RunDir.path_of(
        replace(experiment, algo="/a b/mine é.py:Mine", seed=3), replace(execution, runs="b")
    )
    assert re.fullmatch(r"b/\d{8}-\d{6}-mine---Mine-3", str(path))


@pytest.mark.parametrize(
    ("source", "name", "words"),
    [
        ("import os\n\nx = 1 / 0\n", "Mine", "importing it failed in line 3: ZeroDivisionError: division"),
        ("a = 1\nclass Mine(:\n", "Mine", "importing it failed in line 2: SyntaxError: "),
        ("def f():\n  raise ValueError('one\\ntwo')\nf()\n", "Mine", "failed in line 2: ValueError: one"),
        ("import sys\nsys.exit(3)\n", "Mine", "in line 2: SystemExit: 3"),
        ("from typing import Any\nclass Mine: pass\n_x = 1\n", "Mien", "did you mean 'Mine'? (known: Mine)"),
        ("x = 1\n", "", "say what in the file is meant: --algo "),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(
    source: str, name: str, words: str, write: Write
) -> None:
    path = write(source)
    output = complaint(lambda: plugins.load(f"{path}:{name}" if name else path, "--algo"))
    assert words in output
    assert "--algo" in output
    assert not [
        m for m in sys.modules.values() if getattr(m, "__file__", None) == path and "Mien" not in output
    ]


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    output = complaint(lambda: plugins.load(f"{tmp_path}/mine.py:Mine", "--model"))
    assert f"--model mine:Mine: there is no file {tmp_path}/mine.py" in output
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "loop.py").symlink_to("loop.py")
    for name, why in (("pipe", "it is no regular file but a folder, a pipe"), ("loop", "Too many levels of")):
        output = complaint(lambda name=name: plugins.load(f"{tmp_path}/{name}.py:Mine", "--model"))
        assert f"--model {name}:Mine: cannot read {tmp_path}/{name}.py: {why}" in output
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "mine.py").chmod(0)
    if os.geteuid():  # root reads everything
        assert "Permission denied" in complaint(lambda: plugins.load(f"{tmp_path}/mine.py:Mine", "--model"))


def test_our_own_errors_pass_as_they_are() -> None:
    with (
        pytest.raises(UsageError, match=r"^ours$"),
        plugins.user_code_errors("mine.py:Mine", "--algo", "calling it"),
    ):
        raise UsageError("ours")


# ---- algorithms

ALGORITHM = """
from __future__ import annotations
from dataclasses import dataclass
from protocols.fedavg import FedAvg, Up
from fedsim.algorithm import Algorithm, Exchange

@dataclass(frozen=True)
class Mine(FedAvg):
    name = "mine"
"""
MESSAGE = """
@dataclass(frozen=True)
class Down:
    mean: {kind}

@dataclass(frozen=True)
class Other(Mine):
    @property
    def exchanges(self): return (Exchange(Down, Up),)
"""


@pytest.mark.parametrize(
    ("source", "name", "words"),
    [
        ("Mine = 3", "Mine", "no subclass of fedsim.algorithm.Algorithm"),
        (f"{ALGORITHM}class Bare(Algorithm): pass", "Bare", "lacks broadcast, client_init, client_update"),
        (f"{ALGORITHM}class Bare(Mine): pass", "Bare", "@dataclass(frozen=True)"),
        (
            f"{ALGORITHM}@dataclass(frozen=True, kw_only=True)\nclass Bare(Mine):\n    extra: float",
            "Bare",
            "building it with its defaults failed:",
        ),
        (ALGORITHM + MESSAGE.format(kind="Mean"), "Other", "reading its messages failed: NameError"),
        (ALGORITHM + MESSAGE.format(kind="float"), "Other", "'mean' of Down must be annotated with a"),
        (
            f"{ALGORITHM}    @property\n    def exchanges(self): return (Exchange(Up, 1 / 0),)",
            "Mine",
            "reading its messages failed in line 11: ZeroDivisionError",
        ),
    ],
)
def test_a_class_that_is_no_algorithm_is_refused(source: str, name: str, words: str, write: Write) -> None:
    path = write(source)
    assert words in complaint(lambda: protocols.find(f"{path}:{name}"))


def test_missing_class_attributes_are_named(write: Write) -> None:
    stubs = [f"    def {m}(self, *a): ..." for m in sorted(Algorithm.__abstractmethods__)]
    path = write("\n".join([*ALGORITHM.splitlines(), "class Bare(Algorithm):", "    name = 'x'", *stubs]))
    output = complaint(lambda: protocols.find(f"{path}:Bare"))
    assert "lacks default_model, server_type, client_type" in output


# ---- models

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.out = nn.LazyLinear(classes)
    def forward(self, x):
        return self.out(x.flatten(1))

def narrow(shape, classes): return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes - 1))
def pair(shape, classes):
    net = Net(shape, classes)
    net.forward = lambda x: (x, x)
    return net
def number(shape, classes): return 3
def tuned(shape, classes, width): return Net(shape, classes)
def empty(shape, classes):
    net = nn.Flatten()
    net.forward = lambda x: torch.zeros(len(x), classes)
    return net
def image(shape, classes): return nn.Conv2d(3, classes, 3)
def double(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, classes)).double()
ready = nn.Linear(64, 10)
"""


def test_a_users_model_is_built_with_the_seed(write: Write) -> None:
    """Also the first time, when the file is executed and draws the weights of `ready`."""
    spec = write(NET) + ":Net"
    nets = []
    for _ in range(2):
        torch.manual_seed(5)
        nets.append(build_model(spec, (1, 8, 8), 10))
    assert nets[0] is not nets[1]
    assert nets[0].training
    assert torch.equal(*(next(net.parameters()) for net in nets))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("narrow", "for two examples of shape (1, 8, 8) a tensor of shape (2, 10); it gave shape (2, 9)"),
        ("pair", "it gave a tuple"),
        ("number", "must return a torch.nn.Module; it returned a int"),
        ("tuned", "calling it with shape (1, 8, 8) and 10 classes failed: TypeError: tuned() missing"),
        ("empty", "has no parameters that could be trained"),
        ("image", "a forward pass of two examples of shape (1, 8, 8) failed: RuntimeError"),
        ("ready", "is a Linear; name a class or function that makes a new torch.nn.Module"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(name: str, words: str, write: Write) -> None:
    path = write(NET)
    output = complaint(lambda: build_model(f"{path}:{name}", (1, 8, 8), 10))
    assert words in output
    assert "--model" in output


# ---- data sets

DATA = """
import numpy as np
from fedsim.data import Dataset

x, y = np.arange(24, dtype=np.float32).reshape(12, 2), np.arange(12) % 3

def made(**changes):
    fields = dict(train_inputs=x[::2], train_targets=y[::2], test_inputs=x, test_targets=y, classes=3)
    return Dataset("made", **(fields | changes))

ready = made()
def three(): return 3
def fails(): return x[99]
def needs(folder): return made()
"""


def test_a_users_data_set_is_a_function_or_an_object(write: Write) -> None:
    path = write(DATA)
    for name in ("made", "ready"):
        dataset = load_dataset(f"{path}:{name}")
        assert isinstance(dataset, Dataset)
        assert (dataset.scale, dataset.centres, len(dataset.train_inputs)) == (1.0, None, 6)
        for array in (dataset.train_inputs, dataset.train_targets, dataset.test_inputs, dataset.test_targets):
            assert array.flags.c_contiguous and not array.flags.writeable
    x: Any = plugins.load(f"{path}:x", "--dataset")
    assert x.flags.writeable  # the user's own array is left as it was


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("three", "must be a fedsim.data.Dataset, or a function without arguments that returns one"),
        ("x", "it gives a ndarray"),
        ("fails", "calling it failed in line 13: IndexError"),
        ("needs", "calling it failed: TypeError: needs() missing 1 required positional argument"),
    ],
)
def test_what_is_no_data_set_is_refused(name: str, words: str, write: Write) -> None:
    assert words in complaint(lambda: load_dataset(f"{write(DATA)}:{name}"))


def test_images_keep_their_bytes_and_their_scale(write: Write) -> None:
    source = (
        "\ndef images(): return made(train_inputs=x[::2].astype('u1'), test_inputs=x.astype('u1'), scale=255)"
    )
    dataset = load_dataset(write(DATA + source) + ":images")
    assert dataset.train_inputs.dtype == np.uint8
    assert dataset.scale == 255.0
