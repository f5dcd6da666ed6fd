"""FedLap-Func on a real network: FedLap without memory, what crosses the wire once, the function terms.

Logistic regression on digits, 3 clients, one local epoch, through the coordinator and the encoded wire.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.experiment import Experiment, build_algorithm
from fedsim.learning.function_space import FunctionTerm, Memory
from fedsim.participation import Participation
from fedsim.problem import Problem
from protocols._memory import Down, LabelledDown, Registry, function_term
from protocols.fedlap import FedLap
from protocols.fedlap_func import FedLapFunc
from tests.support.harness import CLIENTS, Run, listed, play, steps
from tests.support.tolerances import moved
from workers.assembly import fix_numerics

P, CLASSES, INPUTS = 640, 10, 64
F16 = {"down.logits": "f16"}
EVERYONE = Participation((0, 1, 2))
ROUGH = (
    Participation((0, 1)),
    Participation((0, 1, 2), frozenset({1})),
    Participation((2,)),
    Participation((0, 1, 2), frozenset({0})),
    EVERYONE,
)
"""Partial participation and lost uploads."""


@pytest.fixture(scope="module", autouse=True)
def _numerics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    threads = torch.get_num_threads()
    fix_numerics(1, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def problem_of(
    algorithm: type[Any] = FedLapFunc, rounds: int = 2, codecs: dict[str, str] | None = None, **settings: Any
) -> Problem:
    short = {"epochs": 1} | ({"server_steps": 5} if algorithm is FedLapFunc else {}) | settings
    experiment = Experiment(
        algo=algorithm.name,
        model="logistic",
        clients=CLIENTS,
        rounds=rounds,
        hyperparameters=short,
        codecs=codecs or {},
    )
    return Problem.build(experiment, build_algorithm(algorithm, short), None)


def played(
    folder: Path, *participations: Participation, algorithm: type[Any] = FedLapFunc, **settings: Any
) -> Run:
    return play(problem_of(algorithm, len(participations), **settings), folder, listed(*participations))


def present(problem: Problem, k: int) -> Counter[int]:
    """Examples of every class on client k."""
    return Counter(problem.shard(k).targets.tolist())


def rows(run: Run, direction: str, field: str) -> dict[tuple[int, int], int]:
    """Bytes of a field's values by (round, client)."""
    return {
        (e.round, e.client): e.bytes
        for e in run.entries
        if e.kind == "algorithm" and (e.direction, e.field, e.layer) == (direction, field, "values")
    }


# ---- without memory it is FedLap


@pytest.mark.parametrize("without", [{"points_per_class": 0}, {"tau": 0.0}], ids=str)
@pytest.mark.parametrize("participations", [(EVERYONE,) * 3, ROUGH], ids=["full", "rough"])
def test_without_points_or_temperature_it_is_fedlap_bit_for_bit(
    without: dict[str, Any], participations: tuple[Participation, ...], tmp_path: Path
) -> None:
    ours = played(tmp_path / "func", *participations, **without)
    theirs = played(tmp_path / "fedlap", *participations, algorithm=FedLap)
    assert ours.bits[0] == theirs.bits[0]  # the digest of the model
    assert torch.equal(ours.outcome.server.dual, theirs.outcome.server.dual)
    for mine, other in zip(ours.states, theirs.states, strict=True):
        assert torch.equal(mine.dual, other.dual)
        assert torch.equal(mine.moments.first, other.moments.first)
    assert [m["test_nll"] for m in ours.metrics] == [m["test_nll"] for m in theirs.metrics]
    if without == {"points_per_class": 0}:
        assert {m.get("memory_points", 0.0) for m in ours.metrics} == {0.0}
        assert set(rows(ours, "up", "inputs").values()) <= {0}
        assert not rows(ours, "down", "inputs")
    with_memory = played(tmp_path / "memory", *participations)
    assert with_memory.bits[0] != theirs.bits[0]


# ---- what crosses the wire once


