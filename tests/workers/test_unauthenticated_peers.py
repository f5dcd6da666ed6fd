"""Unauthenticated peers at the coordinator's listeners: what they send never becomes an envelope, and costs
little."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest
import zmq

from fedsim.errors import AccessError, ConnectionLost, DataError, TaskError, UsageError
from fedsim.problem import Problem
from fedsim.wire.envelope import NONE, VERSION, Header, blob, pack
from fedsim.wire.ledger import Ledger
from protocols import find
from tests.support.commands import DEADLINE
from tests.support.harness import play, problem_of
from workers import protocol_messages as messages
from workers.transport import ingress_limiter, router, tcp_counters
from workers.transport.dealer import Connection, CurveKeys, KeyRefused
from workers.transport.endpoint import Endpoint
from workers.transport.handshake import Hello
from workers.transport.join_credentials import KeyPair, Revocations
from workers.transport.listeners import CurveListener, IpcListener, Listener, LocalTcpListener
from workers.transport.router import ZmqEndpoint
from workers.worker.heartbeat import Heartbeat
from workers.worker.main import announce, serve
from workers.worker.runtime import WorkerRuntime

pytestmark = pytest.mark.process

MAX_FRAME = 1 << 20
SERVER, KNOWN = KeyPair.new(), (KeyPair.new(), KeyPair.new())
LISTENERS: dict[str, Callable[[], Listener]] = {
    "folder": IpcListener,
    "port": LocalTcpListener,
    "guarded": lambda: guarded("tcp://127.0.0.1:*"),
}


def guarded(bind: str, revoked: Path = Path("nowhere")) -> CurveListener:
    return CurveListener(bind, SERVER, KNOWN, Revocations(revoked))


def greeting(mechanism: bytes) -> bytes:
    """Of ZMTP 3.1 (https://rfc.zeromq.org/spec/37/)."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
LEGACY = b"\x01\x00\x06\x00hello"
NOISE = {
    "nothing": b"",
    "one byte": b"\xff",
    "zmtp 1": LEGACY,
    "zmtp 1, ten times": LEGACY + 10 * b"\x06\x00hello",
    "zmtp 2": b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00",
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "half a greeting": greeting(b"NULL")[:32],
    "a greeting": greeting(b"NULL"),
    "plain": greeting(b"PLAIN") + b"\x04\x0a\x05HELLO\x01a\x01b",
    "a wrong command": greeting(b"NULL") + b"\x04\x06\x05ERROR" + bytes(200),
    "an envelope too early": greeting(b"NULL") + b"\x00\x05hello",
} | {f"random {seed}": random.Random(seed).randbytes(1 << seed) for seed in range(12)}


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "HANDSHAKE_MS", 500)


@pytest.fixture
def knock(request: pytest.FixtureRequest) -> Iterator[Callable[[], socket.socket]]:
    """Opens raw connections to the endpoint of the test."""
    with ExitStack() as closing:

        def opened() -> socket.socket:
            return closing.enter_context(raw(request.getfixturevalue("endpoint")))

        yield opened


@pytest.fixture
def endpoint(request: pytest.FixtureRequest) -> Iterator[ZmqEndpoint]:
    created = ZmqEndpoint(Ledger(), LISTENERS[getattr(request, "param", "port")](), MAX_FRAME)
    yield created
    created.close()


def raw(endpoint: ZmqEndpoint) -> socket.socket:
    scheme, _, where = endpoint.address.partition("://")
    created = socket.socket(socket.AF_UNIX if scheme == "ipc" else socket.AF_INET)
    created.settimeout(DEADLINE)
    try:
        created.connect(where if scheme == "ipc" else ("127.0.0.1", endpoint.listener.port))
    except OSError:
        created.close()
        raise
    return created


def shut_out(connection: socket.socket) -> None:
    """Returns as soon as the other side has closed. Errors: TimeoutError."""
    with suppress(ConnectionError):
        while connection.recv(4096):
            pass


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def hello(token: str, index: int) -> list[bytes]:
    fields, frames = blob("hello", msgspec.json.encode(Hello(token, index, 1)))
    envelope = pack(Header(VERSION, "hello", "", fields=fields), frames)
    return [envelope.head, *(bytes(f) for f in envelope.frames)]


