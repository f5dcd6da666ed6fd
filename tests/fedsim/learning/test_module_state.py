"""A module's traces of one use do not reach the next: 300 random modules with state of every kind."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from numpy.random import RandomState, default_rng
from torch import Tensor, nn

from fedsim.data.datasets import Dataset
from fedsim.errors import UsageError
from fedsim.experiment import Experiment
from fedsim.learning.models.registry import network_of
from fedsim.learning.module_state import ModuleState
from fedsim.learning.params import Net
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.live_objects import register
from fedsim.process_settings import settings_kept
from fedsim.seeds import RandomStream
from launch.cli import main

FEATURES, CLASSES = 5, 3
GLOBAL_COUNT = 0


class Layer(nn.Module):
    """The identity times a factor that depends on what the layer remembers of its earlier calls."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + 0.125 * float(self.traces(x)))

    def traces(self, x: Tensor) -> float:
        raise NotImplementedError


class Attribute(Layer):
    calls = 0

    def traces(self, x: Tensor) -> float:
        self.calls += 1
        return self.calls % 7


class Buffered(Layer):
    def __init__(self, value: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("value", value)
        self.change = change

    def traces(self, x: Tensor) -> float:
        self.value = self.change(self.value)
        return float(self.value.sum()) % 5


class Holds(Layer):
    """Holds what `make` gives, which `trace` changes."""

    def __init__(self, make: Callable[[], Any], trace: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.past, self.trace = make(), trace

    def traces(self, x: Tensor) -> float:
        return float(self.trace(self.past, x))


def appended(past: Any, x: Tensor) -> int:
    past.append(len(past) % 4)
    return sum(past) % 3


def seen(past: set[int], x: Tensor) -> int:
    past.add(round(float(x.detach().sum()) * 1000))
    return len(past) % 4


def rolled(past: np.ndarray, x: Tensor) -> float:
    past[:] = np.roll(past, 1)
    past[0] += 1
    return float(past[1]) % 3


class CachedInEvaluation(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.ones(1)), None

    def traces(self, x: Tensor) -> float:
        if self.training:
            self.kept = None
        elif self.kept is None:
            self.kept = self.weight.detach() * 2
        return float(self.weight.detach() if self.kept is None else self.kept)


class Hooked(Layer):
    """A forward hook whose count is a variable of the function that made it."""

    def __init__(self) -> None:
        super().__init__()
        count = 0

        def hook(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return output * (1 + count % 3)

        self.register_forward_hook(hook)

    def traces(self, x: Tensor) -> float:
        return 0.0


class AddsHooks(Layer):
    def traces(self, x: Tensor) -> float:
        if len(self._forward_hooks) < 3:
            self.register_forward_hook(lambda module, arguments, output: output * 1.25)
        return 0.0


class ClassAttribute(Layer):
    total = 0

    def traces(self, x: Tensor) -> float:
        type(self).total += 1
        return type(self).total % 3


class GlobalVariable(Layer):
    def traces(self, x: Tensor) -> float:
        global GLOBAL_COUNT
        GLOBAL_COUNT += 1
        return GLOBAL_COUNT % 3


class DefaultArgument(Layer):
    def traces(self, x: Tensor, past: list[int] = []) -> float:  # noqa: B006
        past.append(1)
        return len(past) % 5


class Memoised(Layer):
    def traces(self, x: Tensor) -> float:
        return float(self.first(len(x)))

    @cache  # noqa: B019
    def first(self, rows: int) -> float:
        self.count = getattr(self, "count", 0) + 1
        return self.count % 3


class Nested(Layer):
    class Counter:
        __slots__ = ("history", "n")

        def __init__(self) -> None:
            self.n, self.history = 0, OrderedDict[int, list[int]]()

    def __init__(self) -> None:
        super().__init__()
        self.counter = Nested.Counter()

    def traces(self, x: Tensor) -> float:
        self.counter.n += 1
        self.counter.history.setdefault(self.counter.n % 2, []).append(1)
        return self.counter.n % 3 + len(self.counter.history.get(0, ())) % 2


class Replaced(Layer):
    """A submodule is exchanged during the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.act: nn.Module = nn.Identity()

    def traces(self, x: Tensor) -> float:
        self.act = nn.Tanh() if isinstance(self.act, nn.Identity) else nn.Identity()
        return float(self.act(x.detach().sum()))


class Modes(Layer):
    """The layer changes its own mode."""

    def traces(self, x: Tensor) -> float:
        self.inverted = not getattr(self, "inverted", False)
        return 2.0 if self.inverted else 0.0


KINDS: tuple[Callable[[], nn.Module], ...] = (
    *(Attribute, CachedInEvaluation, Hooked, AddsHooks, ClassAttribute, GlobalVariable, DefaultArgument),
    *(Memoised, Nested, Replaced, Modes),
    lambda: Buffered(torch.zeros((), dtype=torch.int64), lambda count: count.add_(1)),
    lambda: Buffered(torch.zeros(3, dtype=torch.bool), lambda mask: ~mask),  # another object each time
    *(partial(Holds, kind, appended) for kind in (list, deque, bytearray)),
    partial(Holds, set, seen),
    partial(Holds, dict, lambda past, x: past.setdefault(len(x), x.detach().mean()).clamp(-1, 1)),
    partial(Holds, lambda: torch.Generator().manual_seed(1), lambda g, x: torch.rand((), generator=g)),
    *(partial(Holds, partial(m, 1), lambda g, x: g.standard_normal()) for m in (default_rng, RandomState)),
    partial(Holds, lambda: random.Random(1), lambda g, x: g.random()),
    partial(Holds, lambda: np.zeros(3), rolled),
    partial(Holds, lambda: partial(lambda past, n: past.append(n) or len(past), []), lambda f, x: f(1) % 4),
)


def data() -> Dataset:
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((24, FEATURES)).astype(np.float32)
    targets = np.arange(24) % CLASSES
    return Dataset("random", inputs, targets, inputs[:6], targets[:6], classes=CLASSES)


def network(make: Callable[..., nn.Module]) -> Net:
    return network_of(Experiment(model=register(make, "--model")), data(), torch.device("cpu"))


def shard(net: Net, client: int) -> Shard:
    rows = slice(12 * client, 12 * client + 12)
    d = data()
    return Shard(net, torch.from_numpy(d.train_inputs[rows]), torch.from_numpy(d.train_targets[rows]), 1.0)


def task(net: Net, start: Tensor, client: int) -> tuple[Tensor, Tensor]:
    """The weights after local training, and their outputs."""
    how = LocalTraining(epochs=2, batch_size=5)
    fit = minimise(shard(net, client), start, how=how, rng=RandomStream(0, "t", client), round=1)
    outputs = net.logits(fit.solution, torch.from_numpy(data().test_inputs))
    net.restore()  # as workers.task_execution does
    return fit.solution, outputs


@pytest.mark.parametrize("seed", range(300))
def test_a_task_does_not_depend_on_earlier_ones(seed: int) -> None:
    kinds = random.Random(seed).sample(KINDS, 1 + seed % 4)

    def make(shape: tuple[int, ...], classes: int) -> nn.Module:
        layers = [layer for kind in kinds for layer in (kind(), nn.Linear(FEATURES, FEATURES))]
        return nn.Sequential(*layers, nn.Linear(FEATURES, classes))

    fresh, used = network(make), network(make)
    start = fresh.snapshot()
    assert torch.equal(used.snapshot(), start)
    expected = task(fresh, start, 0)
    weights, _ = task(used, start, 1)
    used.logits(weights, torch.from_numpy(data().test_inputs[:1]))
    for of_fresh, of_used in zip(expected, task(used, start, 0), strict=True):
        assert torch.equal(of_fresh, of_used), [str(kind) for kind in kinds]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_would_be_seen_without_the_state(kind: Callable[[], nn.Module]) -> None:
    """Without restoring, the second of two equal uses differs, so the test above can fail."""

    def make(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(kind(), nn.Linear(FEATURES, classes))

    inputs = torch.from_numpy(data().test_inputs)
    seen = False
    for earlier in (inputs * 2, inputs[:1]):
        outputs = []
        for uses in (1, 0):
            net = network(make)
            weights = torch.full_like(net.weights, 0.5)
            state, net.kept_state = net.kept_state, None
            for _ in range(uses):
                net.logits(net.snapshot(), earlier)
            outputs.append(torch.stack([net.logits(weights, inputs) for _ in range(4)]))
            assert state is not None
            state.restore()
        seen = seen or not torch.equal(*outputs)
    assert seen, kind


class Refused(nn.Module):
    """One layer, and what a test adds to it."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x)
        return out


@pytest.mark.parametrize("make", [itertools.count, lambda: iter([1, 2]), lambda: (n for n in (1, 2))])
def test_what_cannot_be_restored_is_refused_by_name(make: Callable[[], Iterator[int]]) -> None:
    class Keeps(Refused):
        def __init__(self, shape: tuple[int, ...], classes: int) -> None:
            super().__init__(shape, classes)
            self.numbers = make()

    with pytest.raises(UsageError, match=r"keeps an iterator \(\w+\) in numbers, which"):
        network(Keeps)


def test_a_buffer_that_training_changes_is_refused_by_name() -> None:
    class Running(Refused):
        def __init__(self, shape: tuple[int, ...], classes: int) -> None:
            super().__init__(shape, classes)
            self.register_buffer("average", torch.zeros(FEATURES))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.average.mul_(0.9).add_(0.1 * x.mean(0))
            return F.relu(self.out(x - self.average))

    with pytest.raises(UsageError, match="training mode changes the floating-point buffer average"):
        network(Running)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda m: m.out.weight.data.mul_(0.9), "training mode changes trained parameters in place"),
        (lambda m: torch.set_num_threads(3), "training mode sets torch's number of threads"),
        (lambda m: torch.set_default_dtype(torch.float64), "training mode sets torch's default dtype"),
    ],
    ids=["parameter", "threads", "dtype"],
)
def test_a_forward_pass_that_changes_what_processes_share_is_refused(
    act: Callable[[Any], object], says: str
) -> None:
    class Acts(Refused):
        def forward(self, x: Tensor) -> Tensor:
            act(self)
            return super().forward(x)

    with settings_kept(), pytest.raises(UsageError, match=says):
        network(Acts)


