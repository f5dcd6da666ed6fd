"""Running statistics of batch normalisation: averaged, kept by clients, or frozen (--statistics)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.errors import FedsimError, UsageError
from fedsim.event_trigger import _zero
from fedsim.learning.gaussian import Gaussian, Normalised, Point, taken_apart
from fedsim.learning.params import Net
from fedsim.problem import Problem
from fedsim.running_statistics import FIELD
from launch.runs.summary import digest_of, stored_model_digest, write_model
from protocols import find
from tests.support.harness import carried, play, problem_of
from tests.support.tolerances import gamma
from workers.protocol_messages import to_evaluate, to_score

MODEL = """
from collections import OrderedDict
from torch import nn

def net(shape, classes):
    return nn.Sequential(OrderedDict(
        flatten=nn.Flatten(), hidden=nn.Linear(64, 6), norm=nn.BatchNorm1d(6), act=nn.ReLU(),
        out=nn.Linear(6, classes)))

class Own(nn.BatchNorm1d):
    pass

def instances(shape, classes):
    return nn.Sequential(OrderedDict(
        conv=nn.Conv2d(1, 3, 3, stride=2), norm=nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        flatten=nn.Flatten(), out=nn.Linear(27, classes)))

def own(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), Own(6), nn.Linear(6, classes))

def convolutions(shape, classes):
    return nn.Sequential(OrderedDict(
        conv=nn.Conv2d(1, 3, 3, stride=2), norm=nn.BatchNorm2d(3), act=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), out=nn.Linear(3, classes)))
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Problem]:
    file = tmp_path_factory.mktemp("nets") / "nets.py"
    file.write_text(MODEL)

    def build(algo: str, rule: str, model: str = "net", **changes: Any) -> Problem:
        return problem_of(find(algo), model=f"{file}:{model}", statistics=rule, fraction=0.1, **changes)

    return build


def exchange(problem: Problem, *clients: int) -> tuple[Any, Any, list[Any], list[Any]]:
    """The server before a first exchange, the broadcast, and drafts and uploads of these clients."""
    algorithm, ctx = problem.algorithm, problem.context(1, 1, asked=len(clients))
    server = algorithm.server_init(ctx)
    down = algorithm.broadcast(server, ctx)
    results = [
        algorithm.client_update(algorithm.client_init(ctx, k), down, problem.shard(k), problem.task(1, 1, k))
        for k in clients
    ]
    return server, down, [draft for draft, _ in results], [up for _, up in results]


def test_averaged_statistics_are_the_weighted_mean_of_those_that_are_sent(build: Any) -> None:
    problem = build("fedavg", "average")
    server, down, _, ups = exchange(problem, 0, 2)
    assert torch.equal(getattr(down, FIELD), problem.statistics)
    sent = [getattr(up, FIELD).double() for up in ups]
    assert not torch.equal(sent[0], sent[1])
    sizes = [problem.sizes[k] for k in (0, 2)]
    mean = sum(n * s for n, s in zip(sizes, sent, strict=True)) / sum(sizes)
    ctx = problem.context(1, 1, asked=2)
    arrivals = [ctx.arrival(k, down, up) for k, up in zip((0, 2), ups, strict=True)]
    after = problem.algorithm.server_update(server, down, arrivals, ctx)
    assert torch.equal(after.statistics, mean.float())
    assert torch.equal(taken_apart(problem.algorithm.model(after, ctx))[1], after.statistics)


def test_weights_of_uploads_are_those_of_their_statistics(build: Any) -> None:
    """N_k times the upload's weight, of stale uploads and wherever uploads are folded one by one."""
    problem = build("fedlap", "average")
    algorithm, ctx, k, weights = problem.algorithm, problem.context(1, 1, asked=3), range(3), (1.0, 0.25, 0.5)
    server, down, _, ups = exchange(problem, *k)
    sent = [getattr(up, FIELD).double() for up in ups]
    factors = [n * w for n, w in zip(problem.sizes, weights, strict=True)]
    mean = sum(f * s for f, s in zip(factors, sent, strict=True)) / sum(factors)
    arrivals = (ctx.arrival(i, down, ups[i], weights[i]) for i in k)
    assert torch.equal(algorithm.server_update(server, down, arrivals, ctx).statistics, mean.float())


