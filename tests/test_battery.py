"""The battery that every registered algorithm passes (docs/adding-an-algorithm.md).

A new algorithm joins by being registered; if its clients hold float64 tensors, its class names in `duals`
where its server keeps their sums. Setting: logistic regression on digits, 3 clients,
2 rounds, one local epoch.

    FEDSIM_BATTERY=path/to/file.py:Name python -m pytest tests/test_battery.py

is about that algorithm alone.
"""

from __future__ import annotations

import inspect
import json
import random
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim.errors import UsageError
from fedsim.experiment import build_algorithm, resolved_hyperparameters
from fedsim.learning import gaussian
from fedsim.participation import Participation, schedule
from fedsim.problem import Problem
from fedsim.wire.codec_selection import unfit
from fedsim.wire.codecs import codec
from fedsim.wire.envelope import decode, encode
from fedsim.wire.ledger import Ledger
from fedsim.wire.schema import DTYPES, TRIANGLE, Field, all_fields, schema, values_of
from fedsim.wire.state_file import decode_state, encode_state
from launch.results.describe import cost_once, wire_cost
from tests.support.endpoints import Counting, LateScores, Pool, Shuffled
from tests.support.harness import (
    ALGORITHMS,
    CLIENTS,
    ROUNDS,
    Class,
    P,
    Run,
    Step,
    carried,
    envelope_of,
    exchanged,
    frozen,
    leaves,
    listed,
    play,
    present,
    problem_of,
    short_settings,
    steps,
)
from workers.assembly import fix_numerics
from workers.storage import client_states
from workers.transport.endpoint import Endpoint
from workers.worker.runtime import WorkerRuntime

EVERYONE = Participation((0, 1, 2))

_MEMORY = {"known.points.inputs", "known.points.weights", "known.logits"}
RECEIVED = {"fedlap_func": _MEMORY, "fedlap_cov_func": _MEMORY, "fedlap_func_public": {"logits"}}
"""Tensors that a server keeps as they came, so that they need not be float64."""


def duals_of(algorithm: Class, client: Any) -> Mapping[str, str | None]:
    """Tensors of a client -> the server's sum of them, as the class says; None: it is no dual."""
    names, duals = [name for name, _ in leaves(client)], dict[str, str | None]()
    tensors = [name for name, value in leaves(client) if isinstance(value, Tensor)]
    for own, total in algorithm.duals.items():
        assert any(f"{name}.".startswith(f"{own}.") for name in names), f"a client has no {own}"
        inside = [name for name in tensors if f"{name}.".startswith(f"{own}.")]
        duals |= {name: None if total is None else total + name.removeprefix(own) for name in inside}
    return duals


def clients_of(algorithm: Class) -> int:
    """How many clients have data: one of a centralised algorithm."""
    return 1 if algorithm.centralised else CLIENTS


QUICK = {"fedavg", "mime", "fedlap_cov", "ivon_admm"}
"""Algorithms that are not marked slow: without duals, of two exchanges, and of two of the three families."""


def _marks(algorithm: Class) -> tuple[pytest.MarkDecorator, ...]:
    return () if len(ALGORITHMS) == 1 or algorithm.name in QUICK else (pytest.mark.slow,)


@pytest.fixture(params=[pytest.param(a, id=a.name, marks=_marks(a)) for a in ALGORITHMS])
def algorithm(request: pytest.FixtureRequest) -> Class:
    selected: Class = request.param
    return selected


@pytest.fixture(scope="module", autouse=True)
def _numerics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The settings of every process that computes, and a cache of our own."""
    threads = torch.get_num_threads()
    fix_numerics(1, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Class], Run]:
    """An algorithm's short run, in process and without codecs: played once, for all that compare with it."""
    return cache(lambda algorithm: play(problem_of(algorithm), tmp_path_factory.mktemp("dense") / "run"))


# ---- duals


def sums_error(run: Run) -> float:
    """Largest |server's sum - sum of all clients' duals| / |server's sum|; 0 without duals."""
    server = dict(leaves(run.outcome.server))
    worst = 0.0
    for dual, total in duals_of(type(run.problem.algorithm), run.states[0]).items():
        if total is None:
            continue
        summed = torch.stack([dict(leaves(state))[dual] for state in run.states]).sum(0)
        size = float(server[total].norm())
        assert size > 0, "nothing was folded, so this would show nothing"
        worst = max(worst, float((server[total] - summed).norm()) / size)
    return worst


SUMS = 1e-12
"""Relative: docs/references/equations.md#dual-step-and-commit."""


# ---- hyperparameters