def until(endpoint: ZmqEndpoint, true: Callable[[], bool]) -> list[int]:
    """Wait as the coordinator does; the workers whose envelopes came."""
    came, deadline = [], time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < deadline
        came += [i.worker for i in endpoint.wait([], 0.01)[0]]
    return came


# ---- who does not speak the protocol


@pytest.mark.parametrize("endpoint", LISTENERS, indirect=True)
def test_noise_is_refused_by_libzmq_itself(endpoint: ZmqEndpoint, knock: Callable[[], socket.socket]) -> None:
    """No message of it comes out of the socket, and the connection does not outlive its handshake's time."""
    connections = [knock() for _ in NOISE]
    for connection, data in zip(connections, NOISE.values(), strict=True):
        with suppress(ConnectionError):  # cut off while it was still talking
            connection.sendall(data)
    for connection in connections:
        shut_out(connection)
    assert endpoint.wait([], 0.05) == ([], [])
    assert endpoint.unauthenticated_peers == 0


@pytest.mark.parametrize("endpoint", ["folder", "port"], indirect=True)
@pytest.mark.parametrize("nbytes", [MAX_FRAME + 1, 2**31, 2**44, 2**63, 2**64 - 1])
def test_an_announced_frame_that_is_too_long_costs_no_memory(
    endpoint: ZmqEndpoint, knock: Callable[[], socket.socket], nbytes: int
) -> None:
    """The peer speaks the protocol perfectly, then says what comes."""
    connection, before = knock(), resident()
    connection.sendall(greeting(b"NULL") + READY)
    with suppress(ConnectionError):
        connection.sendall(b"\x02" + struct.pack(">Q", nbytes) + bytes(1 << 16))
    shut_out(connection)
    assert endpoint.wait([], 0.05) == ([], [])
    assert resident() - before < 32 * 2**20


def test_hundreds_of_silent_connections_hold_nobody_up(
    endpoint: ZmqEndpoint, knock: Callable[[], socket.socket]
) -> None:
    silent, before = [knock() for _ in range(300)], resident()
    assert isinstance(endpoint.listener, LocalTcpListener)
    worker = Connection(endpoint.address, Hello(endpoint.listener.token, 0, 1), MAX_FRAME)
    try:
        assert until(endpoint, lambda: bool(endpoint._routes)) == [0]
    finally:
        worker.close()
    for connection in silent:
        shut_out(connection)
    assert resident() - before < 32 * 2**20


# ---- who speaks it, but is not one of us


ENVELOPES = {
    "wrong token": hello("0" * 32, 0),
    "no token": hello("", 0),
    "not ascii": hello("é" * 16, 0),
    "no envelope": [b"hello"],
    "empty": [b""],
    "many frames": [b""] * 200,
    "another kind": [bytes(pack(Header(VERSION, "upload", "run")).head)],
    "no json": [*hello("", 0)[:1], b"{"],
}


def test_a_stranger_gets_no_letter_in(endpoint: ZmqEndpoint) -> None:
    """Its envelopes are dropped, counted and not in the ledger; a worker comes in behind it."""
    assert isinstance(endpoint.listener, LocalTcpListener)
    with zmq.Context() as context, context.socket(zmq.DEALER) as unauthenticated_peer:
        unauthenticated_peer.linger = 0
        unauthenticated_peer.connect(endpoint.address)
        for frames in ENVELOPES.values():
            unauthenticated_peer.send_multipart(frames)
        assert until(endpoint, lambda: endpoint.unauthenticated_peers == len(ENVELOPES)) == []
        assert (endpoint.total_bytes, endpoint._routes) == ({"up": 0, "down": 0}, {})
        unauthenticated_peer.send_multipart(hello(endpoint.listener.token, 1))
        assert until(endpoint, lambda: bool(endpoint._routes)) == [1]


