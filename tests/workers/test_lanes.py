"""Workers that compute several tasks at once, on a pretended GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from fedsim.errors import ConnectionLost
from fedsim.problem import Problem
from fedsim.wire.envelope import Envelope, pack
from fedsim.wire.ledger import Ledger
from protocols import find
from tests.support.harness import ALGORITHMS, Class, play, problem_of
from tests.support.streams import Device, LanedLoopback
from tests.support.tape import Tapes
from workers import protocol_messages as messages
from workers.transport.endpoint import Endpoint
from workers.worker import main as worker
from workers.worker.lanes import Lanes
from workers.worker.runtime import WorkerRuntime

LANES = 4


def connected(endpoints: list[LanedLoopback], lanes: int, seed: int) -> Callable[..., Endpoint]:
    def connect(problem: Problem, folder: Path, ledger: Ledger) -> Endpoint:
        endpoints.append(LanedLoopback(ledger, problem, folder, lanes, seed))
        return endpoints[-1]

    return connect


NEVER = {
    "bayes_admm", "bregman_admm", "fald", "fedpa", "fola", "mbsgd", "proxskip", "pvi",
}  # fmt: skip
"""Algorithms whose solvers decide from numbers of the device, take single steps, or look at every step."""
PARTLY = {"fedlap_func", "fedlap_func_public", "fedlap_cov_func"}
"""Those that record only the steps without a function term, in their first round."""


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_a_run_has_the_same_bits(algorithm: Class, tmp_path: Path) -> None:
    """Steps as they come, recorded in one lane, and recorded in several."""
    endpoints: list[LanedLoopback] = []
    plain = play(problem_of(algorithm), tmp_path / "plain")
    for lanes in (1, LANES):
        connect = connected(endpoints, lanes, seed=len(algorithm.name))
        run = play(problem_of(algorithm), tmp_path / str(lanes), connect=connect, lanes=lanes)
        assert run.bits == plain.bits
        assert bool(endpoints[-1].tapes.repeated) != (algorithm.name in NEVER)
    most = 0 if algorithm.name in NEVER else min(LANES, len(plain.problem.clients))
    assert endpoints[-1].most == most, "only recorded steps give way"
    refusals = [each.net.recordings.refusals for each in endpoints[0].runtime.problems if each.net.recordings]
    assert bool(refusals[0]) == (algorithm.name in NEVER | PARTLY)


@pytest.mark.parametrize(("lanes", "seed"), [(2, 0), (2, 1), (3, 2), (7, 3), (7, 4)])
def test_bits_do_not_depend_on_lanes_or_on_who_is_first(lanes: int, seed: int, tmp_path: Path) -> None:
    endpoints: list[LanedLoopback] = []
    plain = play(problem_of(find("scaffold"), clients=7), tmp_path / "plain")
    connect = connected(endpoints, lanes, seed)
    several = play(problem_of(find("scaffold"), clients=7), tmp_path / "lanes", connect=connect, lanes=lanes)
    assert several.bits == plain.bits
    assert endpoints[0].most == lanes
    assert all(stream.marked for stream in endpoints[0].device.streams)
    assert endpoints[0].beats >= endpoints[0].tapes.repeated


# ---- the lanes alone, with tasks that repeat a step of a recording


class Repeats:
    """A task that repeats recorded steps, and notes when."""

    def __init__(self, name: str, notes: list[str], times: int = 5) -> None:
        self.name, self.notes, self.times = name, notes, times

    def __call__(self, problem: Problem) -> None:
        recordings = problem.net.recordings
        assert recordings is not None
        value = recordings.hold("value", torch.zeros(()))
        for i in range(self.times):
            recordings.run("step", 1, lambda: value.add_(1))
            self.notes.append(f"{self.name}{i}")
        recordings.settle()
        assert value == self.times
        self.notes.append(f"{self.name}.")


def several(lanes: int, heartbeat: Callable[..., None] = lambda *_: None) -> Lanes:
    problem = problem_of(find("fedavg"))
    problems = [problem, *(problem.beside() for _ in range(1, lanes))]
    for each in problems:
        each.net.recordings = Tapes().recordings(1)
    return Lanes(problems, heartbeat, Device(0).stream)


def finish(lanes: Lanes) -> None:
    for _ in range(1000):
        if not lanes.busy:
            return
        lanes.advance()
    raise AssertionError("a task does not end")


def test_tasks_take_turns() -> None:
    lanes, notes = several(2), list[str]()
    lanes.start(Repeats("a", notes))
    lanes.start(Repeats("b", notes))
    assert lanes.busy and not lanes.free
    finish(lanes)
    assert lanes.free
    assert [n for n in notes if n[0] == "a"] == ["a0", "a1", "a2", "a3", "a4", "a."]
    assert notes.index("b0") < notes.index("a.") and notes.index("a0") < notes.index("b.")


def test_a_single_lane_computes_a_task_at_once() -> None:
    beats = list[int]()
    lanes, notes = several(1, lambda *_: beats.append(1)), list[str]()
    lanes.start(Repeats("a", notes))
    assert notes[-1] == "a." and lanes.free and not lanes.busy
    assert len(beats) == 3, "one before every repetition: the first step is computed, the second recorded"


def test_a_task_that_fails_frees_its_lane_and_leaves_the_other() -> None:
    lanes, notes = several(2), list[str]()

    def fails(problem: Problem) -> None:
        Repeats("x", [], 3)(problem)
        raise ConnectionLost("gone")

    lanes.start(Repeats("a", notes, 60))
    lanes.start(fails)
    with pytest.raises(ConnectionLost, match="gone"):
        finish(lanes)
    assert lanes.free and lanes.busy
    finish(lanes)
    assert notes[-1] == "a."


def test_nobody_waits_for_a_task_that_is_given_up() -> None:
    lanes, ended = several(2), list[str]()

    def long(problem: Problem) -> None:
        try:
            Repeats("a", [], 1000)(problem)
        finally:
            ended.append("closed")

    lanes.start(long)
    lanes.advance()
    lanes.close()
    assert ended == ["closed"]


def test_gradients_are_those_of_the_task() -> None:
    lanes, notes = several(2), list[str]()

    def without(problem: Problem) -> None:
        with torch.no_grad():
            Repeats("a", notes)(problem)
            assert not torch.is_grad_enabled()

    def with_gradients(problem: Problem) -> None:
        assert torch.is_grad_enabled()
        Repeats("b", notes)(problem)
        assert torch.is_grad_enabled()

    for task in (without, with_gradients):
        lanes.start(task)
    finish(lanes)
    assert torch.is_grad_enabled()


def test_a_task_that_draws_from_the_generator_of_all_does_not_give_way() -> None:
    lanes, notes = several(2), list[str]()

    def draws(problem: Problem) -> None:
        problem.net.stochastic = True
        with problem.net.noise(7):
            assert problem.net.draws_globally
            Repeats("a", notes)(problem)
        assert not problem.net.draws_globally

    lanes.start(draws)
    assert notes[-1] == "a."


# ---- a problem beside another one


def test_a_problem_beside_another_shares_what_is_not_trained(tmp_path: Path) -> None:
    problem = problem_of(find("fedavg"), model="mlp_small", freeze="fc1.*")
    assert problem.evaluation.net is problem.net
    other = problem.beside()
    assert other.evaluation.net is other.net
    pairs = list(zip(problem.net.module.parameters(), other.net.module.parameters(), strict=True))
    shared = [a.data_ptr() == b.data_ptr() for a, b in pairs]
    assert shared == [not a.requires_grad for a, _ in pairs]
    assert True in shared and False in shared
    assert torch.equal(problem.net.weights, other.net.weights)
    assert other.copies is problem.copies and other.net is not problem.net
    assert (other.experiment, other.sizes) == (problem.experiment, problem.sizes)
    other.net.weights.zero_()
    assert problem.net.weights.any()


# ---- a worker's loop


class Scripted:
    """A connection that brings envelopes in their order, and keeps what is sent."""

    address = "here"

    def __init__(self, envelopes: list[Envelope]) -> None:
        self.envelopes, self.sent, self.offered = deque(envelopes), list[Envelope](), list[Envelope]()

    def receive(self, deadline: float) -> Envelope | None:
        if deadline == 0.0 and len(self.envelopes) == 1:
            return None  # the last one comes when nothing is computed any more
        return self.envelopes.popleft()

    def send(self, envelope: Envelope) -> None:
        self.sent.append(envelope)

    def offer(self, envelope: Envelope) -> None:
        self.offered.append(envelope)

    def check(self) -> None:
        pass


@contextmanager
def on_streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    device = Device(1)
    monkeypatch.setattr(worker, "Lanes", lambda problems, beat: Lanes(problems, beat, device.stream))
    yield


def tasks_of(problem: Problem, folder: Path) -> list[Envelope]:
    """The first tasks that a run's coordinator sends."""
    sent = list[Envelope]()

    class Listening(LanedLoopback):
        def send(self, worker: int, envelope: Envelope, retry: bool = False) -> None:
            sent.append(envelope)
            super().send(worker, envelope, retry)

    play(problem, folder, connect=lambda p, f, ledger: Listening(ledger, p, f, 1), lanes=LANES)
    return [e for e in sent if e.header.kind == "task" and e.header.round == 1]


