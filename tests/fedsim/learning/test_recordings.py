"""Recorded steps have the bits of those that are computed as they come.

CUDA graphs are not here; a tape of operators stands for them (tests/support/tape.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.learning.gaussian import Distance, Gaussian, Penalty
from fedsim.learning.params import Net
from fedsim.learning.recordings import KEPT, cuda_graphs
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import (
    LocalSGD,
    LocalTraining,
    Moments,
    Smoothing,
    corrected_sgd,
    minimise,
)
from fedsim.learning.solvers.ivon import IvonMoments, IvonTraining, ivon
from fedsim.seeds import RandomStream
from tests.support.tape import Tapes

N, P = 26, 282
HOW = LocalTraining(epochs=4, batch_size=6, lr=0.02)
"""Four whole batches an epoch, and one of two examples."""
RNG = RandomStream(3, "client", 2, 1)


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 16), nn.ReLU(), *layers, nn.Linear(16, 10))


def shard_of(net: Net, examples: int = N, seed: int = 1) -> Shard:
    draws = torch.Generator().manual_seed(seed)
    inputs = torch.randint(17, (examples, 2, 3), generator=draws).to(torch.uint8)
    return Shard(net, inputs, torch.randint(10, (examples,), generator=draws), 16.0)


def nets(module: nn.Module, tapes: Tapes, steps: int = 3) -> tuple[Net, Net]:
    """A network whose steps are recorded, and one whose steps are computed as they come."""
    recorded, plain = Net(copy.deepcopy(module)), Net(copy.deepcopy(module))
    recorded.recordings = tapes.recordings(steps)
    return recorded, plain


def vector(seed: int) -> Tensor:
    return torch.rand(P, generator=torch.Generator().manual_seed(seed))


def values(fit: Any) -> list[Any]:
    """All numbers of a fit."""
    parts = [fit.solution, fit.loss, fit.carried]
    for part in (p for p in parts if hasattr(p, "__dataclass_fields__")):
        parts += [getattr(part, name) for name in part.__dataclass_fields__]
    return [p.tolist() if isinstance(p, Tensor) else p for p in parts if isinstance(p, Tensor | float | int)]


def solved(shard: Shard, how: LocalTraining = HOW, **more: Any) -> list[Any]:
    return values(minimise(shard, vector(6), how=how, rng=RNG, round=2, **more))


@pytest.mark.parametrize(
    "how",
    [
        HOW,
        replace(HOW, optimiser="sgd"),
        replace(HOW, optimiser="sgd", momentum=0.9, decay=0.5),
        replace(HOW, clip=0.1),
        replace(HOW, drop_last=True),
        replace(HOW, batch_size=13),
        replace(HOW, batch_size=20),
        replace(HOW, batch_size=64),  # less than a batch
    ],
)
@pytest.mark.parametrize(
    "penalties",
    [
        (Gaussian(vector(1), vector(2)), Gaussian(vector(3), 0.1)),
        (Gaussian(vector(1), torch.diag(vector(2))),),
        (Distance(vector(6), 0.5),),  # at the first step its length is zero
    ],
)
def test_recorded_training_has_the_same_bits(how: LocalTraining, penalties: tuple[Penalty, ...]) -> None:
    tapes = Tapes()
    recorded, plain = nets(network(), tapes)
    for task, examples in enumerate((N, 20, 30)):  # larger, smaller, then larger than all before
        options = {
            "penalties": penalties,
            "weight": float(examples),
            "moments": Moments(vector(4), vector(5), 7) if task else None,
        }
        assert solved(shard_of(recorded, examples, task), how, **options) == solved(
            shard_of(plain, examples, task), how, **options
        )
    assert tapes.repeated > 2


def test_a_recording_lasts_over_tasks_of_other_clients() -> None:
    """Of other examples, weights, penalties and moments."""
    tapes = Tapes()
    recorded, plain = nets(network(), tapes)
    counts = []
    for task in range(4):
        options = {
            "penalties": (Gaussian(vector(task), vector(task + 1)),),
            "weight": float(N + task),
            "moments": Moments(vector(task + 2), vector(task + 3), task),
        }
        assert solved(shard_of(recorded, seed=task), **options) == solved(
            shard_of(plain, seed=task), **options
        )
        counts.append(tapes.recorded)
    assert counts == [1 + 3] * 4  # the trial; three steps and one of six examples, and one of two


def test_other_constants_are_other_recordings() -> None:
    tapes = Tapes()
    recorded, plain = nets(network(), tapes)
    for lr in (0.1, 0.2, 0.1):
        how = replace(HOW, lr=lr)
        assert solved(shard_of(recorded), how) == solved(shard_of(plain), how)
    assert tapes.recorded == 1 + 2 * 3


def test_only_so_many_recordings_are_kept() -> None:
    tapes = Tapes()
    recordings, counts = tapes.recordings(), [torch.zeros(()) for _ in range(KEPT + 2)]
    for i, count in enumerate(counts):
        for _ in range(3):
            recordings.run(i, 1, lambda count=count: count.add_(1))  # type: ignore[misc]
    assert tapes.recorded == KEPT + 2
    recordings.run(0, 1, lambda: counts[0].add_(1))
    assert tapes.recorded == KEPT + 3
    assert [float(count) for count in counts[:2]] == [4.0, 3.0]


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("dual", [None, Gaussian(vector(1) - 0.5, 40 * vector(2))])  # h falls below -d/2
@pytest.mark.parametrize("layers", [(), (nn.Dropout(0.5),)])
def test_recorded_ivon_has_the_same_bits(
    samples: int, dual: Gaussian | None, layers: Sequence[nn.Module]
) -> None:
    tapes = Tapes()
    recorded, plain = nets(network(*layers), tapes)
    how = IvonTraining(epochs=3, batch_size=6, samples=samples, cosine_rounds=9)
    options: dict[str, Any] = {
        "how": how,
        "rng": RNG,
        "ess": float(N),
        "dual": dual,
        "h0": 0.1,
        "prior_mean": vector(3),
        "prior_precision": 50 * vector(4) + 50,
        "curvature": True,
    }
    for round in (1, 2):
        moments = IvonMoments(vector(5), 3) if round > 1 else None
        options |= {"round": round, "moments": moments}
        fits = [ivon(shard_of(net), vector(6), **options) for net in (recorded, plain)]
        assert values(fits[0]) == values(fits[1])
        assert [p.tolist() for p in vars(fits[0].solution).values()] == [
            p.tolist() for p in vars(fits[1].solution).values()
        ]
    assert tapes.repeated


@pytest.mark.parametrize("anchor", [None, vector(2)])
def test_recorded_corrected_sgd_has_the_same_bits(anchor: Tensor | None) -> None:
    tapes = Tapes()
    recorded, plain = nets(network(), tapes)
    for share in (0.5, 0.25):
        options: dict[str, Any] = {"share": share, "constant": vector(3), "anchor": anchor}
        how = LocalSGD(epochs=3, batch_size=6)
        fits = [
            corrected_sgd(shard_of(net), vector(6), how=how, rng=RNG, round=1, **options)
            for net in (recorded, plain)
        ]
        assert values(fits[0]) == values(fits[1])
    assert tapes.repeated


def test_dropout_and_smoothing_are_recorded() -> None:
    tapes = Tapes()
    recorded, plain = nets(network(nn.Dropout(0.5)), tapes)
    for smoothing in (None, Smoothing(100.0, 2)):
        assert solved(shard_of(recorded), smoothing=smoothing) == solved(shard_of(plain), smoothing=smoothing)
    assert tapes.repeated
    assert recorded.recordings is not None and not recorded.recordings.refusals


class OwnDraws(nn.Module):
    """A module that draws from torch's default generator."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(()) if self.training else x