def test_a_second_worker_of_the_same_index_is_refused_and_the_first_unharmed(endpoint: ZmqEndpoint) -> None:
    assert isinstance(endpoint.listener, LocalTcpListener)
    with ExitStack() as closing:
        who = Hello(endpoint.listener.token, 0, 1)
        first = Connection(endpoint.address, who, MAX_FRAME)
        closing.callback(first.close)
        assert until(endpoint, lambda: bool(endpoint._routes)) == [0]
        second = Connection(endpoint.address, who, MAX_FRAME)
        closing.callback(second.close)
        assert until(endpoint, lambda: endpoint.unauthenticated_peers == 1) == []
        endpoint.send(0, pack(Header(VERSION, "stop", "run")))
        answer = first.receive(DEADLINE)
        assert answer is not None and answer.header.kind == "stop"
        assert second.receive(0.05) is None


def curve_keys(pair: KeyPair, server: KeyPair = SERVER) -> CurveKeys:
    return CurveKeys(pair.public.encode(), pair.secret.encode(), server.public.encode())


@pytest.fixture
def come(endpoint: ZmqEndpoint) -> Iterator[Callable[[int], Connection]]:
    """A worker with a key says hello at the CURVE listener."""
    with ExitStack() as closing:

        def joined(worker: int) -> Connection:
            who = Hello("", worker, 1)
            created = Connection(endpoint.address, who, MAX_FRAME, curve_keys(KNOWN[worker]), DEADLINE)
            closing.callback(created.close)
            return created

        yield joined


@pytest.mark.parametrize("endpoint", ["guarded"], indirect=True)
@pytest.mark.parametrize("nbytes", [1, 10 * router.HELLO_BYTES])
def test_a_worker_that_was_given_up_is_told_so_and_comes_in_again(
    endpoint: ZmqEndpoint, come: Callable[[int], Connection], nbytes: int
) -> None:
    """Its connection stayed open. It is told once, however much it says, and that is in the ledger."""
    worker = come(1)
    assert until(endpoint, lambda: bool(endpoint._routes)) == [1]
    endpoint.dismiss(1)
    for _ in range(3):
        worker.send(
            pack(Header(VERSION, "upload", "run", fields=blob("x", bytes(nbytes))[0]), [bytes(nbytes)])
        )
    assert until(endpoint, lambda: bool(endpoint._rejoin_sent)) == []
    with pytest.raises(ConnectionLost, match="had given this worker up"):
        worker.receive(DEADLINE)
    assert endpoint.wait([], 0.05) == ([], [])
    assert worker.receive(0.05) is None, "a second answer"
    rows = [e for e in endpoint.ledger.close(0) if e.message == "rejoin"]
    assert {(e.kind, e.worker, e.direction) for e in rows} == {("control", 1, "down")}
    assert len(rows) == 2 and endpoint.unauthenticated_peers == 0
    second = come(1)
    assert until(endpoint, lambda: bool(endpoint._routes)) == [1]
    endpoint.send(1, pack(Header(VERSION, "stop", "run")))
    answer = second.receive(DEADLINE)
    assert answer is not None and answer.header.kind == "stop"


@pytest.mark.parametrize("endpoint", ["guarded"], indirect=True)
def test_a_worker_that_goes_before_its_hello_is_read_leaves_its_place(
    endpoint: ZmqEndpoint, come: Callable[[int], Connection]
) -> None:
    """The coordinator reads late: when it answers, nobody is there, and another may come."""
    Connection(endpoint.address, Hello("", 0, 1), MAX_FRAME, curve_keys(KNOWN[0]), DEADLINE).close(1.0)
    time.sleep(0.2)
    assert until(endpoint, lambda: bool(endpoint._routes)) == [0]
    with pytest.raises(TaskError, match="cannot send to worker 0"):
        endpoint.send(0, pack(Header(VERSION, "welcome", "run")))
    assert endpoint.wait([], DEADLINE) == ([], []) and endpoint.lost == [0]
    endpoint.lost = []
    come(0)
    assert until(endpoint, lambda: bool(endpoint._routes)) == [0]
    endpoint.send(0, pack(Header(VERSION, "welcome", "run")))


