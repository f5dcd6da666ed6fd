"""Runs whose workers record training steps have the bits of others, for every algorithm."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.problem import Problem
from fedsim.wire.envelope import Envelope
from fedsim.wire.ledger import Ledger
from protocols import find
from tests.support.harness import ALGORITHMS, Class, loopback, play, problem_of
from tests.support.tape import Tapes
from workers import protocol_messages as messages
from workers.numerics import CUDA_GRAPHS, records_steps
from workers.transport.endpoint import Endpoint
from workers.worker.heartbeat import Heartbeat
from workers.worker.main import serve
from workers.worker.runtime import WorkerRuntime

NEVER = {
    "bayes_admm", "bregman_admm", "fald", "fedivon", "fedpa", "fedpm", "fola", "mbsgd", "proxskip", "pvi",
}  # fmt: skip
"""Algorithms whose solvers decide from numbers of the device, take single steps, or look at every step."""


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_a_run_has_the_same_bits(algorithm: Class, tmp_path: Path) -> None:
    tapes = Tapes()

    def recording(problem: Problem, folder: Path, ledger: Ledger) -> Endpoint:
        problem.net.recordings = tapes.recordings()
        return loopback(problem, folder, ledger)

    plain = play(problem_of(algorithm), tmp_path / "plain")
    recorded = play(problem_of(algorithm), tmp_path / "recorded", connect=recording)
    assert recorded.bits == plain.bits
    assert bool(tapes.repeated) != (algorithm.name in NEVER)


class Stopped:
    """A connection over which nothing comes but the message that ends a worker."""

    def receive(self, deadline: float) -> Envelope:
        return messages.stop("run", False)


def test_a_worker_speaks_before_every_repetition(tmp_path: Path) -> None:
    runtime = WorkerRuntime(problem_of(find("fedavg")), tmp_path, "run", 0)
    runtime.problem.net.recordings = recordings = Tapes().recordings()
    serve(Stopped(), runtime, lambda *_: [])  # type: ignore[arg-type]
    assert isinstance(recordings.before, Heartbeat)


def test_only_the_variable_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUDA_GRAPHS, raising=False)
    assert records_steps()
    monkeypatch.setenv(CUDA_GRAPHS, "0")
    assert not records_steps()