def test_unchanged_state_is_not_written() -> None:
    count = Buffered(torch.zeros((), dtype=torch.int64), lambda count: count.add_(1))
    module = nn.Sequential(count, nn.Linear(2, 2))
    state = ModuleState(module)
    version = module[0].value._version
    state.restore()
    assert module[0].value._version == version


FILE = """
import torch
from torch import nn

CALLS = []


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.a, self.b = nn.Linear(64, 8), nn.Linear(8, classes)
        self.drop = nn.Dropout(0.1)
        self.steps, self.kept, self.draws = 0, None, torch.Generator().manual_seed(3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))

    def forward(self, x):
        CALLS.append(len(x))
        self.steps += 1
        self.count += 1
        if self.kept is None:
            self.kept = self.a.weight.detach().mean()
        scale = 1 + 0.1 * (self.steps % 5) + 0.1 * (len(CALLS) % 3) + self.kept
        scale = scale + 0.01 * torch.rand((), generator=self.draws) + 0.1 * (self.count % 2)
        return self.b(self.drop(torch.relu(self.a(x.flatten(1)))) * scale)
"""


@pytest.mark.process
def test_a_model_that_keeps_everything_gives_the_same_bits_with_any_number_of_workers(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FILE)
    job = f"launch -q --algo fedavg --model {tmp_path}/net.py:Net --clients 3 --rounds 3 --set local.epochs=1"
    digests = []
    for workers in (0, 1, 2):
        run = tmp_path / f"run-{workers}"
        first = "" if workers else "--until 0.01"  # ends after its first round, and goes on
        command = f"{job} --workers {workers} --out {run} {first}".split()
        done = CliRunner(catch_exceptions=False).invoke(main, command)
        assert done.exit_code == 0, done.output
        if first:
            more = f"resume -q {run} --until none --workers 1".split()
            done = CliRunner(catch_exceptions=False).invoke(main, more)
            assert done.exit_code == 0, done.output
        digests.append(
            ((run / "model.safetensors").read_bytes(), (run / "metrics.jsonl").read_text().count("\n"))
        )
    assert digests[0] == digests[1] == digests[2] and digests[0][1] == 4