@pytest.mark.parametrize("endpoint", ["guarded"], indirect=True)
def test_a_guest_that_has_nothing_to_say_speaks_up(
    endpoint: ZmqEndpoint, come: Callable[[int], Connection], tmp_path: Path
) -> None:
    """About nothing: such a heartbeat renews no lease. It finds out that it was given up."""
    runtime = WorkerRuntime(problem_of(find("fedavg")), tmp_path, "run", 0)
    worker, ended = come(0), threading.Event()

    def remote_worker() -> None:
        with pytest.raises(ConnectionLost):
            serve(worker, runtime, lambda *_: [], idle=0.05)
        ended.set()

    thread = threading.Thread(target=remote_worker, daemon=True)
    thread.start()
    envelopes: list[Header] = []
    while len(envelopes) < 4:
        came = [i.envelope.header for i in endpoint.wait([], DEADLINE)[0]]
        for _ in came:  # as the coordinator does: without an answer the connection is given up
            endpoint.send(0, messages.idle("run"))
        envelopes += came
    assert [h.kind for h in envelopes] == ["hello", "heartbeat", "heartbeat", "heartbeat"]
    assert {(h.run, h.round, h.client) for h in envelopes[1:]} == {("run", NONE, NONE)}
    endpoint.dismiss(0)
    assert until(endpoint, ended.is_set) == []
    thread.join(DEADLINE)


@pytest.mark.parametrize("endpoint", ["guarded"], indirect=True)
def test_a_guest_that_is_not_answered_gives_the_connection_up(
    endpoint: ZmqEndpoint, come: Callable[[int], Connection], tmp_path: Path
) -> None:
    """What it sends arrives, and nothing comes back: it would never have known of the run's end."""
    runtime = WorkerRuntime(problem_of(find("fedavg")), tmp_path, "run", 0)
    with pytest.raises(ConnectionLost, match="nothing was received from"):
        serve(come(0), runtime, lambda *_: [], idle=0.05)


@pytest.mark.parametrize("endpoint", ["guarded"], indirect=True)
def test_a_computation_ends_with_the_connection(
    endpoint: ZmqEndpoint, come: Callable[[int], Connection]
) -> None:
    """Nobody waits for its result; a heartbeat is due where the network is called."""
    worker = come(0)
    heartbeat = Heartbeat(worker)
    heartbeat.begin(Header(VERSION, "task", "run", 1, 1, 1, 0))
    heartbeat._due = 0.0
    heartbeat()
    for stream in tcp_counters.streams(endpoint.listener.port):
        tcp_counters.end(stream)
    assert worker._monitor is not None and worker._monitor.poll(int(DEADLINE * 1000))
    heartbeat()  # not due yet
    heartbeat._due = 0.0
    with pytest.raises(ConnectionLost, match="was lost"):
        heartbeat()


@pytest.mark.parametrize("endpoint", ["guarded"], indirect=True)
def test_a_sign_of_life_at_the_end_is_in_the_ledger(
    endpoint: ZmqEndpoint, come: Callable[[int], Connection]
) -> None:
    """Nobody listens any more when the kernel is asked, and it has counted this envelope."""
    worker = come(0)
    assert until(endpoint, lambda: bool(endpoint._routes)) == [0]
    worker.send(pack(Header(VERSION, "heartbeat", "run")))
    assert endpoint.residual() == {"down": 0, "up": 0}


@pytest.mark.parametrize("endpoint", ["guarded"], indirect=True)
def test_a_key_opens_the_guarded_port(endpoint: ZmqEndpoint) -> None:
    who = Hello("", 7, 1)  # who it says it is does not count, but its key
    with pytest.raises(AccessError, match="does not accept this key"):
        Connection(endpoint.address, who, MAX_FRAME, curve_keys(KeyPair.new()), DEADLINE)
    with pytest.raises(TaskError, match="no coordinator with the key of the join file"):
        Connection(endpoint.address, who, MAX_FRAME, curve_keys(KNOWN[0], KeyPair.new()), 0.3)
    Connection(endpoint.address, who, MAX_FRAME, curve_keys(KNOWN[1]), DEADLINE).close(1.0)
    assert until(endpoint, lambda: bool(endpoint.ledger.booked("up"))) == [1]
    assert endpoint.unauthenticated_peers == 0


