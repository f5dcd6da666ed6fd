"""Recorded steps have the bits of those that are computed as they come.

CUDA graphs are not here; a tape of operators stands for them (tests/support/tape.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.learning.gaussian import Distance, Gaussian, Penalty
from fedsim.learning.params import Net
from fedsim.learning.recorded_step import RecordedStep, Recorder, cuda_graphs
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import LocalTraining, Moments, minimise
from fedsim.seeds import RandomStream
from tests.support.tape import Tapes

N, P = 26, 282
HOW = LocalTraining(epochs=4, batch_size=6, lr=0.02)
"""Four whole batches an epoch, and one of two examples."""
RNG = RandomStream(3, "client", 2, 1)
REPEATED = 4 * 4 - 2
"""Steps on whole batches: the first is computed as it comes, the second recorded."""


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 16), nn.ReLU(), *layers, nn.Linear(16, 10))


def shard_of(module: nn.Module, tapes: Tapes | None = None) -> Shard:
    draws = torch.Generator().manual_seed(1)
    inputs = torch.randint(17, (N, 2, 3), generator=draws).to(torch.uint8)
    net = Net(copy.deepcopy(module))
    net.recorder = tapes.recorder if tapes else None
    return Shard(net, inputs, torch.randint(10, (N,), generator=draws), 16.0)


def vector(seed: int) -> Tensor:
    return torch.rand(P, generator=torch.Generator().manual_seed(seed))


def solved(shard: Shard, start: Tensor, how: LocalTraining = HOW, **more: Any) -> list[Any]:
    fit = minimise(shard, start, how=how, rng=RNG, round=2, **more)
    moments = fit.carried
    values = [] if moments is None else [moments.first.tolist(), moments.second.tolist(), moments.steps]
    return [fit.solution.tolist(), fit.loss, *values]


@pytest.mark.parametrize(
    "how",
    [
        HOW,
        replace(HOW, optimiser="sgd"),
        replace(HOW, optimiser="sgd", momentum=0.9, decay=0.5),
        replace(HOW, clip=0.1),
        replace(HOW, batch_size=13),
        replace(HOW, batch_size=20),  # a short batch between the first whole one and the recorded one
    ],
)
@pytest.mark.parametrize(
    "penalties",
    [
        (),
        (Gaussian(vector(1), 0.5),),
        (Gaussian(vector(1), vector(2)), Gaussian(vector(3), 0.1)),
        (Gaussian(vector(1), torch.diag(vector(2))),),
    ],
)
def test_recorded_training_has_the_same_bits(how: LocalTraining, penalties: tuple[Penalty, ...]) -> None:
    tapes, module = Tapes(), network()
    recorded, plain = shard_of(module, tapes), shard_of(module)
    carried = Moments(vector(4), vector(5), 7)
    for task in range(2):  # what one task has recorded is not repeated in the next
        options = {"penalties": penalties, "weight": float(N), "moments": carried if task else None}
        assert solved(recorded, vector(6), how, **options) == solved(plain, vector(6), how, **options)
    whole = how.epochs * (N // how.batch_size)
    assert (tapes.recorded, tapes.repeated) == (2, 2 * (whole - 2))


def test_a_task_does_not_change_its_arguments() -> None:
    start, carried = vector(6), Moments(vector(4), vector(5), 7)
    solved(shard_of(network(), Tapes()), start, moments=carried)
    assert torch.equal(start, vector(6))
    assert torch.equal(carried.first, vector(4))
    assert torch.equal(carried.second, vector(5))


def test_what_needs_python_in_every_step_is_not_recorded() -> None:
    tapes = Tapes()
    for module, more in (
        (network(nn.Dropout(0.5)), {}),  # draws anew in every step
        (network(), {"watch": lambda inputs, targets: None}),
        (network(), {"penalties": (Distance(vector(1), 0.5),)}),  # asks whether its length is zero
    ):
        assert solved(shard_of(module, tapes), vector(6), **more) == solved(
            shard_of(module), vector(6), **more
        )
    assert tapes.recorded == 0


def test_a_client_of_less_than_a_batch_is_not_recorded() -> None:
    tapes = Tapes()
    solved(shard_of(network(), tapes), vector(6), replace(HOW, batch_size=64))
    assert tapes.recorded == 0


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (lambda rows: rows * float(rows.sum()), "asks its device"),
        (lambda rows: rows[rows > 1], "asks its device"),
        (lambda rows: rows * torch.equal(rows, rows), "asks its device"),
        (lambda rows: rows * torch.tensor([2, 3]), "may change"),
        (lambda rows: rows * torch.rand(2, generator=torch.Generator()), "may change"),
    ],
)
def test_a_step_that_needs_python_cannot_be_recorded(work: Callable[[Tensor], Tensor], why: str) -> None:
    step, rows = RecordedStep(work, Tapes().recorder, 2), torch.tensor([1, 2])
    step(rows)
    with pytest.raises(AssertionError, match=why):
        step(rows)


def test_every_repetition_is_announced() -> None:
    """A worker's heartbeat is a hook of the forward pass, which Python does not see in a repetition."""
    heard: list[int] = []
    tapes = Tapes()
    shard = shard_of(network(), tapes)
    shard.net.recorder = Recorder(tapes.recorder.record, lambda: heard.append(1))
    shard.net.module.register_forward_pre_hook(lambda module, inputs: heard.append(0))
    solved(shard, vector(6))
    assert len(heard) == HOW.steps(N)
    assert sum(heard) == REPEATED


class Graphs:
    """torch.cuda as far as recording needs it: what is captured is computed at every replay.

    As in torch, a memory pool counts its graphs, and one whose last graph has gone cannot be used again.
    """

    def __init__(self) -> None:
        self.pools: dict[int, int] = {}
        self.streams = ["main"]
        self.calls: list[str] = []

    def graph_pool_handle(self) -> int:
        return 7

    def current_stream(self) -> Any:
        return FakeStream(self.calls, self.streams[-1])

    def Stream(self) -> Any:
        return FakeStream(self.calls, "side")

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.streams.append(stream.name)
        yield
        self.streams.pop()

    def CUDAGraph(self) -> Any:
        return FakeGraph(self)


class FakeStream:
    def __init__(self, calls: list[str], name: str) -> None:
        self.calls, self.name = calls, name

    def wait_stream(self, other: Any) -> None:
        self.calls.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert self.graphs.streams[-1] == "side"
        assert self.graphs.pools.get(pool) != 0, "the pool's graphs are all gone"
        self.graphs.pools[pool] = self.graphs.pools.get(pool, 0) + 1
        self.graphs.calls.append("captures")

    def capture_end(self) -> None:
        self.graphs.calls.append("has captured")

    def replay(self) -> None:
        self.graphs.calls.append("replays")

    def __del__(self) -> None:
        self.graphs.pools[7] -= 1


def test_graphs_share_a_pool_that_never_loses_its_last_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs()
    monkeypatch.setattr("fedsim.learning.recorded_step.torch.cuda", graphs)
    recorder = cuda_graphs()
    for _ in range(3):
        repeat, result = recorder.record(lambda: torch.ones(()))
        repeat()
        del repeat, result
    expected = [
        "side waits for main",
        "captures",
        "has captured",
        "main waits for side",
        "replays",
        "replays",
    ]
    assert graphs.calls == 3 * expected