@pytest.mark.parametrize("algo", ["fedavg", "fedlap", "fedlap_cov"])
def test_sums_of_edge_servers_give_the_same_statistics(algo: str, build: Any) -> None:
    problem = build(algo, "average", "convolutions")
    algorithm, ctx = problem.algorithm, problem.context(1, 1, asked=3)
    server, down, _, ups = exchange(problem, 0, 1, 2)
    arrivals = [ctx.arrival(k, down, up) for k, up in enumerate(ups)]
    whole = algorithm.server_update(server, down, arrivals, ctx)
    after = algorithm.server_update(server, down, arrivals, replace(ctx, edge_of=(0, 1, 1).__getitem__))
    # float64 sums in another order, each rounded to float32
    assert torch.allclose(after.statistics, whole.statistics, rtol=2**-23, atol=0)
    mean, expected = (algorithm.model(s, ctx).mean.double() for s in (after, whole))
    assert (mean - expected).norm() <= 2**-22 * expected.norm()


def test_local_statistics_stay_with_their_client(build: Any) -> None:
    problem = build("fedavg", "local")
    _, down, drafts, ups = exchange(problem, 0, 1)
    assert not hasattr(down, FIELD)
    assert not any(hasattr(up, FIELD) for up in ups)
    assert not torch.equal(drafts[0].statistics, drafts[1].statistics)
    problem.net.statistics.fill_(7.0)  # another client's
    task = problem.task(2, 1, 0)
    after, _ = problem.algorithm.client_update(drafts[0], down, problem.shard(0), task)
    problem.net.statistics.fill_(3.0)
    again, _ = problem.algorithm.client_update(drafts[0], down, problem.shard(0), task)
    assert torch.equal(after.statistics, again.statistics)


def test_frozen_statistics_are_those_of_the_start_and_the_layer_trains(build: Any) -> None:
    problem = build("fedavg", "frozen")
    assert len(problem.statistics) == 0
    assert problem.frozen_digest
    _, _, _, ups = exchange(problem, 0)
    norm = problem.net.module.norm
    assert norm.running_mean.eq(0).all()
    assert norm.running_var.eq(1).all()
    moved = problem.net.layout.unflatten(ups[0].mean - problem.start)
    assert moved["norm.weight"].abs().max() > 0


@pytest.mark.parametrize("rule", ["average", "local", "frozen"])
@pytest.mark.parametrize("algo", ["mime", "fedlap_cov", "ivon_admm"])
def test_a_run_keeps_the_duals_under_every_rule(algo: str, rule: str, build: Any, tmp_path: Path) -> None:
    """mime has two exchanges, fedlap_cov curvature, and the last a posterior that is sampled."""
    problem = build(algo, rule, "convolutions", eval_samples=2)
    run = play(problem, tmp_path / "run")
    mismatch = problem.algorithm.dual_mismatch(run.outcome.server, run.states)
    assert mismatch is None or mismatch <= 1e-12
    write_model(tmp_path / "model.safetensors", problem, run.outcome.model)
    stored = stored_model_digest(tmp_path / "model.safetensors", problem.net.layout, problem.net.running)
    assert stored == digest_of(run.outcome.model)


def test_a_model_is_evaluated_with_its_statistics(build: Any) -> None:
    problem = build("fedavg", "average")
    plain = Gaussian.at(problem.start, torch.full_like(problem.start, 4.0))
    statistics = problem.statistics + 0.5
    model = Normalised(plain, statistics)
    for samples in (0, 3):
        message = to_evaluate(model, samples)
        received = to_score(carried(message, problem, "down"))
        assert torch.equal(received.statistics, statistics)
        assert isinstance(received.model, Gaussian if samples else Point)
    score = problem.evaluation.score(model, 0, 1)
    problem.net.statistics.fill_(2.0)
    assert problem.evaluation.score(model, 0, 1) == score
    assert problem.evaluation.score(Normalised(plain, problem.statistics), 0, 1) != score


def test_without_statistics_of_the_server_evaluation_uses_those_of_its_batch(build: Any) -> None:
    problem = build("fedavg", "local")
    before = problem.net.statistics.clone()
    inputs = torch.randn(9, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    net, module = problem.net, problem.net.module
    logits = net.logits(problem.start, inputs, of_batch=True)
    hidden = module.hidden(inputs.flatten(1))
    normal = F.batch_norm(hidden, None, None, module.norm.weight, module.norm.bias, training=True)
    expected = module.out(normal.relu()).detach()
    assert (logits - expected).norm() <= gamma(1000) * expected.norm()
    assert torch.equal(net.statistics, before)
    problem.net.statistics.fill_(2.0)
    score = problem.evaluation.score(Point(problem.start), 0, 1)
    problem.net.statistics.fill_(3.0)
    assert problem.evaluation.score(Point(problem.start), 0, 1) == score


def test_a_batch_of_one_example_uses_the_running_statistics() -> None:
    net = Net(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), statistics="local")
    inputs, targets = torch.ones(1, 3), torch.zeros(1).long()
    net.train()
    before = net.statistics.clone()
    net.loss_gradient(inputs, targets, 1.0)
    assert torch.equal(net.statistics, before)
    net.loss_gradient(inputs.expand(2, 3), targets.expand(2), 1.0)
    assert not torch.equal(net.statistics, before)
    assert net.module.get_buffer("1.running_mean").data_ptr() == net.statistics.data_ptr()