@pytest.fixture
def revocations(tmp_path: Path) -> Revocations:
    return Revocations(tmp_path / "revoked.json")


@pytest.mark.parametrize("dismissed", [False, True])
def test_a_key_that_is_revoked_opens_nothing_and_what_it_has_opened_ends(
    revocations: Revocations, dismissed: bool
) -> None:
    """Within a second, also where the worker has been given up and its connection is as good as nobody's. The
    others go on."""
    with ExitStack() as closing:
        endpoint = ZmqEndpoint(Ledger(), guarded("tcp://127.0.0.1:*", revocations.path), MAX_FRAME)
        closing.callback(endpoint.close)

        def come(worker: int) -> Connection:
            keys = curve_keys(KNOWN[worker])
            created = Connection(endpoint.address, Hello("", worker, 1), MAX_FRAME, keys, DEADLINE)
            closing.callback(created.close)
            return created

        stays, goes = come(0), come(1)
        until(endpoint, lambda: len(endpoint._routes) == 2)
        if dismissed:
            endpoint.dismiss(1)
        revocations.add([1])
        with pytest.raises(ConnectionLost, match="was lost"):
            goes.receive(1.0)
        with pytest.raises(ConnectionLost, match="was lost"):
            goes.send(pack(Header(VERSION, "upload", "run")))  # as if it had computed meanwhile
        if not dismissed:
            until(endpoint, lambda: endpoint.lost == [1])
        with pytest.raises(KeyRefused, match="does not accept this key"):
            come(1)
        with pytest.raises(AccessError, match="the key of worker 1 was revoked"):
            endpoint.listener.identify(Hello("", 1, 1), KNOWN[1].public)
        endpoint.send(0, pack(Header(VERSION, "stop", "run")))
        answer = stays.receive(DEADLINE)
        assert answer is not None and answer.header.kind == "stop"


def test_revocations_add_up_and_a_damaged_file_takes_none_back(revocations: Revocations) -> None:
    assert revocations.workers() == set()
    revocations.add([1])
    revocations.add([3, 1])
    assert revocations.workers() == {1, 3}
    for damaged in (b"", b"{", b'{"format":1,"workers":[-1]}', b'{"format":2,"workers":[]}'):
        revocations.path.write_bytes(damaged)
        assert revocations.workers() == {1, 3}
        with pytest.raises(DataError, match=r"revoked\.json"):
            revocations.add([2])
    revocations.clear()
    assert revocations.workers() == set()