def test_own_memory_goes_up_once_and_again_only_after_a_loss(tmp_path: Path) -> None:
    run = played(tmp_path / "run", *ROUGH)
    size = {k: INPUTS * len(present(run.problem, k)) for k in range(CLIENTS)}  # one byte a pixel
    # client 0 and 1 arrive in round 1; client 2 in round 2; later losses lost no memory
    assert rows(run, "up", "inputs") == {(1, 0): size[0], (1, 1): size[1], (2, 2): size[2]}
    lossy = played(
        tmp_path / "lossy",
        Participation((0, 1, 2), frozenset({1})),
        Participation((0, 1, 2), frozenset({1, 2})),
        EVERYONE,
        EVERYONE,
    )
    sent = {(r, 1) for r in (1, 2, 3)} | {(1, 0), (1, 2)}
    assert rows(lossy, "up", "inputs") == {(r, k): size[k] for r, k in sent}
    assert rows(lossy, "up", "weights") == {(r, k): 4 * size[k] // INPUTS for r, k in sent}
    assert lossy.metrics[-1]["memory_points"] == sum(size.values()) / INPUTS


@pytest.mark.parametrize(
    "participations",
    [
        (Participation((0,)), Participation((1,)), Participation((2,)), EVERYONE, EVERYONE),
        (
            *(Participation(()), Participation((2,)), Participation((2,)), Participation((0, 1))),
            *(Participation(()), EVERYONE, EVERYONE),
        ),
    ],
    ids=["one by one", "empty rounds"],
)
def test_everybody_gets_everybody_elses_inputs_exactly_once(
    participations: tuple[Participation, ...], tmp_path: Path
) -> None:
    run = played(tmp_path / "run", *participations)
    points = [len(present(run.problem, k)) for k in range(CLIENTS)]
    got: dict[int, int] = defaultdict(int)
    for (_, k), n in rows(run, "down", "inputs").items():
        got[k] += n
    assert got == {k: INPUTS * (sum(points) - points[k]) for k in range(CLIENTS)}
    expected: dict[tuple[int, int], int] = {}
    known: dict[int, set[int]] = {k: set() for k in range(CLIENTS)}
    arrived: set[int] = set()
    for r, participation in enumerate(participations, 1):
        for k in participation.participants:
            fresh = arrived - known[k] - {k}
            known[k] |= fresh
            if fresh:
                expected[r, k] = sum(points[j] for j in fresh)
        arrived |= set(participation.participants)
    assert rows(run, "down", "inputs") == {at: INPUTS * n for at, n in expected.items()}
    assert rows(run, "down", "weights") == {at: 4 * n for at, n in expected.items()}
    assert rows(run, "down", "owners") == {at: 8 * n for at, n in expected.items()}
    for k, state in enumerate(run.states):
        others = [j for j in range(CLIENTS) if j != k]
        assert state.known.held.owners.tolist() == [j for j in others for _ in range(points[j])]
        for j in others:
            memory, held = run.outcome.server.known.points, state.known.held
            assert torch.equal(held.inputs[held.owners == j], memory.inputs[memory.owners == j])


def test_news_is_sent_again_only_after_a_loss(tmp_path: Path) -> None:
    participations = (
        EVERYONE,
        Participation((0, 1, 2), frozenset({2})),
        Participation((0, 1, 2), frozenset({2})),
        EVERYONE,
        EVERYONE,
    )
    run = played(tmp_path / "run", *participations)
    points = [len(present(run.problem, k)) for k in range(CLIENTS)]
    times = {0: [2], 1: [2], 2: [2, 3, 4]}
    assert rows(run, "down", "inputs") == {
        (r, k): INPUTS * (sum(points) - points[k]) for k, rounds in times.items() for r in rounds
    }
    for k, state in enumerate(run.states):
        assert len(state.known.held.owners) == sum(points) - points[k]


# ---- the global labels


@pytest.mark.parametrize("participations", [(EVERYONE,) * 3, ROUGH], ids=["full", "rough"])
def test_sent_labels_give_the_model_of_computed_ones_for_their_bytes(
    participations: tuple[Participation, ...], tmp_path: Path
) -> None:
    computed = played(tmp_path / "computed", *participations)
    sent = played(tmp_path / "sent", *participations, send_global_labels=True)
    ours, theirs = sent.outcome.model.mean, computed.outcome.model.mean
    # Logits of the same rows in another batch are other sums of 64 products. f16 rounds them by 2^-11 of
    # themselves, and less than a tenth of what that does to the model is left for gamma(64) / 2^-11 < 0.01.
    rounded = played(tmp_path / "rounded", *participations, send_global_labels=True, codecs=F16).outcome
    assert float((ours - theirs).norm()) <= 0.1 * float((rounded.model.mean - theirs).norm())
    assert float((rounded.model.mean - theirs).norm()) < 1e-2 * float(theirs.norm())
    points = [int(m.get("memory_points", 0)) for m in computed.metrics]
    assert points[-1] == sum(len(present(computed.problem, k)) for k in range(CLIENTS))
    assert rows(sent, "down", "logits") == {
        (r, k): points[r - 1] * CLASSES * 4 for r, t in enumerate(participations, 1) for k in t.participants
    }
    assert not rows(computed, "down", "logits")

    def envelope(run: Run, r: int, k: int, layers: set[str]) -> int:
        return sum(
            e.bytes
            for e in run.entries
            if (e.kind, e.direction, e.round, e.client) == ("algorithm", "down", r, k) and e.layer in layers
        )

    assert {
        len({envelope(run, 1, k, {"header"}) for k in participations[0].participants})
        for run in (sent, computed)
    } == {1}
    costs = set()
    for r, participation in enumerate(participations, 1):
        for k in participation.participants:
            values = envelope(sent, r, k, {"values"}) - envelope(computed, r, k, {"values"})
            assert values == points[r - 1] * CLASSES * 4
            costs.add(envelope(sent, r, k, {"header"}) - envelope(computed, r, k, {"header"}))
    assert len(costs) == 1 and 0 < costs.pop() < 200  # one more field in the header, always the same
    assert rows(sent, "up", "logits") == rows(computed, "up", "logits")


# ---- memory


@pytest.mark.parametrize("points", [2, 1000])
def test_memory_is_of_every_class_that_a_client_has(points: int) -> None:
    created, servers, _ = steps(problem_of(points_per_class=points))
    problem = problem_of(points_per_class=points)
    for k, step in enumerate(created[:CLIENTS]):
        counts = present(problem, k)
        assert step.up.own is not None
        assert len(step.up.own.weights) == sum(min(points, n) for n in counts.values())
        # float32 weights of up to a thousand points
        assert float(step.up.own.weights.double().sum()) == pytest.approx(problem.sizes[k], rel=1e-6)
        shard = problem.shard(k)
        stored = {bytes(x.numpy()): int(t) for x, t in zip(shard.inputs, shard.targets, strict=True)}
        classes = [stored[bytes(row.contiguous().numpy())] for row in step.up.own.inputs]
        assert Counter(classes) == {c: min(points, n) for c, n in counts.items()}
        assert step.up.logits.shape == (len(classes), CLASSES)
    known = servers[1].known.points
    assert float(known.weights.double().sum()) == pytest.approx(sum(problem.sizes), rel=1e-6)
    assert known.owners.tolist() == sorted(known.owners.tolist())
    assert all(step.up.own is None for step in created[CLIENTS:])


# ---- the function terms


def cross_entropy(labels: Tensor, inputs: Tensor, weights: Tensor, tau: Tensor) -> Tensor:
    """sum_i tau_i l(labels_i, w) of logistic regression without bias, in float64."""
    logs = (inputs.double().flatten(1) / 16 @ weights.reshape(CLASSES, -1).mT).log_softmax(dim=1)
    return -(tau.double() * (labels.double() * logs).sum(dim=1)).sum()


def probabilities(inputs: Tensor, weights: Tensor) -> Tensor:
    return (inputs.double().flatten(1) / 16 @ weights.double().reshape(CLASSES, -1).mT).softmax(dim=1)


def gradient_of(problem: Problem, weights: Tensor, term: FunctionTerm) -> Tensor:
    net = problem.net
    net.load(weights)
    net.module.eval()
    net.grads.zero_()
    term.add_gradient(net)
    return net.grads.clone()


@pytest.mark.parametrize("send", [False, True], ids=["computed", "sent"])
def test_a_clients_terms_are_those_of_the_formula(send: bool) -> None:
    """Round 2: everybody holds all memory; - sum own tau l(yhat_i, w) + sum all tau l(yhat_ig, w)."""
    problem = problem_of(tau=0.7, points_per_class=2, send_global_labels=send)
    algorithm = problem.algorithm
    assert isinstance(algorithm, FedLapFunc)
    created, servers, _ = steps(problem)
    memory = servers[1].known.points
    for k, step in enumerate(created[CLIENTS:]):
        assert isinstance(step.down, LabelledDown if send else Down)
        own = created[k].up.own
        assert own is not None and step.down.news is not None
        known = step.client.known.with_news(step.down.news)
        sent = step.down.logits if isinstance(step.down, LabelledDown) else None
        mine = Memory(own.inputs, own.weights)
        term = function_term(known, mine, step.down.mean, sent, algorithm.tau, step.shard, k)
        assert term is not None
        w = torch.randn(P, generator=torch.Generator().manual_seed(k))

        def formula(w: Tensor, *supplied: Tensor) -> Tensor:
            at, (all_, tau, model, mine, tau_k, model_k) = w.clone().requires_grad_(), supplied
            everywhere = cross_entropy(probabilities(all_, model), all_, at, 0.7 * tau)
            here = cross_entropy(probabilities(mine, model_k), mine, at, 0.7 * tau_k)
            return torch.autograd.grad(everywhere - here, at)[0]

        server, client = (memory.inputs, memory.weights, step.down.mean), (own.inputs, own.weights)
        supplied = (w, *server, *client, created[k].up.mean)
        exact = formula(*(x.double() for x in supplied))
        error = moved(formula, *supplied, roundings=2 * INPUTS + len(memory.weights) + 60)
        assert float(exact.norm()) > 1
        assert float((gradient_of(problem, w, term) - exact).norm()) < error < 1e-3 * float(exact.norm())


def test_with_one_batch_an_epoch_both_ways_take_the_same_gradient() -> None:
    """Then the whole memory is at every step; with more batches each step has another part of it."""
    ends = {}
    for size in (10_000, 32):
        for way in ("epoch", "batch"):
            created, _, _ = steps(problem_of(batch_size=size, memory_gradient=way, lr=1e-3))
            ends[size, way] = created[-1].up.mean
    same, other = ((ends[size, "epoch"] - ends[size, "batch"]).norm() for size in (10_000, 32))
    assert float(same) < 1e-5 < 1e-3 < float(other)


def test_the_servers_step_is_towards_its_minimum_and_without_rows_the_sum_of_duals() -> None:
    problem = problem_of(server_steps=2000, server_lr=2e-3, delta=20.0)  # so that memory and pull both count
    algorithm = problem.algorithm
    assert isinstance(algorithm, FedLapFunc)
    _, servers, _ = steps(problem)
    server, ctx = servers[2], problem.context(2, 1)

    result = algorithm.server_step(server.dual, server.known, ctx)
    assert torch.equal(result, server.mean)
    assert result.dtype == torch.float64
    slopes = {}
    for name, w in (("start", server.dual), ("result", result)):
        at = w.double().clone().requires_grad_()
        labels = server.known.logits.double().softmax(dim=1)
        tau = algorithm.tau * server.known.points.weights
        value = cross_entropy(labels, server.known.points.inputs, at, tau)
        value = value + algorithm.delta * (at @ at / 2 - server.dual @ at)
        slopes[name] = float(torch.autograd.grad(value, at)[0].norm())
    assert slopes["result"] < 0.02 * slopes["start"]  # Adam with a constant step
    assert torch.equal(algorithm.server_step(server.dual, Registry.empty(CLIENTS), ctx), server.dual)
