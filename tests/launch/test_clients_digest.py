"""clients_sha256: what it is defined as, and what it costs where most clients were never sampled."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fedsim.wire.state_file import encode_state
from protocols import find
from tests.support.harness import problem_of
from workers.storage import client_states
from workers.storage.client_states import ClientStates, clients_digest


def test_equal_initial_states_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(find("fedlap"))
    ctx, clients = problem.context(0, 0), range(len(problem.clients))
    initial = [encode_state(problem.algorithm.client_init(ctx, k)) for k in clients]
    defined = sha256(b"".join(sha256(data).digest() for data in initial)).hexdigest()
    hashed: list[bytes] = []

    def counted(data: bytes = b"") -> Any:
        hashed.append(data)
        return sha256(data)

    monkeypatch.setattr(client_states, "sha256", counted)
    states = ClientStates(tmp_path, problem.algorithm.client_type)
    assert clients_digest(problem, states, (0,) * len(clients)) == defined
    assert len(clients) > 1 and hashed.count(initial[0]) == 1


def test_states_that_differ_are_all_hashed(tmp_path: Path) -> None:
    problem = problem_of(find("fedlap"))
    states = ClientStates(tmp_path, problem.algorithm.client_type)
    initial = problem.algorithm.client_init(problem.context(0, 0), 0)
    states.save(1, 1, initial)
    parts = [encode_state(initial) for _ in problem.clients]
    parts[1] = states.read(1, 1)
    versions = tuple(int(k == 1) for k in range(len(problem.clients)))
    defined = sha256(b"".join(sha256(data).digest() for data in parts)).hexdigest()
    assert clients_digest(problem, states, versions) == defined
