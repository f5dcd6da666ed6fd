"""Which workers record training steps, and their heartbeats (their bits: tests/workers/test_lanes.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.wire.envelope import Envelope
from protocols import find
from tests.support.harness import problem_of
from tests.support.tape import Tapes
from workers import protocol_messages as messages
from workers.numerics import CUDA_GRAPHS, records_steps
from workers.worker.heartbeat import Heartbeat
from workers.worker.main import serve
from workers.worker.runtime import WorkerRuntime


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