@pytest.mark.parametrize("broken", [False, True])
def test_a_worker_answers_every_task_of_its_lanes(
    broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(find("fedavg"), clients=5)
    tasks = tasks_of(problem, tmp_path / "first")
    if broken:
        header = msgspec.structs.replace(tasks[2].header, run="another")
        tasks[2] = pack(header, tasks[2].frames)
    problems = [problem, problem.beside()]
    for each in problems:
        each.net.recordings = Tapes().recordings()
    (tmp_path / "second" / "state").mkdir(parents=True)
    runtime = WorkerRuntime(problem, tmp_path / "second", "run", 0, problems)
    connection: Any = Scripted([*tasks, messages.stop("run")])
    monkeypatch.setattr("workers.worker.heartbeat.SECONDS", 0.0)
    with on_streams(monkeypatch):
        worker.serve(connection, runtime, runtime.replies)
    kinds = sorted(envelope.header.kind for envelope in connection.sent)
    assert kinds == (["failed"] if broken else []) + ["upload"] * (len(tasks) - broken)
    answered = {e.header.client for e in connection.sent if e.header.kind == "upload"}
    assert answered == {e.header.client for e in tasks} - ({tasks[2].header.client} if broken else set())
    beats = [(e.header.round, e.header.client) for e in connection.offered]
    assert beats and {client for _, client in beats} <= {e.header.client for e in tasks}


def test_several_clients_need_no_more_recordings_than_networks(tmp_path: Path) -> None:
    endpoints: list[LanedLoopback] = []
    play(problem_of(find("fedavg"), clients=6), tmp_path, connect=connected(endpoints, 2, 0), lanes=2)
    kept = [len(p.net.recordings._repeats) for p in endpoints[0].runtime.problems if p.net.recordings]
    assert len(kept) == 2 and endpoints[0].tapes.recorded == sum(kept) + 2, "two more for the trials"