def test_a_stranger_is_no_event(endpoint: ZmqEndpoint) -> None:
    """An empty answer before its time would mean to the coordinator that its workers hang."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as unauthenticated_peer:
        unauthenticated_peer.linger = 0
        unauthenticated_peer.connect(endpoint.address)
        unauthenticated_peer.send(b"hello")
        until(endpoint, lambda: endpoint.unauthenticated_peers == 1)
        threading.Timer(0.05, unauthenticated_peer.send, [b"again"]).start()
        began = time.monotonic()
        assert endpoint.wait([], 0.2) == ([], [])
        assert endpoint.unauthenticated_peers == 2
        assert time.monotonic() - began >= 0.2


def test_a_worker_says_hello_once(endpoint: ZmqEndpoint) -> None:
    assert isinstance(endpoint.listener, LocalTcpListener)
    worker = Connection(endpoint.address, Hello(endpoint.listener.token, 0, 1), MAX_FRAME)
    try:
        assert until(endpoint, lambda: bool(endpoint._routes)) == [0]
        worker.send(pack(Header(VERSION, "hello", "")))
        until(endpoint, lambda: bool(endpoint.unreadable))
        assert endpoint.unreadable == {0: "a second hello"}
    finally:
        worker.close()


def test_a_flipped_bit_is_known_for_whose_it_is(endpoint: ZmqEndpoint) -> None:
    """The envelope is nowhere, and the coordinator gives the worker up; others are not concerned."""
    assert isinstance(endpoint.listener, LocalTcpListener)
    with zmq.Context() as context, context.socket(zmq.DEALER) as worker:
        worker.linger = 0
        worker.connect(endpoint.address)
        fields, frames = blob("hello", msgspec.json.encode(Hello(endpoint.listener.token, 1, 1)))
        hello = pack(Header(VERSION, "hello", "", fields=fields), frames)
        worker.send_multipart([hello.head, *hello.frames])
        assert until(endpoint, lambda: bool(endpoint._routes)) == [1]
        fields, frames = blob("score", bytes(40))
        score = pack(Header(VERSION, "score", "run", fields=fields), frames)
        worker.send_multipart([score.head, bytes(39) + b"\x01"])
        assert until(endpoint, lambda: bool(endpoint.unreadable)) == []
        assert "checksum" in endpoint.unreadable[1]


# ---- who sends without end


PART = bytes(MAX_FRAME - 64)
"""Of a message; below the limit of a frame also when it is encrypted."""


class Flood:
    """A message of 300 MB, from a thread; `who` says hello first. over: it was sent, or cut off."""

    def __init__(self, endpoint: ZmqEndpoint, who: list[bytes], keys: KeyPair | None) -> None:
        self._endpoint, self._who, self._keys = endpoint, who, keys
        self.over, self.cut = threading.Event(), False
        self._thread = threading.Thread(target=self._rise, daemon=True)
        self._thread.start()

    def _rise(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            if self._keys is not None:
                c = curve_keys(self._keys)
                dealer.curve_publickey, dealer.curve_secretkey = c.public, c.secret
                dealer.curve_serverkey = c.server
            monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            dealer.connect(self._endpoint.address)
            if self._who:
                dealer.send_multipart(self._who)
                while not self._endpoint._routes:
                    time.sleep(0.01)
            for _ in range(300):
                dealer.send(PART, zmq.SNDMORE, copy=False)
            dealer.send(b"")
            self.cut = bool(monitor.poll(5000))
            self.over.set()
            dealer.disable_monitor()
            monitor.close(0)

    def ebb(self) -> None:
        self._thread.join(DEADLINE)


@pytest.mark.parametrize("known", [False, True], ids=["unknown", "known"])
@pytest.mark.parametrize("endpoint", ["port", "guarded"], indirect=True)
def test_a_message_without_end_is_cut_off(endpoint: ZmqEndpoint, known: bool) -> None:
    """Also from one of us. libzmq would keep all of it, for no frame of it is too long. (At the CURVE
    listener even the unauthenticated peer has a key: without one there is no connection to send it by.)"""
    listener, before, most = endpoint.listener, resident(), [0]
    keys = None if isinstance(listener, LocalTcpListener) else KNOWN[0]
    token = listener.token if isinstance(listener, LocalTcpListener) else ""
    flood = Flood(endpoint, hello(token, 0) if known else [], keys)

    def over() -> bool:
        most[0] = max(most[0], resident())
        return flood.over.is_set()

    assert until(endpoint, over) == ([0] if known else [])
    flood.ebb()
    assert flood.cut
    assert most[0] - before < 150 * 2**20


@pytest.mark.parametrize("endpoint", ["port", "guarded"], indirect=True)
def test_a_worker_may_be_ahead_and_send_much(endpoint: ZmqEndpoint) -> None:
    """What counts is what was not taken yet, not what it has sent in all; and the kernel's proof holds."""
    listener = endpoint.listener
    own = isinstance(listener, LocalTcpListener)
    who = Hello(listener.token if isinstance(listener, LocalTcpListener) else "", 0, 1)
    worker = Connection(endpoint.address, who, MAX_FRAME, None if own else curve_keys(KNOWN[0]), DEADLINE)
    try:
        assert until(endpoint, lambda: bool(endpoint._routes)) == [0]
        envelope = pack(Header(VERSION, "upload", "run", fields=blob("x", PART)[0]), [PART])
        for sent in range(8, 8 * 8, 8):
            for _ in range(8):
                worker.send(envelope)
            time.sleep(3 * ingress_limiter.SECONDS)  # the coordinator is busy with something else
            up = endpoint.total_bytes
            assert set(until(endpoint, lambda up=up, sent=sent: up["up"] > sent * len(PART))) == {0}
        assert endpoint.residual() == {"down": 0, "up": 0}
    finally:
        worker.close()


