"""Lanes: the bits of a client depend on how many lanes there are, and on nothing else that is in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsim.errors import UsageError
from fedsim.experiment import Experiment, build_algorithm, convert
from fedsim.learning.lanes import Lanes
from fedsim.learning.likelihoods import likelihood
from fedsim.learning.models.paper_models import logistic, mlp
from fedsim.learning.params import Net
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.learning.solvers.ivon import IvonTraining
from fedsim.learning.solvers.ivon_opt import ivon_opt
from fedsim.learning.stacked import Group, Part, StackedNet, check_lanes, groups_of
from fedsim.problem import Problem
from fedsim.seeds import RandomStream
from protocols import find
from tests.support.tolerances import gamma, loss_gradient, moved

SHAPE, CLASSES, ROWS = (1, 9, 9), 5, 7


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.GroupNorm(1, 3),
        nn.Flatten(),
        nn.Linear(27, 11),
        nn.Tanh(),
        nn.LayerNorm(11),
        nn.Linear(11, classes, bias=False),
    )


MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "logistic": logistic(bias=True),
    "mlp_small": mlp((100,), nn.ReLU),
    "odd sizes": mlp((33, 13), nn.Tanh),
    "sigmoid": mlp((21, 10), nn.Sigmoid),
    "cnn": cnn,
}


def net_of(model: str, kind: str = "categorical") -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = MODELS[model](SHAPE, CLASSES)
    if model == "logistic":
        nn.init.normal_(module[-1].weight, generator=torch.Generator().manual_seed(1))  # type: ignore[index]
    return Net(module, likelihood=likelihood(kind))


def part(lane: int, rows: int, seed: int, kind: str = "categorical") -> Part:
    """A batch; some inputs are 0 in all examples, as in images."""
    draws = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, *SHAPE, generator=draws)
    inputs[..., 0] = 0
    targets = torch.randint(CLASSES, (rows,), generator=draws)
    if kind == "bernoulli":
        targets = torch.randint(2, (rows, CLASSES), generator=draws).byte()
    if kind == "gaussian":
        targets = torch.randn(rows, CLASSES, generator=draws)
    return Part(lane, inputs, targets, 1.0 + seed % 3)


def weights_of(net: Net, seed: int) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return net.snapshot() + 0.1 * torch.randn(net.layout.size, generator=draws)


class Launches:
    """The stack of a model with L lanes, of which a launch uses some."""

    def __init__(self, model: str, lanes: int, kind: str = "categorical") -> None:
        self.net = net_of(model, kind)
        self.lanes = Lanes(self.net, lanes, ROWS)
        self.stack: StackedNet = self.lanes._stack((ROWS, *SHAPE))

    def gradient(self, *parts: tuple[Part, int]) -> dict[int, tuple[bytes, bytes]]:
        """The bits of loss and gradient by lane; parts: with the seeds of their weights."""
        nets = [lane.net for lane in self.lanes._lanes]
        for one, seed in parts:
            nets[one.lane].load(weights_of(self.net, seed))
            nets[one.lane].train()
        losses = self.stack.gradient([one for one, _ in parts])
        return {
            one.lane: (loss.numpy().tobytes(), nets[one.lane].grads.numpy().tobytes())
            for (one, _), loss in zip(parts, losses, strict=True)
        }


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("lanes", [1, 2, 8, 64])
@settings(deadline=None, derandomize=True, database=None, max_examples=12)
@given(data=st.data())
def test_a_lanes_bits_do_not_depend_on_its_neighbours_nor_on_its_place(
    model: str, lanes: int, data: st.DataObject
) -> None:
    """A client alone in fresh lanes, and again in another lane, full or empty ones beside it, after launches
    that have left other clients' numbers everywhere."""
    places, rows = st.integers(0, lanes - 1), st.integers(1, ROWS)
    mine, seed = data.draw(rows, "rows"), data.draw(st.integers(0, 99), "seed")
    there = data.draw(places, "lane alone")
    alone = Launches(model, lanes).gradient((part(there, mine, seed), seed))[there]
    full = Launches(model, lanes)
    for _ in range(data.draw(st.integers(1, 3), "launches")):
        here = data.draw(places, "lane")
        others = data.draw(st.sets(places), "others") - {here}
        parts = [(part(i, data.draw(rows), 100 + i), 200 + i) for i in sorted(others)]
        parts.insert(data.draw(st.integers(0, len(parts))), (part(here, mine, seed), seed))
        assert full.gradient(*parts)[here] == alone