def other_values(value: Any, hint: Any) -> list[Any]:
    """Values that a hyperparameter may take instead of its default."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value / 2 + 0.25 if value != 0.5 else 0.75]
    options = [hint, *get_args(hint)]
    literals = [o for h in options if get_origin(h) is Literal for o in get_args(h)]
    numbers = {a for o in options for a in (o, *get_args(o))}
    return [o for o in literals if o != value] + [0.75] * (float in numbers) + [3] * (int in numbers)


def settings_of(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, default and annotation of every hyperparameter."""
    hints = get_type_hints(type(kind))
    for f in fields(kind):
        value = getattr(kind, f.name)
        if is_dataclass(value):
            yield from settings_of(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, value, hints[f.name]


def toml(values: Mapping[str, Any]) -> str:
    """A TOML document of scalars; json's spelling of strings, numbers and booleans is TOML's too."""
    return "".join(f"{json.dumps(k)} = {json.dumps(v)}\n" for k, v in values.items())


def test_hyperparameters_round_trip_through_toml(algorithm: Class) -> None:
    default = algorithm()
    assert build_algorithm(algorithm, tomllib.loads(toml(resolved_hyperparameters(default)))) == default
    for name, value, hint in settings_of(default):
        for other in other_values(value, hint):
            changed = build_algorithm(algorithm, {name: other})
            assert changed != default, name
            assert resolved_hyperparameters(changed)[name] == other
            text = toml(resolved_hyperparameters(changed))
            assert build_algorithm(algorithm, tomllib.loads(text)) == changed, name
        assert other_values(value, hint), f"{name} = {value!r} cannot be varied: teach other_values"


# ---- what hyperparameters of a solver promise

RATES = {"decay": "lr", "server_decay": "server_lr"}
"""By last name: the factor per round by which a learning rate falls, and that learning rate."""
ONE_STEP = {"epochs": 1, "batch_size": 10**6, "burn_in": 0, "samples": 1, "steps_per_sample": 1, "steps": 1}
"""Hyperparameters, by last name, with which one local training is one step."""
SGD = {"optimiser": "sgd"}


def named(algorithm: Class, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `choices`, by last name, that the algorithm has, by dotted name."""
    names = resolved_hyperparameters(algorithm())
    return {name: choices[last] for name in names if (last := name.rpartition(".")[2]) in choices}


def by_sgd(algorithm: Class) -> dict[str, Any]:
    """What selects SGD as the local optimiser, where there is a choice."""
    hints = {name: hint for name, _, hint in settings_of(algorithm())}
    return {k: v for k, v in named(algorithm, SGD).items() if v in get_args(hints[k])}


def accepted(algorithm: Class, settings: Mapping[str, Any], **changes: Any) -> Problem | None:
    """The problem with these hyperparameters; None: the algorithm refuses them."""
    try:
        return problem_of(algorithm, settings, **changes)
    except UsageError:
        return None


def test_decay_means_a_learning_rate_per_round(algorithm: Class) -> None:
    """Round r with lr and decay d is the same, to the bit, as with lr d^(r-1) and no decay: training, the
    dual step of both sides, and the server's step. An algorithm may refuse a decay instead."""
    for decay, last in named(algorithm, RATES).items():
        rate = f"{decay.rpartition('.')[0]}.{last}".lstrip(".")
        lr = resolved_hyperparameters(algorithm())[rate]
        problem = accepted(algorithm, {decay: 0.5})
        if problem is None:
            continue
        created, servers, _ = steps(problem)
        for i, server in enumerate(servers[:-1]):
            mine = created[i * clients_of(algorithm) : (i + 1) * clients_of(algorithm)]
            task = mine[0].task
            constant = {decay: 1.0, rate: lr * 0.5 ** max(task.round - 1, 0)}
            other = build_algorithm(algorithm, short_settings(algorithm) | constant)
            for step in mine:
                draft, up = other.client_update(step.client, step.down, step.shard, step.task)
                assert frozen(draft, up) == frozen(step.draft, step.up), f"client_update ignores {decay}"
                seen = carried(up, problem, "up", step.down)
                committed = other.client_commit(draft, step.down, seen, step.task)
                assert frozen(committed) == frozen(step.committed), f"client_commit ignores {decay}"
            ctx = problem.context(task.round, task.exchange, task.folds, task.asked)
            seen = [carried(step.up, problem, "up", step.down) for step in mine]
            ups = [ctx.arrival(k, step.down, up) for k, (step, up) in enumerate(zip(mine, seen, strict=True))]
            assert frozen(other.server_update(server, mine[0].down, ups, ctx)) == frozen(servers[i + 1]), (
                f"server_update ignores {decay}"
            )


def test_momentum_and_carry_mean_what_is_documented(algorithm: Class) -> None:
    """Momentum begins at 0 in every task, so one step is without it. `carry` is about Adam: it changes
    nothing under SGD, and nothing in a client's first task."""
    one_step, many = named(algorithm, ONE_STEP) | by_sgd(algorithm), clients_of(algorithm)
    for name in named(algorithm, {"momentum": 0}):
        if with_momentum := accepted(algorithm, {**one_step, name: 0.9}):
            assert everything(with_momentum) == everything(problem_of(algorithm, {**one_step, name: 0.0}))
    for name in named(algorithm, {"carry": True}):
        first = {kept: steps(problem_of(algorithm, {name: kept}))[0][:many] for kept in (True, False)}
        assert frozen(*(s.up for s in first[True])) == frozen(*(s.up for s in first[False]))
        if by_sgd(algorithm):
            kept, reset = ({**by_sgd(algorithm), name: value} for value in (True, False))
            assert everything(problem_of(algorithm, kept)) == everything(problem_of(algorithm, reset))


def everything(problem: Problem) -> list[bytes]:
    """The bits of all states and uploads of two rounds."""
    created, servers, _ = steps(problem)
    return frozen(*servers, *(value for s in created for value in (s.up, s.committed)))


@pytest.mark.parametrize(
    "choices", [{"decay": 0.5, "server_decay": 0.5}, {**SGD, "momentum": 0.5}, {"carry": False}], ids=str
)
def test_sums_hold_under_settings_of_the_solver(
    algorithm: Class, choices: Mapping[str, Any], tmp_path: Path
) -> None:
    """As under the defaults, with an upload that is lost and clients that do not take part."""
    settings = named(algorithm, {k: v for k, v in choices.items() if k not in SGD})
    settings |= by_sgd(algorithm) if settings and "optimiser" in choices else {}
    problem = accepted(algorithm, settings, rounds=3) if settings else None
    if problem is None:
        return
    participations = listed(EVERYONE, Participation((0, 1, 2), frozenset({1})), Participation((1, 2)))
    run = play(problem, tmp_path / "run", participations)
    assert sums_error(run) < SUMS
    assert run.outcome.model.mean.isfinite().all()


# ---- messages and states


def test_messages_round_trip_through_the_wire_bit_for_bit(algorithm: Class) -> None:
    problem = problem_of(algorithm)
    _, _, messages = steps(problem)
    assert {type(m) for m in messages} == {t for e in problem.messages.exchanges for t in (e.down, e.up)}
    for message in messages:
        envelope = envelope_of(message, {}, problem)
        seen = decode(type(message), envelope, {}, problem.messages.dims, "here")
        for (f, sent), (_, received) in zip(values_of(message), values_of(seen), strict=True):
            if isinstance(sent, Tensor):
                assert received.dtype == (sent.dtype if f.kind.stored else DTYPES[f.kind.dtype])
                assert frozen(sent.to(received.dtype)) == frozen(received), f.name
            else:
                assert received == sent
                assert type(received) is f.python
        second = encode(seen, {}, problem.messages.dims)
        assert [bytes(a) for a in second.frames] == [bytes(b) for b in envelope.frames]
        assert second.fields == envelope.header.fields


def test_states_round_trip_through_their_bytes(algorithm: Class) -> None:
    created, servers, _ = steps(problem_of(algorithm))
    states = [(algorithm.server_type, s) for s in servers]
    states += [
        (algorithm.client_type, s) for step in created for s in (step.client, step.draft, step.committed)
    ]
    for kind, state in states:
        assert type(state) is kind
        data = encode_state(state)
        second = decode_state(kind, data, "state")
        assert encode_state(second) == data
        for (name, a), (_, b) in zip(leaves(state), leaves(second), strict=True):
            assert type(a) is type(b), name
            if isinstance(a, Tensor):
                assert a.dtype == b.dtype
                assert torch.equal(a, b), name
            else:
                assert a == b, name


def test_duals_are_declared_and_sums_are_float64(algorithm: Class) -> None:
    created, servers, _ = steps(problem_of(algorithm))
    wide = {n for n, v in leaves(created[-1].committed) if isinstance(v, Tensor) and v.dtype == torch.float64}
    duals = duals_of(algorithm, created[-1].committed)
    assert wide == set(duals), "say in `duals` where the server keeps their sums"
    for name, value in leaves(servers[-1]):
        if name in RECEIVED.get(algorithm.name, ()):
            continue
        if isinstance(value, Tensor) and value.is_floating_point():
            assert value.dtype == torch.float64, name


# ---- purity


def test_client_update_changes_none_of_its_arguments(algorithm: Class) -> None:
    created, _, _ = steps(problem_of(algorithm))
    for step in created:
        supplied = (step.client, step.down, step.shard.inputs, step.shard.targets, step.task.start)
        before, generators = (
            frozen(*supplied),
            (torch.get_rng_state(), random.getstate(), np.random.get_state()),
        )
        draft, up = step_again(algorithm, step)
        algorithm().client_commit(draft, step.down, up, step.task)
        assert frozen(*supplied) == before
        assert torch.equal(torch.get_rng_state(), generators[0])
        assert random.getstate() == generators[1]
        assert str(np.random.get_state()) == str(generators[2])


def step_again(algorithm: Class, step: Step) -> tuple[Any, Any]:
    built = build_algorithm(algorithm, short_settings(algorithm))
    drafted: tuple[Any, Any] = built.client_update(step.client, step.down, step.shard, step.task)
    return drafted


def test_client_update_is_deterministic_in_its_arguments(algorithm: Class) -> None:
    created, _, _ = steps(problem_of(algorithm))
    for i, step in enumerate(created):
        torch.manual_seed(i)
        step.shard.net.load(torch.full((P,), float(i)))  # scratch space may hold anything
        step.shard.net.grads.fill_(float(i))
        step.shard.net.module.eval()
        assert frozen(*step_again(algorithm, step)) == frozen(step.draft, step.up)


def test_results_do_not_share_memory_with_the_scratch_buffers(algorithm: Class) -> None:
    created, _, _ = steps(problem_of(algorithm))
    step = created[-1]
    draft, up = step_again(algorithm, step)
    before = frozen(draft, up)
    step.shard.net.weights.fill_(7.0)
    step.shard.net.grads.fill_(7.0)
    assert frozen(draft, up) == before


def test_server_methods_change_no_state(algorithm: Class) -> None:
    problem = problem_of(algorithm)
    created, servers, _ = steps(problem)
    before = frozen(*servers)
    for i, server in enumerate(servers[:-1]):
        mine = created[i * clients_of(algorithm) : (i + 1) * clients_of(algorithm)]
        ctx = problem.context(mine[0].task.round, mine[0].task.exchange)
        problem.algorithm.broadcast(server, ctx)
        for k in range(len(mine) if ctx.round else 0):
            problem.algorithm.broadcast_to(server, k, ctx)
        problem.algorithm.model(server, ctx)
        problem.algorithm.report(server, ctx)
        seen = [carried(step.up, problem, "up", step.down) for step in mine]
        ups = [ctx.arrival(k, step.down, up) for k, (step, up) in enumerate(zip(mine, seen, strict=True))]
        kept = frozen(mine[0].down, *seen, ctx.start)
        second = problem.algorithm.server_update(server, mine[0].down, iter(ups), ctx)
        assert frozen(mine[0].down, *seen, ctx.start) == kept
        assert frozen(second) == [before[i + 1]]
    assert frozen(*servers) == before


def test_the_coordinator_plays_the_box(algorithm: Class, dense: Callable[[Class], Run]) -> None:
    """The whole machinery gives the bits of the methods called by hand, folded in ascending id."""
    created, servers, _ = steps(problem_of(algorithm))
    run = dense(algorithm)
    assert frozen(run.outcome.server) == frozen(servers[-1])
    assert frozen(*run.states) == frozen(*(step.committed for step in created[-clients_of(algorithm) :]))


def test_formulas_in_blocks_give_the_bits_of_whole_vectors(
    algorithm: Class, dense: Callable[[Class], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaussian, "BLOCK", 97)
    assert P > 97 * gaussian.CACHED
    assert play(problem_of(algorithm), tmp_path / "run").bits == dense(algorithm).bits


def test_states_that_are_written_over_give_the_bits_of_copies(
    algorithm: Class, dense: Callable[[Class], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on large models: no state is cached, and each belongs to the task that has read it."""
    monkeypatch.setattr(gaussian, "BLOCK", 97)
    monkeypatch.setattr(client_states, "LARGEST_CACHED", 0)
    assert play(problem_of(algorithm), tmp_path / "run").bits == dense(algorithm).bits


# ---- arrival order


@pytest.mark.parametrize("order", ["highest client first", "lowest client first", "random"])
def test_arrival_order_does_not_matter(
    algorithm: Class, order: str, dense: Callable[[Class], Run], tmp_path: Path
) -> None:
    problem = problem_of(algorithm)
    draws = random.Random(4)
    choose: dict[str, Callable[[dict[int, int]], int]] = {
        "highest client first": lambda waiting: max(waiting, key=lambda w: waiting[w]),
        "lowest client first": lambda waiting: min(waiting, key=lambda w: waiting[w]),
        "random": lambda waiting: draws.choice(sorted(waiting)),
    }

    def connect(problem: Problem, folder: Path, ledger: Ledger) -> Endpoint:
        runtimes = [WorkerRuntime(problem, folder, "run", w) for w in range(3)]
        return Shuffled(ledger, runtimes, choose[order])

    shuffled = play(problem, tmp_path / "shuffled", connect=connect, workers=3)
    assert isinstance(shuffled.endpoint, Shuffled)
    arrived = shuffled.endpoint.order
    clients = range(clients_of(algorithm))
    everyone = [(r, k) for r in range(1, ROUNDS + 1) for k in clients]
    setup = [(0, k) for k in clients] * len(algorithm().setup)
    assert sorted(arrived) == sorted(setup + everyone * len(algorithm().exchanges))
    assert arrived != sorted(arrived) or order != "highest client first" or len(clients) == 1
    assert shuffled.bits == dense(algorithm).bits


def test_metrics_are_written_in_the_order_of_rounds(tmp_path: Path) -> None:
    """metrics.jsonl is bits, the summary has the last round (docs/references/bytes.md#files-of-a-run)."""

    def connect(problem: Problem, folder: Path, ledger: Ledger) -> Endpoint:
        return LateScores(ledger, [WorkerRuntime(problem, folder, "run", w) for w in range(2)])

    problem = problem_of(ALGORITHMS[0], rounds=4)
    run = play(problem, tmp_path / "run", connect=connect, workers=2)
    assert isinstance(run.endpoint, LateScores)
    assert run.endpoint.scored != sorted(run.endpoint.scored)
    assert [m["round"] for m in run.metrics] == [0, 1, 2, 3, 4]


# ---- who takes part, and what is lost


NOBODY = Participation(())
SCHEDULES = {
    "full": (EVERYONE, EVERYONE),
    "partial": (Participation((0, 2)), Participation((1,)), Participation((1, 2))),
    "one upload in three lost": (
        Participation((0, 1, 2), frozenset({1})),
        Participation((0, 1, 2), frozenset({0})),
        Participation((0, 1, 2), frozenset({2})),
    ),
    "all uploads of a round lost": (EVERYONE, Participation((0, 1), frozenset({0, 1})), EVERYONE),
    "first round lost": (Participation((0, 1, 2), frozenset({0, 1, 2})), EVERYONE),
    "empty rounds": (NOBODY, EVERYONE, NOBODY, NOBODY, EVERYONE, NOBODY),
    "gone after the download": (
        Participation((0, 1, 2), frozenset(), frozenset({1})),
        Participation((0, 1), frozenset(), frozenset({0, 1})),
        EVERYONE,
    ),
    "a coin, with losses of both kinds": tuple(
        schedule("coin:0.7+gone:0.3+lost:0.3", clients=CLIENTS, seed=5)(r) for r in range(1, 6)
    ),
}


def back(participation: Participation) -> set[int]:
    """Whose uploads are folded."""
    return set(participation.participants) - participation.lost_uploads - participation.dropouts


@pytest.mark.parametrize("participations", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_server_and_clients_stay_consistent(
    algorithm: Class, participations: tuple[Participation, ...], tmp_path: Path
) -> None:
    problem, clients = problem_of(algorithm, rounds=len(participations)), clients_of(algorithm)
    run = play(problem, tmp_path / "run", listed(*participations))
    assert sums_error(run) < SUMS
    restricted = present(listed(*participations), problem)
    participations = tuple(restricted(r) for r in range(1, len(participations) + 1))
    exchanges = len(algorithm().exchanges)
    folded = [
        max((r for r, t in enumerate(participations, 1) if k in back(t)), default=0) for k in range(clients)
    ]
    setup = len(algorithm().setup)
    assert run.outcome.versions == tuple(setup + r * exchanges for r in folded)
    assert [m["round"] for m in run.metrics] == list(range(len(participations) + 1))
    for r, participation in enumerate(participations, 1):
        rows = {(e.client, e.direction) for e in exchanged(run.entries) if e.round == r}
        up = set(participation.participants) - participation.dropouts
        assert rows == {(k, "down") for k in participation.participants} | {(k, "up") for k in up}
        assert run.metrics[r]["participants"] == list(participation.participants)
        assert run.metrics[r].get("folded", list(participation.participants)) == sorted(back(participation))
        if not back(participation):  # nothing was folded, so nothing has changed
            assert run.metrics[r]["test_nll"] == run.metrics[r - 1]["test_nll"]
            if r > max(1, len(participations) - 2):  # three checkpoints are kept
                before, after = run.checkpoint(r - 1), run.checkpoint(r)
                assert encode_state(before.server) == encode_state(after.server)
                assert torch.equal(before.versions, after.versions)


ASYNCHRONOUS: Mapping[str, Any] = {"compute": "1ms,noise=1", "clients": 5}
"""A virtual clock on which clients overtake each other."""


def last_values(algorithm: Class) -> dict[str, Any]:
    """The setting with which a server of the family averages nothing of one round."""
    return dict.fromkeys(named(algorithm, {"silent": "last"}), "last")


@pytest.mark.parametrize("rule", ["fedbuff:1", "fedbuff:2", "fedbuff:2+damp:0.5"])
def test_sums_hold_under_any_staleness(algorithm: Class, rule: str, tmp_path: Path) -> None:
    settings = {} if "damp" in rule else last_values(algorithm)
    changes = {**ASYNCHRONOUS, "rounds": 12, "participation": "full+lost:0.2+gone:0.1"}
    problem = accepted(algorithm, settings, asynchronous=rule, **changes)
    if problem is None:
        with pytest.raises(UsageError, match="--async"):
            problem_of(algorithm, settings, asynchronous=rule, **changes)
        return
    run = play(problem, tmp_path / "run")
    assert max(s for line in run.metrics[1:] for s in line["staleness"]) >= 2
    mismatch = problem.algorithm.dual_mismatch(run.outcome.server, run.states)
    assert mismatch is None or mismatch < SUMS
    assert bool(last_values(algorithm)) or sums_error(run) < SUMS  # under last the server sums z_k


def test_a_buffer_of_all_clients_is_the_synchronous_run(algorithm: Class, tmp_path: Path) -> None:
    settings = last_values(algorithm)
    problem = accepted(algorithm, settings, asynchronous="fedbuff:5", **ASYNCHRONOUS)
    if problem is None:
        return
    synchronous = play(problem_of(algorithm, settings, **ASYNCHRONOUS), tmp_path / "synchronous")
    run = play(problem, tmp_path / "run")
    for line in run.metrics[1:]:
        assert line.pop("staleness") == [0] * 5
    assert run.bits == synchronous.bits


def test_half_participation_by_name(algorithm: Class, tmp_path: Path) -> None:
    problem = problem_of(algorithm, participation="0.5", rounds=4)
    run = play(problem, tmp_path / "run")
    participants = [tuple(m["participants"]) for m in run.metrics[1:]]
    if algorithm.centralised:
        assert set(participants) == {(0,)}
        return
    assert all(len(p) == 2 for p in participants)
    assert len(set(participants)) > 1  # drawn afresh every round
    assert sums_error(run) < SUMS


def test_a_run_of_empty_rounds_is_the_start_model(algorithm: Class, tmp_path: Path) -> None:
    problem = problem_of(algorithm)
    run = play(problem, tmp_path / "run", listed(NOBODY, NOBODY))
    assert torch.equal(run.outcome.model.mean.float(), problem.start)
    assert run.outcome.versions == (len(algorithm().setup),) * clients_of(algorithm)
    assert not [e for e in exchanged(run.entries) if e.round]
    assert len({m["test_nll"] for m in run.metrics}) == 1


def test_a_lost_upload_leaves_no_trace_but_its_bytes(algorithm: Class, tmp_path: Path) -> None:
    """Commit on fold: a client is lost in round 1, so it goes on as if it had never trained.

    Steps count all clients here, because 1/|S| counts those that were asked, lost or not.
    """
    settings = {
        name: value.replace("|S|", "K")
        for name, value in resolved_hyperparameters(algorithm()).items()
        if isinstance(value, str) and "|S|" in value
    }
    problem, clients = problem_of(algorithm, settings, rounds=2), clients_of(algorithm)
    out = min(1, clients - 1)
    lost = play(problem, tmp_path / "lost", listed(Participation((0, 1, 2), frozenset({out})), EVERYONE))
    others = tuple(k for k in range(clients) if k != out)
    absent = play(problem, tmp_path / "absent", listed(Participation(others), EVERYONE))
    assert lost.bits[:4] == absent.bits[:4]
    assert len(lost.bits[4]) > len(absent.bits[4])


# ---- codecs


def float_fields(algorithm: Class) -> list[tuple[str, Field]]:
    """Direction and field, of all messages."""
    return [
        (side, f)
        for e in (*algorithm().setup, *algorithm().exchanges)
        for side in ("down", "up")
        for f in all_fields(getattr(e, side))
        if f.kind.dtype.startswith("f") and not f.kind.stored
    ]


def used(run: Run) -> set[str]:
    """The codecs of its ledger."""
    return {e.codec for e in exchanged(run.entries) if e.layer == "values"}


def test_lossless_codecs_change_nothing_but_bytes(
    algorithm: Class, dense: Callable[[Class], Run], tmp_path: Path
) -> None:
    problem, target = problem_of(algorithm), dense(algorithm)
    plain = {f"{side}.{f.name}": "zstd" for side, f in float_fields(algorithm)}
    delta = codec("delta+zstd")
    refers = any(
        not problem.messages.unfit(delta, side, f.name, f.kind) for side, f in float_fields(algorithm)
    )
    for name, changes in (("zstd", {"codecs": plain}), (delta.name, {"compress": "lossless"})):
        coded = problem_of(algorithm, **changes)
        run = play(coded, tmp_path / name)
        assert name in used(run) or (not refers and name == delta.name)
        assert run.bits[:4] == target.bits[:4]
    created, servers, _ = steps(coded)  # by hand, with the last of them
    assert frozen(servers[-1]) == frozen(target.outcome.server)
    assert frozen(*(step.committed for step in created[-clients_of(algorithm) :])) == frozen(*target.states)


@pytest.mark.parametrize("level", ["few-bits", "fewest-bits"])
def test_compression_by_one_word(algorithm: Class, level: str, tmp_path: Path) -> None:
    problem = problem_of(algorithm, compress=level, clients=7)  # fewest-bits needs seven
    run = play(problem, tmp_path / "run")
    mismatch = problem.algorithm.dual_mismatch(run.outcome.server, run.states)
    assert mismatch is None or mismatch < SUMS
    codecs = problem.experiment.codecs
    for side, f in float_fields(algorithm):
        if f.kind.dims:
            assert codecs[f"{side}.{f.name}"] != "dense"
    means = {name for name in codecs.values() if name.startswith("sigma")}
    fewest = {"%" in name for name in means}
    assert len(fewest) < 2  # one level for all fields
    if algorithm.name in ("fedlap_cov", "pvi", "fola"):
        assert fewest == {level == "fewest-bits"}


MERGING = (
    *("csr:0.4", "best:0.5", "log8", "topk:0.5", "qsgd:8"),
    *("ratio:0.25", "ratio:0.25+last", "sigma:0.05+dither", "sigma:0.05+last", "sigma:auto"),
    *("ratio:1.0+random", "sigma:10.0%+random"),
)
"""Codecs that merge or round values; csr:0.5 would be larger than dense, which would be sent."""


def fields_for(algorithm: Class, name: str) -> set[str]:
    kinds = codec(name).kinds or set()
    fields = [(s, f) for s, f in float_fields(algorithm) if f.kind.dims == ("P",)]
    exchanges = (*algorithm().setup, *algorithm().exchanges)
    return {
        f"{side}.{f.name}"
        for side, f in fields
        if f.kind.name in kinds and not unfit(codec(name), side, f.name, f.kind, exchanges, False)
    }


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        pytest.param(a, n, id=f"{a.name}-{n}", marks=_marks(a))
        for a in ALGORITHMS
        for n in MERGING
        if fields_for(a, n)
    ],
)
def test_codecs_that_merge_values_keep_the_sums(algorithm: Class, name: str, tmp_path: Path) -> None:
    codecs = dict.fromkeys(fields_for(algorithm, name), name)
    participations = (EVERYONE, Participation((0, 1, 2), frozenset({1})), Participation((1, 2)))
    # bregman_admm's dual step is in E[th^2]: the variance of random rounding enters it, and its precision
    settings = {"damping": 0.02} if algorithm.name == "bregman_admm" and "random" in name else {}
    problem = problem_of(algorithm, settings, codecs=codecs, rounds=3)
    run = play(problem, tmp_path / "run", listed(*participations))
    assert sums_error(run) < SUMS
    assert {name, f"{name}+random"} & used(run)  # ratio rounds uploads at random
    assert run.outcome.model.mean.isfinite().all()


# ---- bf16


def is_triangle(field: Field) -> bool:
    """A full precision, which no lossy codec may touch: rounded entries need not be positive definite."""
    return field.kind.positive and field.kind.dims == (TRIANGLE,)


def test_bf16_on_every_field_keeps_the_sums(algorithm: Class, tmp_path: Path) -> None:
    floats = {f"{side}.{f.name}" for side, f in float_fields(algorithm) if not is_triangle(f)}
    problem = problem_of(algorithm, codecs=dict.fromkeys(floats, "bf16"), rounds=3)
    participations = listed(EVERYONE, Participation((0, 1, 2), frozenset({1})), Participation((1, 2)))
    run = play(problem, tmp_path / "bf16", participations)
    dense = play(problem_of(algorithm, rounds=3), tmp_path / "dense", participations)
    assert sums_error(run) < SUMS
    assert run.bits[0] != dense.bits[0]
    values = [e for e in exchanged(run.entries) if e.layer == "values" and e.dense_bytes >= 4]
    assert {e.codec for e in values if f"{e.direction}.{e.field}" in floats} == {"bf16"}
    # bf16 keeps eight bits; three rounds of training do not amplify that beyond a few per cent
    means = run.outcome.model.mean, dense.outcome.model.mean
    assert float((means[0] - means[1]).norm() / means[1].norm()) < 0.1


# ---- bytes


def test_the_ledger_holds_every_byte(algorithm: Class, tmp_path: Path) -> None:
    def connect(problem: Problem, folder: Path, ledger: Ledger) -> Endpoint:
        return Counting(ledger, WorkerRuntime(problem, folder, "run", 0))

    run = play(problem_of(algorithm), tmp_path / "run", connect=connect)
    endpoint = run.endpoint
    assert isinstance(endpoint, Counting)
    for direction in ("down", "up"):
        mine = [e for e in run.entries if e.direction == direction]
        framing = sum(e.bytes for e in mine if e.layer == "framing")
        assert framing == endpoint.framing[direction]
        assert sum(e.bytes for e in mine) - framing == endpoint.frames[direction]
        assert endpoint.total_bytes[direction] == endpoint.frames[direction]
        by_round = [m[f"bytes_{direction}"] for m in run.metrics]
        assert sum(by_round) == sum(e.bytes for e in mine if e.kind == "algorithm")


def test_the_wire_costs_what_the_docstring_says(algorithm: Class, tmp_path: Path) -> None:
    """The docstring's `Wire:` and `Once:` are what the schema says, and the ledger is what both say."""
    text = f"{inspect.getdoc(algorithm)}\n{sys.modules[algorithm.__module__].__doc__}"
    wire = re.search(r"^Wire: (.*? down, .*? up)\b", text, re.MULTILINE)
    once = re.search(r"\bOnce: (.*? down, .*? up)\b", text)
    assert wire is not None and wire[1] == wire_cost(algorithm())
    assert (once[1] if once else "") == cost_once(algorithm())
    problem = problem_of(algorithm, participation="0.5", rounds=3)
    run = play(problem, tmp_path / "run")
    sent: Counter[tuple[int, int, str, str]] = Counter()
    for e in run.entries:
        if e.kind == "algorithm" and e.layer == "values":
            sent[e.round, e.exchange, e.direction, e.field] += e.bytes
    participants = {m["round"]: len(m["participants"]) for m in run.metrics}
    built = problem.algorithm
    if built.centralised:
        assert not sent
        assert {e.kind for e in exchanged(run.entries)} == {"simulation"}
        return
    for r in range(problem.experiment.rounds + 1):
        for number, exchange in enumerate(built.exchanges_in(r), 1):
            for side in ("down", "up"):
                for f in schema(getattr(exchange, side)):
                    if not f.kind.elastic:
                        expected = participants[r] * f.dense_bytes(problem.messages.dims)
                        assert sent.pop((r, number, side, f.name)) == expected
    elastic = {f.name for e in built.exchanges for t in (e.down, e.up) for f in all_fields(t)}
    assert {name for *_, name in sent} <= elastic


# ---- over ZeroMQ


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool()
    try:
        yield pool
    finally:
        pool.close()


@pytest.mark.process
def test_in_process_equals_over_zeromq_bit_for_bit(
    algorithm: Class, pool: Pool, dense: Callable[[Class], Run], tmp_path: Path
) -> None:
    problem = problem_of(algorithm)
    try:
        remote = play(problem, tmp_path / "remote", connect=pool.connect, workers=2, worker_pool=pool)
    finally:
        pool.finish()
    here = dense(algorithm)
    assert remote.bits == here.bits
    assert {e.worker for e in exchanged(remote.entries)} == {0, 1} or algorithm.centralised
    for direction in ("down", "up"):
        frames = sum(e.bytes for e in remote.entries if e.direction == direction and e.layer != "framing")
        assert frames == remote.endpoint.total_bytes[direction]
    assert here.bits[0] != play(problem_of(algorithm, seed=1), tmp_path / "other").bits[0]
