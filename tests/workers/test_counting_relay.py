"""The relay of `fedsim relay`: real sockets, and every byte counted as the kernel counts it."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from fedsim.errors import UsageError
from tests.support.commands import DEADLINE
from workers.transport import relay as module
from workers.transport.relay import Relay, RelayedConnection
from workers.transport.tcp_address import TcpAddress

pytestmark = pytest.mark.process
HERE = "127.0.0.1"


class Running:
    """A relay that a thread serves until end()."""

    def __init__(self, target: int, host: str = HERE) -> None:
        self.passed: Counter[tuple[int, str]] = Counter()
        self.relay = Relay(TcpAddress(host, 0), TcpAddress(host, target), self._book)
        self.port = int(self.relay.address.rpartition(":")[2])
        self._stop = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _book(self, seconds: float, connection: int, direction: str, size: int) -> None:
        self.passed[connection, direction] += size

    def _serve(self) -> None:
        while not self._stop:
            self.relay.turn(0.01)

    def wait(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.005)

    def end(self, idle: bool = True) -> list[RelayedConnection]:
        """Stop it, with `idle` when all connections have ended; returns these."""
        if idle:
            self.wait(lambda: not self.relay.busy)
        self._stop = True
        self._thread.join(DEADLINE)
        self.relay.close()
        return self.relay.ended


@contextmanager
def pair(host: str = HERE) -> Iterator[tuple[Running, socket.socket, socket.socket]]:
    """A running relay, a client's socket and the server's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        running = Running(listener.getsockname()[1], host)
        with socket.create_connection((host, running.port), timeout=DEADLINE) as client:
            server, _ = listener.accept()
            server.settimeout(DEADLINE)
            with server:
                yield running, client, server


def take(source: socket.socket) -> bytes:
    """Everything up to the end of the stream."""
    pieces = []
    while piece := source.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


def no_difference(connections: list[RelayedConnection]) -> bool:
    return bool(connections) and all(c.residual == {"down": 0, "up": 0} for c in connections)


@pytest.mark.parametrize("host", [HERE, "::1"])
def test_a_half_closed_connection_still_carries_the_other_direction(host: str) -> None:
    with pair(host) as (running, client, server):
        client.sendall(b"question" * 1000)
        client.shutdown(socket.SHUT_WR)
        assert take(server) == b"question" * 1000
        server.sendall(b"answer" * 100_000)
        server.close()
        assert take(client) == b"answer" * 100_000
    (connection,) = running.end()
    assert connection.bytes == {"down": 600_000, "up": 8000} and connection.end == "closed"
    assert connection.residual == connection.undelivered == {"down": 0, "up": 0}
    assert running.passed == {(0, "down"): 600_000, (0, "up"): 8000}


def test_a_slow_reader_slows_the_sender_and_the_relay_holds_one_piece() -> None:
    """Sockets hold megabytes at most, so 64 MB can be sent only if all of it is read."""
    sent = bytes(range(256)) * (1 << 18)
    with pair() as (running, client, server):
        sender = threading.Thread(target=lambda: (server.sendall(sent), server.close()), daemon=True)
        sender.start()
        running.wait(lambda: running.passed[0, "down"] > 0)
        before = -1
        while before != (before := running.passed[0, "down"]):  # nothing moves any more
            time.sleep(0.2)
        assert before < len(sent) and sender.is_alive()
        held = [len(c.streams["down"].held) for c in running.relay._open.values()]
        assert held and max(held) <= module.PIECE
        assert take(client) == sent
        sender.join(DEADLINE)
    (connection,) = running.end()
    assert connection.bytes == {"down": len(sent), "up": 0} and no_difference([connection])


def test_many_connections_at_once_are_counted_each_for_itself() -> None:
    count = 60
    with socket.create_server((HERE, 0), backlog=count) as listener:
        running = Running(listener.getsockname()[1])

        def answer(end: socket.socket) -> None:
            with end:
                end.sendall(take(end) * 2)

        def serve() -> None:
            for _ in range(count):
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        answers: dict[int, bytes] = {}

        def ask(n: int) -> None:
            with socket.create_connection((HERE, running.port), timeout=DEADLINE) as client:
                client.sendall(bytes([n]) * (1000 * n + 1))
                client.shutdown(socket.SHUT_WR)
                answers[n] = take(client)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        connections = running.end()
    assert answers == {n: bytes([n]) * 2 * (1000 * n + 1) for n in range(count)}
    assert no_difference(connections) and len({c.number for c in connections}) == count
    assert sorted(c.bytes["up"] for c in connections) == [1000 * n + 1 for n in range(count)]
    assert all(c.bytes["down"] == 2 * c.bytes["up"] for c in connections)


def test_a_reset_is_forwarded_and_what_was_not_delivered_is_reported() -> None:
    with pair() as (running, client, server):
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"x" * 100)
        assert server.recv(100) == b"x" * 100
        all_sent: list[bool] = []
        sender = threading.Thread(target=lambda: all_sent.append(_send(client, bytes(1 << 24))), daemon=True)
        sender.start()
        running.wait(lambda: running.passed[0, "up"] > 200_000)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server.close()
        sender.join(DEADLINE)
        assert all_sent == [False]
    (connection,) = running.end()
    assert connection.end == "reset" and no_difference([connection])
    assert connection.undelivered["up"] > 0 and connection.undelivered["down"] == 0
    assert connection.bytes["up"] == running.passed[0, "up"]


def _send(end: socket.socket, data: bytes) -> bool:
    """Send all of it; False if the connection was reset before."""
    try:
        end.sendall(data)
    except ConnectionError:
        return False
    return True