@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "gaussian"])
@pytest.mark.parametrize("model", MODELS)
def test_a_launch_computes_what_every_network_would(model: str, kind: str) -> None:
    launches = Launches(model, 5, kind)
    parts = [(part(lane, rows, lane, kind), lane) for lane, rows in ((0, ROWS), (1, 1), (3, ROWS), (4, 4))]
    launches.gradient(*parts)
    for one, seed in parts:
        alone, lane = net_of(model, kind), launches.lanes._lanes[one.lane].net
        alone.load(weights_of(alone, seed))
        loss = alone.loss_gradient(one.inputs, one.targets, one.weight)
        (mine,) = [
            each
            for (other, _), each in zip(parts, launches.stack.gradient([p for p, _ in parts]), strict=True)
            if other.lane == one.lane
        ]
        together, single = (torch.cat([x[None], n.grads]) for x, n in ((mine, lane), (loss, alone)))
        exact = loss_gradient(alone, one.targets, one.weight)
        # forwards and backwards through sums of 81 and 100 terms, a sum over ROWS, some forty operations
        error = moved(exact, alone.weights, one.inputs, roundings=2 * (81 + 100) + ROWS + 40)
        assert float((together - single).norm()) < 2 * error < 1e-3 * float(single.norm())


def test_which_layers_are_batched() -> None:
    def described(model: nn.Module) -> list[tuple[bool, list[str]]]:
        return [(g.batched, [type(layer).__name__ for _, layer in g.layers]) for g in groups_of(model)]

    assert described(cnn(SHAPE, CLASSES)) == [
        (False, ["Conv2d", "ReLU", "MaxPool2d", "GroupNorm", "Flatten"]),
        (True, ["Linear"]),
        (True, ["Tanh"]),
        (False, ["LayerNorm"]),
        (True, ["Linear"]),
    ]
    dense = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 2))
    assert all(group.batched for group in groups_of(dense))
    assert [name for group in groups_of(dense) for name, _ in group.layers] == ["0", "1.0", "1.1", "2"]
    dense[2].bias.requires_grad_(False)  # type: ignore[union-attr, operator]
    assert groups_of(dense)[-1] == Group(False, [("2", dense[2])])
    assert described(nn.Linear(3, 2)) == [(True, ["Linear"])]


# ---- whole local trainings


def shards(net: Net, sizes: tuple[int, ...]) -> list[Shard]:
    parts = [part(0, size, 7 + k) for k, size in enumerate(sizes)]
    return [Shard(net, p.inputs, p.targets, 1.0) for p in parts]


SIZES = (23, 5, 14, 1, 30, 7, 14)


def together(lanes: Lanes, jobs: list[Callable[[], Any]]) -> list[Any]:
    """Results of jobs in their order, each started as soon as a lane is free."""
    waiting, results = list(enumerate(jobs)), {}
    while waiting or lanes.busy:
        while waiting and lanes.free:
            k, job = waiting.pop(0)
            lanes.start(lambda k=k, job=job: (k, job()))  # type: ignore[misc]
        results.update(lanes.advance())
    return [results[k] for k in range(len(jobs))]