class Asks(nn.Module):
    """A module whose forward pass depends on a number of the device."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.detach().sum()) > 0 else x


class Counts(nn.Module):
    """A module that is not the same at every call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Plain(nn.Module):
    """A module of one's own that can be recorded."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (OwnDraws(), "draws from torch's own generators"),
        (nn.AlphaDropout(0.5), "draws from torch's own generators"),
        (Asks(), "asks its device"),
        (Counts(), "other bits"),
    ],
)
def test_what_a_trial_refuses_is_computed_as_it_comes(
    layer: nn.Module, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tapes = Tapes()
    recorded, plain = nets(network(layer), tapes)
    for _ in range(2):
        as_it_comes, reference = solved(shard_of(recorded)), solved(shard_of(plain))
        if not isinstance(layer, Counts):
            assert as_it_comes == reference
    assert not tapes.repeated or isinstance(layer, Counts)
    assert capsys.readouterr().out.count(why) == 1  # once


def test_a_module_of_ones_own_is_recorded_if_its_bits_are_the_same() -> None:
    tapes = Tapes()
    recorded, plain = nets(network(Plain()), tapes)
    assert recorded.stochastic
    assert solved(shard_of(recorded)) == solved(shard_of(plain))
    assert tapes.repeated
    assert not recorded.stochastic  # it was seen not to draw


def test_steps_that_python_follows_are_not_recorded() -> None:
    tapes, seen = Tapes(), []
    recorded, plain = nets(network(), tapes)
    watch = lambda inputs, targets: seen.append(len(targets))  # noqa: E731
    assert solved(shard_of(recorded), watch=watch) == solved(shard_of(plain), watch=watch)
    assert not tapes.recorded
    assert len(seen) == 2 * HOW.steps(N)


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
    recordings, rows = Tapes().recordings(), torch.tensor([1, 2])
    recordings.run("key", 1, lambda: work(rows))
    with pytest.raises(AssertionError, match=why):
        recordings.run("key", 1, lambda: work(rows))


def test_every_repetition_is_announced() -> None:
    """A worker's heartbeat is a hook of the forward pass, which Python does not see in a repetition."""
    heard: list[int] = []
    tapes = Tapes()
    recorded, _ = nets(network(), tapes)
    assert recorded.recordings is not None
    recorded.recordings.before = lambda: heard.append(1)
    solved(shard_of(recorded))
    assert len(heard) == tapes.repeated - 2  # two repetitions are of the trial


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

    def register_generator_state(self, generator: torch.Generator) -> None:
        assert "captures" not in self.graphs.calls[-1:], "a generator is registered before the capture"
        self.graphs.calls.append("registers a generator")

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
    monkeypatch.setattr("fedsim.learning.recordings.torch.cuda", graphs)
    record = cuda_graphs()
    for _ in range(3):
        repeat = record(lambda: torch.ones(()), (torch.Generator(),))
        repeat()
        del repeat
    expected = [
        *("registers a generator", "side waits for main", "captures", "has captured"),
        *("main waits for side", "replays", "replays"),
    ]
    assert graphs.calls == 3 * expected


def test_a_buffer_that_moves_drops_the_recordings() -> None:
    tapes = Tapes()
    recordings = tapes.recordings()
    rows = recordings.hold_rows("rows", torch.tensor([1.0, 2.0]))
    total = torch.zeros(())
    for _ in range(2):
        recordings.run("sum", 1, lambda: total.add_(rows.sum()))
    assert recordings.hold_rows("rows", torch.tensor([3.0])) is rows
    recordings.run("sum", 1, lambda: total.add_(rows.sum()))
    assert (tapes.recorded, float(total)) == (1, 3.0 + 3.0 + 5.0)
    longer = recordings.hold_rows("rows", torch.tensor([1.0, 1.0, 1.0]))
    recordings.run("sum", 1, lambda: total.add_(longer.sum()))
    assert (tapes.recorded, float(total)) == (2, 14.0)