@pytest.mark.parametrize("unread", [0, 3_000_000])
def test_connections_that_are_open_at_the_end_are_cut_and_counted(unread: int) -> None:
    with pair() as (running, client, server):
        client.sendall(b"x" * 500)
        assert server.recv(500) == b"x" * 500
        sender = threading.Thread(target=lambda: _send(server, b"z" * unread), daemon=True)
        sender.start()
        running.wait(lambda: running.passed[0, "down"] >= min(unread, 1))
        (connection,) = running.end(idle=False)
        sender.join(DEADLINE)
    assert connection.end == "cut" and no_difference([connection])
    assert connection.bytes["up"] == 500 and connection.bytes["down"] <= unread


def test_a_fin_that_a_reset_follows_leaves_no_difference() -> None:
    """The client closes while the server still sends: a FIN, and then resets for what comes."""
    with pair() as (running, client, server):
        server.sendall(b"a" * 1000)
        client.close()
        _send(server, b"b" * 3_000_000)
        server.close()
    (connection,) = running.end()
    assert connection.end == "reset" and no_difference([connection])
    # only the first 1000 bytes can have come before the client closed; its reset may come before the relay
    # has read any others
    assert connection.undelivered["down"] >= connection.bytes["down"] - 1000 and connection.bytes["up"] == 0


def _answered(running: Running, client: socket.socket, server: socket.socket) -> bytes:
    """A client half-closes and the server answers and closes; returns when the relay has read the answer."""
    answer = bytes(range(250)) * 4000
    client.shutdown(socket.SHUT_WR)
    assert take(server) == b""
    server.sendall(answer)
    server.close()
    running.wait(lambda: not running.relay._open and running.relay.busy == 1)
    return answer


def test_a_reader_that_waits_for_an_hour_still_gets_the_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (running, client, server):
        answer = _answered(running, client, server)
        seconds = running.relay.seconds
        monkeypatch.setattr(running.relay, "seconds", lambda: seconds() + 3600)
        time.sleep(0.2)  # some turns later
        assert running.relay.busy == 1
        assert take(client) == answer
        (connection,) = running.end()
    assert connection.end == "closed" and connection.undelivered == {"down": 0, "up": 0}
    assert no_difference([connection])


def test_what_both_sides_have_closed_is_delivered_after_the_relays_end() -> None:
    with pair() as (running, client, server):
        answer = _answered(running, client, server)
        (connection,) = running.end(idle=False)
        assert take(client) == answer
    assert connection.end == "cut" and connection.undelivered["down"] > 0
    assert no_difference([connection])


def test_urgent_data_is_forwarded_and_counted() -> None:
    with pair() as (running, client, server):
        client.sendall(b"before")
        client.send(b"!", socket.MSG_OOB)
        client.sendall(b"behind")
        client.shutdown(socket.SHUT_WR)
        assert take(server) == b"before!behind"
        server.close()
        assert take(client) == b""
        (connection,) = running.end()
    assert connection.bytes == {"down": 0, "up": 13} and no_difference([connection])


def test_a_byte_that_the_relay_forgets_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Relay._pull

    def forgetful(self: Relay, connection: object, direction: str, stream: module._Stream) -> None:
        real(self, connection, direction, stream)  # type: ignore[arg-type]
        stream.read -= direction == "up" and bool(stream.read)

    monkeypatch.setattr(Relay, "_pull", forgetful)
    with pair() as (running, client, server):
        client.sendall(b"x")
        client.shutdown(socket.SHUT_WR)
        assert take(server) == b"x"
        server.close()
        assert take(client) == b""
    (connection,) = running.end()
    assert connection.residual["up"] != 0


def test_a_target_that_refuses_is_counted_and_may_come_later() -> None:
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]
    running = Running(port)
    with (
        pytest.raises(ConnectionError),
        socket.create_connection((HERE, running.port), timeout=DEADLINE) as client,
    ):
        client.recv(1)
    running.wait(lambda: running.relay.refused == 1)
    assert running.relay.refusal == "Connection refused"
    with socket.create_server((HERE, port)) as listener:
        with socket.create_connection((HERE, running.port), timeout=DEADLINE) as client:
            client.sendall(b"now")
            client.shutdown(socket.SHUT_WR)
            end, _ = listener.accept()
            with end:
                assert take(end) == b"now"
            assert take(client) == b""
        (connection,) = running.end()
    assert connection.bytes == {"down": 0, "up": 3} and no_difference([connection])


def test_where_it_cannot_listen_and_what_it_does_not_know_are_the_users_mistakes() -> None:
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=rf"--listen: .*127\.0\.0\.1:{port}: Address already in use"):
            Relay(TcpAddress(HERE, port), TcpAddress(HERE, 1), lambda *piece: None)
    with pytest.raises(UsageError, match=r"--to: no-such-host\.invalid is not known"):
        Relay(TcpAddress(HERE, 0), TcpAddress("no-such-host.invalid", 1), lambda *piece: None)


@pytest.mark.parametrize(
    ("listen", "target"),
    [(HERE, HERE), (HERE, "localhost"), ("0.0.0.0", HERE), (HERE, "0.0.0.0"), ("::", "::1")],
)
def test_a_relay_to_itself_is_refused(listen: str, target: str) -> None:
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with socket.create_server((listen, 0), family=family) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(UsageError, match=r"--to: .* is the relay's own address"):
        Relay(TcpAddress(listen, port), TcpAddress(target, port), lambda *piece: None)