def trainings(net: Net, lanes: Lanes | None, **how: Any) -> list[Callable[[], Any]]:
    start = net.snapshot()

    def job(k: int) -> Callable[[], Any]:
        def run() -> Any:
            own = net if lanes is None or lanes.current is None else lanes.current
            shard = shards(own, SIZES)[k]
            rng = RandomStream(5, "test", 1, k)
            fit = minimise(shard, start, how=LocalTraining(**how), rng=rng, round=1)
            curvature = shard.curvature(fit.solution, "exact", rng)
            return fit.solution, curvature, shard.gradient(fit.solution), torch.tensor(fit.loss)

        return run

    return [job(k) for k in range(len(SIZES))]


@pytest.mark.parametrize("model", ["mlp_small", "cnn"])
@pytest.mark.parametrize("count", [2, 3, 10])
def test_clients_together_have_the_bits_of_one_alone(model: str, count: int) -> None:
    net = net_of(model)
    lanes = Lanes(net, count, max(SIZES))
    jobs = trainings(net, lanes, epochs=2, batch_size=8, lr=0.01)
    results = together(lanes, jobs)
    fresh = Lanes(net, count, max(SIZES))
    for k, job in enumerate(trainings(net, fresh, epochs=2, batch_size=8, lr=0.01)):
        for mine, alone in zip(results[k], fresh.alone(job), strict=True):
            assert torch.equal(mine, alone)
    for mine, plain in zip(results, trainings(net, None, epochs=2, batch_size=8, lr=0.01), strict=True):
        for value, expected in zip(mine, plain(), strict=True):
            # eight steps, each with sums of 81, 100 and 8 terms, twice, and some forty operations
            assert float((value - expected).norm()) < gamma(8 * 420) * float(expected.norm())