# ---- what is not opened at all


def test_an_old_libzmq_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: (4, 3, 4))
    for listener in LISTENERS.values():
        with pytest.raises(UsageError, match=r"known security holes; fedsim needs 4\.3\.5"):
            ZmqEndpoint(Ledger(), listener(), MAX_FRAME)


# ---- a run among unauthenticated peers


class Mob:
    """Makes noise, keeps silent connections and claims to be a worker, until it is told to stop."""

    def __init__(self, endpoint: ZmqEndpoint, silent: int) -> None:
        self._endpoint, self._over = endpoint, threading.Event()
        self._silent = [raw(endpoint) for _ in range(silent)]
        self.noises = 0
        self._thread = threading.Thread(target=self._rage, daemon=True)
        self._thread.start()

    def _rage(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.sndtimeo = 20
            dealer.sndhwm = 1  # what it cannot get rid of would be this process's memory, too
            dealer.connect(self._endpoint.address)
            while not self._over.wait(0.02):
                for data in NOISE.values():
                    with suppress(OSError), raw(self._endpoint) as connection:
                        connection.sendall(data)
                    self.noises += 1
                for frames in ENVELOPES.values():
                    with suppress(zmq.Again):
                        dealer.send_multipart(frames)

    def disperse(self) -> None:
        self._over.set()
        self._thread.join(DEADLINE)
        for connection in self._silent:
            connection.close()


def work(endpoint: ZmqEndpoint, token: str, problem: Problem, folder: Path, index: int) -> None:
    """A worker in a thread of this process."""
    connection = Connection(endpoint.address, Hello(token, index, 1), MAX_FRAME)
    try:
        registration_reply = connection.receive(DEADLINE)
        assert registration_reply is not None
        runtime = WorkerRuntime(problem, folder, registration_reply.header.run, index)
        announce(connection, runtime.problem, runtime.run)
        serve(connection, runtime, runtime.replies)
    finally:
        connection.close(1.0)


def test_a_run_among_strangers_has_the_bits_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the kernel counts the unauthenticated peers' bytes, too, and waiting for them to be accounted for is in
    # vain
    monkeypatch.setattr(tcp_counters.residual, "__defaults__", (0.1,))

    def created() -> Problem:
        return problem_of(find("fedlap_cov"), rounds=6)

    with ExitStack() as closing:

        def connect(problem: Problem, folder: Path, ledger: Ledger) -> Endpoint:
            listener = LocalTcpListener()
            endpoint = ZmqEndpoint(ledger, listener, MAX_FRAME)
            mobs.append(Mob(endpoint, silent=100))
            closing.callback(mobs[0].disperse)
            until(endpoint, lambda: endpoint.unauthenticated_peers > 0)  # they are there first
            for i in range(2):
                label = (endpoint, listener.token, created(), folder, i)
                threading.Thread(target=work, args=label, daemon=True).start()
            return endpoint

        mobs: list[Mob] = []
        quiet = play(created(), tmp_path / "quiet")
        before = resident()
        run = play(created(), tmp_path / "run", connect=connect, workers=2)
    assert run.bits == quiet.bits
    assert isinstance(run.endpoint, ZmqEndpoint)
    assert run.endpoint.unauthenticated_peers >= len(ENVELOPES) and mobs[0].noises >= len(NOISE)
    assert resident() - before < 64 * 2**20
