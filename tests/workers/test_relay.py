"""The relay that stands for a bad network: what passes it, and when."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.commands import DEADLINE
from tests.support.relay import Relay

pytestmark = pytest.mark.process


@pytest.fixture
def network() -> Iterator[tuple[Relay, socket.socket, socket.socket]]:
    """A relay, and who speaks up and down through it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(Relay(listener.getsockname()[1])) as relay,
        socket.create_connection(("127.0.0.1", relay.port), timeout=DEADLINE) as up,
    ):
        down, _ = listener.accept()
        down.settimeout(DEADLINE)
        with down:
            yield relay, up, down


def take(source: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count and (chunk := source.recv(count - len(got))):
        got += chunk
    return got


def test_late_bytes_are_all_there_and_in_order(
    network: tuple[Relay, socket.socket, socket.socket],
) -> None:
    relay, up, down = network
    sent = bytes(range(256)) * 2000
    relay.delay(0.1, 0.05)
    began = time.monotonic()
    threading.Thread(target=up.sendall, args=(sent[:-1],)).start()
    assert take(down, 1) == sent[:1]
    assert time.monotonic() - began >= 0.1
    relay.delay(0.0)
    assert take(down, len(sent) - 2) == sent[1:-1]
    up.sendall(sent[-1:])
    assert take(down, 1) == sent[-1:]
    assert relay.bytes == {"up": len(sent), "down": 0}


def test_silence_is_one_way_and_loses_nothing_unless_it_is_cut(
    network: tuple[Relay, socket.socket, socket.socket],
) -> None:
    relay, up, down = network
    relay.mute("up", 0.3)
    began = time.monotonic()
    up.sendall(b"held")
    down.sendall(b"passes")
    assert take(up, 6) == b"passes"
    assert take(down, 4) == b"held"
    assert time.monotonic() - began >= 0.3
    relay.mute("up", 60.0)
    up.sendall(b"lost")
    time.sleep(0.05)
    relay.cut()
    for end in (up, down):
        with pytest.raises(ConnectionResetError):
            end.recv(1)


def test_a_slow_connection_and_a_flipped_bit(network: tuple[Relay, socket.socket, socket.socket]) -> None:
    relay, up, down = network
    relay.throttle(10_000.0)
    began = time.monotonic()
    down.sendall(bytes(2000))
    assert take(up, 2000) == bytes(2000)
    assert time.monotonic() - began >= 0.2
    relay.flip("up")
    up.sendall(bytes(100))
    got = take(down, 100)
    assert sum(byte.bit_count() for byte in got) == 1
