"""The ledger against two oracles that know nothing of it: a counting relay and the kernel."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsim.problem import Problem
from fedsim.wire.ledger import Ledger
from protocols import find
from tests.support.commands import DEADLINE, ran
from tests.support.endpoints import Pool
from tests.support.harness import play, problem_of
from tests.support.relay import Relay
from workers.transport import tcp_counters
from workers.transport.endpoint import Endpoint

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    created = Pool()
    yield created
    created.close()


@pytest.mark.parametrize(
    ("name", "codecs"),
    [
        ("fedlap_cov", {}),
        ("fedlap_cov", {"precision": "csr:0.1", "up.mean": "delta+zstd"}),
        ("mime", {}),  # two exchanges
        ("fedlap_func", {}),  # parts for one client
        ("precond_admm", {}),  # a set-up
    ],
)
def test_relay_and_kernel_count_what_the_ledger_books(
    name: str, codecs: dict[str, str], pool: Pool, tmp_path: Path
) -> None:
    """Every byte of every kind, handshakes too; residual 0 in both directions."""
    relays: list[Relay] = []
    seen: dict[str, dict[str, int]] = {}

    def through(address: str) -> str:
        relays.append(Relay(int(address.rpartition(":")[2])))
        return f"tcp://127.0.0.1:{relays[0].port}"

    def connect(problem: Problem, folder: Path, ledger: Ledger) -> Endpoint:
        endpoint = pool.connect(problem, folder, ledger, "tcp", through)
        close = endpoint.close

        def checked() -> None:  # what has been sent must have passed the relay before the streams end
            booked = {d: ledger.booked(d) for d in ("up", "down")}
            until = time.monotonic() + DEADLINE
            while relays[0].bytes != booked and time.monotonic() < until:
                time.sleep(0.01)
            seen.update(relay=dict(relays[0].bytes), ledger=booked)
            close()

        endpoint.close = checked  # type: ignore[method-assign]
        return endpoint

    problem = problem_of(find(name), codecs=codecs, participation="0.7+lost:0.2+gone:0.2", rounds=3)
    run = play(problem, tmp_path / "run", connect=connect, workers=2, worker_pool=pool)
    pool.finish()
    relays[0].close()
    assert seen["relay"] == seen["ledger"]
    assert run.outcome.kernel_residual == {"down": 0, "up": 0}
    total = {d: sum(e.bytes for e in run.entries if e.direction == d) for d in ("up", "down")}
    assert total == seen["ledger"]


def test_the_kernel_sees_a_byte_that_nobody_booked(pool: Pool, tmp_path: Path) -> None:
    """The oracle is one: a ledger that forgets something is found out."""

    def connect(problem: Problem, folder: Path, ledger: Ledger) -> Endpoint:
        endpoint = pool.connect(problem, folder, ledger, "tcp")
        ledger.book_handshake = lambda worker: None  # type: ignore[method-assign]
        return endpoint

    kernel_deadline, tcp_counters.residual.__defaults__ = tcp_counters.residual.__defaults__, (0.2,)
    try:
        run = play(problem_of(find("fedavg")), tmp_path / "run", connect=connect, workers=2, worker_pool=pool)
    finally:
        tcp_counters.residual.__defaults__ = kernel_deadline
        pool.finish()
    assert run.outcome.kernel_residual == {"down": 2 * 107, "up": 2 * 107}


def test_a_user_can_ask_for_it(tmp_path: Path) -> None:
    start = [sys.executable, "-m", "launch", "launch", "--workers", "2", "--rounds", "2", "--verify-bytes"]
    done = ran([*start, "--transport", "tcp", "--out", str(tmp_path / "run")])
    assert done.returncode == 0, done.stderr
    assert "kernel and ledger agree" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["kernel_residual"] == {"down": 0, "up": 0}
    assert summary["kernel_retransmitted"] >= 0  # loopback may send again, too
    refused = ran(start)
    assert refused.returncode == 2 and "--transport tcp" in refused.stderr