def test_steps_that_change_statistics_are_not_recorded(build: Any) -> None:
    problem = build("fedavg", "local")
    assert problem.net.trial(problem.shard(0), 4) == "it has running statistics, which every step changes"


def test_a_client_that_sends_nothing_leaves_the_statistics_as_they_are(build: Any) -> None:
    problem = build("fedavgm", "average", participation="full+event:norm:50%")
    algorithm = problem.algorithm
    down = algorithm.broadcast(algorithm.server_init(problem.context(1, 1)), problem.context(1, 1))
    zero = _zero(algorithm.exchanges[0].up, down, problem.start)
    assert torch.equal(getattr(zero, FIELD), getattr(down, FIELD))
    assert zero.delta.eq(0).all()


@pytest.mark.parametrize(
    ("algo", "changes", "reason"),
    [
        ("fedavg", {"codecs": {"running_statistics": "bf16"}}, "variances must stay positive"),
        ("fedlap_cov", {"model": "own"}, "diagonal_ggn cannot handle layer '2' .Own."),
    ],
)
def test_what_cannot_be_is_refused(
    algo: str, changes: dict[str, Any], reason: str, build: Any, tmp_path: Path
) -> None:
    with pytest.raises(FedsimError, match=reason):
        play(build(algo, "average", **changes), tmp_path / "run")


def test_a_model_without_statistics_needs_no_option() -> None:
    with pytest.raises(UsageError, match="no trained layer with running statistics; leave it out"):
        problem_of(find("fedavg"), statistics="average")


@pytest.mark.parametrize(
    ("method", "others"),
    [
        *(("broadcast", 1), ("broadcast_to", 2), ("server_update", 3), ("model", 1), ("report", 1)),
    ],
)
def test_a_server_without_statistics_does_not_compute_on_the_network(
    method: str, others: int, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = build("fedlap_func", "local")
    computes: Any = lambda *arguments: arguments[-1].net  # noqa: E731
    monkeypatch.setattr(type(problem.algorithm.unwrapped), method, computes)
    with pytest.raises(UsageError, match="the server of fedlap_func computes with the network"):
        getattr(problem.algorithm, method)(*[None] * others, problem.context(1, 1))


@pytest.mark.parametrize("rule", ["average", "local", "frozen"])
def test_statistics_of_instance_normalisation_follow_the_rule(rule: str, build: Any, tmp_path: Path) -> None:
    problem = build("fedavg", rule, "instances")
    assert len(problem.statistics) == (0 if rule == "frozen" else 6)
    run = play(problem, tmp_path / "run")
    moved = [taken_apart(run.outcome.model)[1]] if rule == "average" else []
    moved += [client.statistics for client in run.states] if rule == "local" else []
    assert all(not torch.equal(s, problem.statistics) for s in moved)
    norm = problem.net.module.norm
    assert rule != "frozen" or (norm.running_mean.eq(0).all() and norm.running_var.eq(1).all())
    with pytest.raises(UsageError, match=r"running statistics\) in norm.*--statistics average"):
        build("fedavg", "", "instances")


def test_statistics_without_a_momentum_are_refused() -> None:
    module = nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(2, momentum=None), out=nn.Linear(2, 2)))
    with pytest.raises(UsageError, match="in norm are averages over all batches"):
        Net(module, statistics="average")


def test_constant_buffers_are_no_statistics_under_any_rule() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.norm = nn.Parameter(torch.ones(2)), nn.BatchNorm1d(2)
            self.register_buffer("scale", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) * self.weight

    for rule in ("average", "local", "frozen"):
        net = Net(Scaled(), statistics=rule)
        assert [part.name for part in net.running.slices] == (
            [] if rule == "frozen" else ["norm.running_mean", "norm.running_var"]
        )
