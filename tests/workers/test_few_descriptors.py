"""Idle connections to a port of a process that has few descriptors: they cannot take those of its files."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fedsim.wire.ledger import Ledger
from launch.runs.folder import RunFolder
from tests.support.commands import DEADLINE, Command, fedsim
from workers.storage.atomic_files import patiently
from workers.transport import router, tcp_counters
from workers.transport.dealer import Connection
from workers.transport.handshake import Hello
from workers.transport.listeners import LocalTcpListener
from workers.transport.router import ZmqEndpoint

pytestmark = pytest.mark.process

LIMIT = 160
EXPERIMENT = ("--algo", "fedavg", "--clients", "4", "--rounds", "8", "--model", "logistic")


class Crowd:
    """Connects to a port and says nothing, from a thread; the oldest half leaves for others to come."""

    SIZE = 600

    def __init__(self, port: int) -> None:
        self._port, self._over = port, threading.Event()
        self.connected = 0
        self._thread = threading.Thread(target=self._gather, daemon=True)
        self._thread.start()

    def _gather(self) -> None:
        idle: list[socket.socket] = []
        while not self._over.is_set():
            if len(idle) == self.SIZE:
                for connection in idle[: self.SIZE // 2]:
                    connection.close()
                del idle[: self.SIZE // 2]
                self._over.wait(0.01)
            connection = socket.socket()
            connection.setblocking(False)
            with suppress(OSError):
                connection.connect(("127.0.0.1", self._port))
            idle.append(connection)
            self.connected += 1
        for connection in idle:
            connection.close()

    def disperse(self) -> None:
        self._over.set()
        self._thread.join(DEADLINE)


def listening_port(process: int) -> int:
    """The port on which a process accepts connections."""
    inodes = {
        str(link)[8:-1]
        for entry in Path(f"/proc/{process}/fd").iterdir()
        if str(link := entry.readlink()).startswith("socket:")
    }
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        if columns[3] == "0A" and columns[9] in inodes:
            return int(columns[1].partition(":")[2], 16)
    raise AssertionError("it listens nowhere")


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Of this process, which makes the connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4 * Crowd.SIZE:
        pytest.skip(f"this process may have {hard} descriptors only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * Crowd.SIZE, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_idle_connections_do_not_end_a_run_that_has_few_descriptors(tmp_path: Path) -> None:
    """They took all of them, and the run ended: cannot write ...: Too many open files."""
    options = ("launch", "--workers", "2", "--transport", "tcp", "--out", str(tmp_path / "run"), *EXPERIMENT)
    shell = f'ulimit -n {LIMIT}; exec "$@"'
    running = Command(
        subprocess.Popen(
            ["bash", "-c", shell, "bash", sys.executable, "-m", "launch", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    )
    try:
        running.wait_for("round 1/8")
        crowd = Crowd(listening_port(running.process.pid))
        running.rest()
        crowd.disperse()
    finally:
        running.kill()
    assert crowd.connected > LIMIT
    fedsim("launch", "--workers", "0", "--out", str(tmp_path / "plain"), *EXPERIMENT)
    one, other = RunFolder.open(tmp_path / "run"), RunFolder.open(tmp_path / "plain")
    assert one.summary["model_sha256"] == other.summary["model_sha256"]


@pytest.mark.usefixtures("many_descriptors")
def test_only_who_has_said_nothing_is_ended_when_descriptors_are_scarce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker stays connected; the other would have been connected for the whole time of its handshake."""
    monkeypatch.setattr(router, "HANDSHAKE_MS", 120_000)
    listener = LocalTcpListener()
    endpoint = ZmqEndpoint(Ledger(), listener, 1 << 20)
    worker = Connection(endpoint.address, Hello(listener.token, 0, 1), 1 << 20)
    try:
        while not endpoint._routes:
            endpoint.wait([], 0.1)
        worker_streams = {s.inode for s in tcp_counters.streams(listener.port)}
        monkeypatch.setattr(tcp_counters, "limit", lambda: len(tcp_counters.descriptors()) + 1)
        with socket.create_connection(("127.0.0.1", listener.port), timeout=DEADLINE) as idle:
            while idle.recv(4096):
                pass
        assert worker_streams == {s.inode for s in tcp_counters.streams(listener.port)}
    finally:
        worker.close()
        endpoint.close()


def test_a_file_is_opened_as_soon_as_there_is_a_descriptor(tmp_path: Path) -> None:
    path, held = tmp_path / "file", []
    path.write_bytes(b"found")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with suppress(OSError):
            while True:
                held.append(path.open("rb"))
        with pytest.raises(OSError, match="Too many open files"):
            path.read_bytes()
        threading.Timer(0.1, held[0].close).start()
        assert patiently(path.read_bytes) == b"found"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in held:
            file.close()
