"""tcp://ADDRESS:PORT: one parser for --bind, --connect and join files; what it lets through can be used."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import zmq

from fedsim.errors import DataError, UsageError
from fedsim.wire.ledger import Ledger
from launch.configuration.config import Overrides
from launch.configuration.listen_address import check_bind
from workers.transport.dealer import Connection, CurveKeys
from workers.transport.handshake import Hello
from workers.transport.join_credentials import KeyPair, Revocations
from workers.transport.listeners import CurveListener
from workers.transport.router import ZmqEndpoint
from workers.transport.tcp_address import TcpAddress, checked_url

WRONG = [
    ("tcp://127.0.0.1:65536", "port '65536' is no whole number from 1 to 65535"),
    *(
        (f"tcp://127.0.0.1:{port}", "port '")
        for port in ("0", "-1", "+5", "5x", "5.0", "0x15", " 5", "5 ", "5/")
    ),
    ("tcp://127.0.0.1:5\n", r"port '5\\n'"),
    ("tcp://127.0.0.1:\N{ARABIC-INDIC DIGIT THREE}", "port '"),
    *(
        (f"tcp://{end}", "the port is missing")
        for end in ("127.0.0.1:", "127.0.0.1", "localhost", "[::1]", "")
    ),
    ("tcp://:5555", "the address is missing"),
    *((f"tcp://{a}:5555", f"'{a}' is neither an address nor a name") for a in (" 127.0.0.1", "a@b", "127.1")),
    ("tcp://1.2.3.4;5.6.7.8:5555", "'1.2.3.4;5.6.7.8' is neither"),  # libzmq: from which address, to which
    *((f"tcp://{a}:5555", "is neither") for a in ("999.1.1.1", "-x", "\N{LATIN SMALL LETTER E WITH ACUTE}")),
    *((f"tcp://{a}:5555", "an IPv6 address stands in brackets") for a in ("::1", "fe80::1%eth0")),
    *((f"tcp://{a}", "the brackets") for a in ("[::1:5555", "::1]:5555", "[::1]5555", "x[::1]:5555")),
    *((f"tcp://[{a}]:5555", "is no IPv6 address") for a in ("", "127.0.0.1", "::g", "fe80::1%")),
    *((a, "it begins with tcp://") for a in ("127.0.0.1:5555", "TCP://127.0.0.1:5555", "ipc:///tmp/x", "")),
]


@pytest.mark.parametrize(("text", "why"), WRONG, ids=lambda value: repr(value))
def test_what_is_no_address_is_refused_wherever_one_stands(text: str, why: str, tmp_path: Path) -> None:
    for parse, owner in ((TcpAddress.to_listen, "--bind"), (TcpAddress.to_connect, "--connect")):
        with pytest.raises(UsageError, match=f"^{owner} .* is no tcp://ADDRESS:PORT: .*{why}") as refused:
            parse(text)
        assert len(str(refused.value).splitlines()) == 1
    with pytest.raises(DataError, match=r"join.json: url .* is no tcp://ADDRESS:PORT: .*--connect$"):
        checked_url(None, text, tmp_path / "join.json")
    with pytest.raises(UsageError, match=r"^--connect"):
        checked_url(text, "tcp://127.0.0.1:5555", tmp_path / "join.json")
    if text:
        with pytest.raises(UsageError, match="is no tcp://ADDRESS:PORT"):  # before anything is imported
            Overrides.of({"remote_workers": 1, "bind": text}).resolve()
        with pytest.raises(UsageError, match="is no tcp://ADDRESS:PORT"):
            check_bind(text)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:5555", "127.0.0.1", 5555),
        ("tcp://127.0.0.1:05555", "127.0.0.1", 5555),
        ("tcp://127.0.0.1:1", "127.0.0.1", 1),
        ("tcp://127.0.0.1:65535", "127.0.0.1", 65535),
        ("tcp://127.0.0.1:*", "127.0.0.1", 0),
        ("tcp://[::1]:5555", "::1", 5555),
        ("tcp://[::ffff:127.0.0.1]:5", "::ffff:127.0.0.1", 5),
        ("tcp://[fe80::1%eth0]:*", "fe80::1%eth0", 0),
        ("tcp://localhost:5555", "localhost", 5555),
        ("tcp://a.b-c.example:5555", "a.b-c.example", 5555),
        ("tcp://eth0:*", "eth0", 0),
        ("tcp://0.0.0.0:5555", "0.0.0.0", 5555),
    ],
)
def test_an_address_is_parsed_and_written_again(text: str, host: str, port: int) -> None:
    address = TcpAddress.to_listen(text)
    assert (address.host, address.port) == (host, port)
    assert TcpAddress.to_listen(str(address)) == address
    if port:
        assert TcpAddress.to_connect(text) == address
    else:
        with pytest.raises(UsageError, match=r"port '\*' is no whole number from 1 to 65535$"):
            TcpAddress.to_connect(text)


def test_every_network_is_not_listened_at_by_accident() -> None:
    with pytest.raises(UsageError, match=r"would listen on every network .* tcp://0\.0\.0\.0:5555"):
        TcpAddress.to_listen("tcp://*:5555")
    with pytest.raises(UsageError, match="is no address that one can connect to"):
        TcpAddress.to_connect("tcp://*:5555")


@pytest.mark.parametrize(
    "text",
    [
        "tcp://no-such-machine.invalid:5555",
        "tcp://[fe80::1%no-such-link]:5555",
        "tcp://[2001:db8::1]:5555",
        "tcp://192.0.2.1:5555",
    ],
)
def test_an_address_that_this_machine_has_not_is_refused(text: str) -> None:
    host = text.removeprefix("tcp://").removesuffix(":5555").strip("[]")
    with pytest.raises(
        UsageError, match=f"^--bind .*: {host} is no address of this machine|no IPv6"
    ) as refused:
        check_bind(text)
    assert len(str(refused.value).splitlines()) == 1


def _listener(bind: str, folder: Path, keys: KeyPair, worker: KeyPair) -> CurveListener:
    return CurveListener(bind, keys, (worker,), Revocations(folder / "revoked.json"))


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("bind", ["tcp://[::1]:*", "tcp://[::]:*", "tcp://localhost:*", "tcp://lo:*"])
def test_a_worker_connects_and_the_kernel_counts_its_bytes(bind: str, tmp_path: Path) -> None:
    if ":" in bind.removeprefix("tcp://").removesuffix(":*") and not _has_ipv6():
        with pytest.raises(UsageError, match=r"^--bind .*IPv6|^--bind .*is no address of this machine"):
            check_bind(bind)
        return
    check_bind(bind)
    ours, theirs = KeyPair.new(), KeyPair.new()
    endpoint = ZmqEndpoint(Ledger(), _listener(bind, tmp_path, ours, theirs), 1 << 16)
    try:
        assert endpoint.listener.port > 0
        url = endpoint.address.replace("[::]", "[::1]")
        keys = CurveKeys(theirs.public.encode(), theirs.secret.encode(), ours.public.encode())
        connection = Connection(url, Hello("", 0, 1), 1 << 16, keys)
        (incoming,), _ = endpoint.wait([], 30)
        assert incoming.worker == 0
        assert endpoint.residual() == {"down": 0, "up": 0}
        connection.close()
    finally:
        endpoint.close()


def test_only_an_ipv6_address_switches_ipv6_on() -> None:
    """A name that has an IPv4 address is used by it, as the coordinator listens by it."""
    context = zmq.Context()
    for text, six in (
        ("tcp://127.0.0.1:5555", 0),
        ("tcp://[::1]:5555", 1),
        ("tcp://lo:5555", 0),
        ("tcp://localhost:5555", 0),
        ("tcp://no-such-machine.invalid:5555", 0),
    ):
        with context.socket(zmq.DEALER) as created:
            TcpAddress.to_connect(text).allow(created)
            assert created.getsockopt(zmq.IPV6) == six
    context.term()