def test_batches_of_different_sizes_are_different_launches() -> None:
    """Each task's launches have the shape of its own batches, so that a client of another task in the lanes
    changes nothing."""
    net = net_of("mlp_small")
    lanes = Lanes(net, 4, max(SIZES))
    small, large = (trainings(net, lanes, epochs=2, batch_size=size) for size in (3, 8))
    mixed = together(lanes, [*small[:4], *large[:4]])
    alone = [lanes.alone(job) for job in (*small[:4], *large[:4])]
    assert all(
        torch.equal(a, b) for x, y in zip(mixed, alone, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_an_evaluation_is_computed_as_without_lanes() -> None:
    net = net_of("mlp_small")
    lanes, weights = Lanes(net, 3, 30), weights_of(net, 1)

    def values(own: Net) -> list[Tensor]:
        shard = shards(own, (30,))[0]
        rng = RandomStream(0, "test")
        return [shard.gradient(weights), shard.curvature(weights, "exact", rng), shard.mean_fisher(weights)]

    in_lane = lanes.alone(lambda: values(lanes.current or net))
    assert all(torch.equal(a, b) for a, b in zip(in_lane, values(net), strict=True))


def test_a_lane_has_the_modes_and_the_generator_of_its_own() -> None:
    """A lane that stops under no_grad, or has seeded torch's generator, leaves them to itself."""
    net = net_of("mlp_small")
    lanes, seen = Lanes(net, 2, 30), []

    def job(seed: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            own = lanes.current
            assert own is not None
            own.load(net.snapshot())
            own.train()
            own.expect(ROWS)
            given = part(0, ROWS, 1)
            torch.manual_seed(seed)
            with torch.set_grad_enabled(seed % 2 == 0):
                own.loss_gradient(given.inputs, given.targets, 1.0)
                seen.append(torch.is_grad_enabled() is (seed % 2 == 0))
                return torch.rand(3)

        return run

    before = torch.get_rng_state()
    results = together(lanes, [job(1), job(2), job(3)])
    assert torch.equal(torch.get_rng_state(), before) and torch.is_grad_enabled() and seen == [True] * 3
    for seed, result in zip((1, 2, 3), results, strict=True):
        assert torch.equal(result, torch.rand(3, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.filterwarnings("ignore")
def test_the_package_ivon_opt_in_lanes() -> None:
    """It draws from torch's own generator, which clients would otherwise share."""
    net = net_of("mlp_small")
    lanes = Lanes(net, 3, max(SIZES))

    def job(k: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            shard = shards(lanes.current or net, SIZES)[k]
            start, how = net.snapshot(), IvonTraining(epochs=1, batch_size=8)
            rng = RandomStream(0, "test", 1, k)
            fit = ivon_opt(
                shard,
                start,
                how=how,
                rng=rng,
                round=1,
                curvature=torch.ones_like(start),
                delta=1.0,
                ess=10.0,
            )
            return fit.solution.mean

        return run

    jobs = [job(k) for k in range(len(SIZES))]
    for mine, one in zip(together(lanes, jobs), jobs, strict=True):
        assert torch.equal(mine, lanes.alone(one))


def test_an_error_is_one_lanes_alone() -> None:
    net = net_of("mlp_small")
    lanes = Lanes(net, 3, max(SIZES))
    jobs = trainings(net, lanes, epochs=1, batch_size=8)[:2]

    def bad() -> None:
        raise ValueError("of this client")

    alone = [lanes.alone(job) for job in jobs]
    lanes.start(jobs[0])
    lanes.start(bad)
    lanes.start(jobs[1])
    with pytest.raises(ValueError, match="of this client"):
        lanes.advance()
    assert lanes.free
    ended: list[Any] = []
    while lanes.busy:
        ended += lanes.advance()
    assert sorted(float(r[-1]) for r in ended) == sorted(float(r[-1]) for r in alone)


def test_jobs_that_are_given_up_clean_up_behind_themselves() -> None:
    net = net_of("mlp_small")
    lanes, closed = Lanes(net, 2, max(SIZES)), []

    def job() -> None:
        try:
            trainings(net, lanes, epochs=1, batch_size=8)[0]()
        finally:
            closed.append(True)

    lanes.start(job)
    assert lanes.advance() == [] and lanes.busy
    lanes.close()
    assert closed == [True] and not lanes.busy


def test_lanes_share_what_is_not_trained() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(81, 9), nn.BatchNorm1d(9), nn.Linear(9, CLASSES))
    for frozen in (module[1], module[2]):
        frozen.requires_grad_(False)
    net = Net(module)
    lanes = Lanes(net, 3, max(SIZES))
    for lane in lanes._lanes:
        own = lane.net.module
        assert isinstance(own, nn.Sequential) and own[1].weight is module[1].weight
        assert own[2].running_mean is module[2].running_mean and own[3].weight is not module[3].weight
    jobs = trainings(net, lanes, epochs=1, batch_size=8)
    before = module[2].running_mean.clone()  # type: ignore[union-attr, operator]
    for mine, one in zip(together(lanes, jobs), jobs, strict=True):
        assert torch.equal(mine[0], lanes.alone(one)[0])
    assert torch.equal(module[2].running_mean, before)  # type: ignore[arg-type]


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "resnet20"}, "module of its own"),
        ({"threads": 2}, "--threads 1"),
        ({"lanes": 0}, "lanes = 0: must be a whole number of at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    def build() -> Problem:
        experiment = convert(Experiment, {"algo": "fedavg", "lanes": 2} | changes, "test")
        return Problem.build(experiment, build_algorithm(find("fedavg"), {}), None)

    with pytest.raises(UsageError, match=message):
        build()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(81, 9), nn.Dropout(0.5)), "random numbers"),
        (nn.Sequential(nn.Conv2d(1, 3, 9), nn.Flatten()), "no trained Linear layer"),
    ],
)
def test_models_without_a_gain_are_refused(module: nn.Module, message: str) -> None:
    check_lanes(Net(module), 1, 4)
    with pytest.raises(UsageError, match=message):
        check_lanes(Net(module), 2, 1)
