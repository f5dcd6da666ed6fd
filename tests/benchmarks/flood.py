"""Measures the coordinator's memory under a message without end, with the ingress limiter and without.

    python -m tests.benchmarks.flood [--tiny]

Another process sends 1 GB as parts of 1 MB of one message over loopback. Growth is the peak of this process's
resident memory over its memory before, in MiB, the worst of five.
"""

from __future__ import annotations

import multiprocessing
import re
import time
from pathlib import Path
from unittest.mock import patch

import msgspec
import zmq

from fedsim.errors import WireError
from fedsim.wire.envelope import VERSION, Header, blob, pack
from fedsim.wire.ledger import Ledger
from tests.benchmarks.common import options_of
from workers.transport import ingress_limiter
from workers.transport.dealer import CurveKeys
from workers.transport.handshake import Hello
from workers.transport.join_credentials import KeyPair, Revocations
from workers.transport.listeners import CurveListener, LocalTcpListener
from workers.transport.router import ZmqEndpoint

PART = bytes(1_000_000)
PARTS, MAX_FRAME, REPEATS = 1000, 1 << 20, 5
FEW_PARTS, PATIENCE_MS = 20, 5000
SERVER, KEYS, NOBODY = KeyPair.new(), (KeyPair.new(),), Revocations(Path("nowhere"))


def attack(address: str, hello: list[bytes], keys: CurveKeys | None, senders: int, parts: int) -> None:
    """Returns when every sender has been cut off or has sent all."""
    with zmq.Context() as context:
        sockets = [context.socket(zmq.DEALER) for _ in range(senders)]
        monitors = [socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) for socket in sockets]
        for socket in sockets:
            socket.linger = 0
            if keys is not None:
                socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
                socket.curve_serverkey = keys.server
            socket.connect(address)
            if hello:
                socket.send_multipart(hello)
                time.sleep(0.5)
            for _ in range(parts // senders):
                socket.send(PART, zmq.SNDMORE, copy=False)
            socket.send(b"")
        for monitor in monitors:
            monitor.poll(PATIENCE_MS if parts == PARTS and monitor is monitors[0] else 0)
            monitor.close(0)
        for socket in sockets:
            socket.close(0)


def memory(what: str) -> float:
    """MiB of this process: VmRSS or VmHWM, its peak."""
    result = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert result is not None
    return int(result[1]) / 1024


def growth(port: str, known: bool, senders: int, parts: int) -> float:
    listener = (
        LocalTcpListener()
        if port == "127.0.0.1"
        else CurveListener("tcp://127.0.0.1:*", SERVER, KEYS, NOBODY)
    )
    own = isinstance(listener, LocalTcpListener)
    endpoint = ZmqEndpoint(Ledger(), listener, MAX_FRAME)
    fields, frames = blob("hello", msgspec.json.encode(Hello(listener.token if own else "", 0, 1)))
    envelope = pack(Header(VERSION, "hello", "", fields=fields), frames)
    hello = [envelope.head, *map(bytes, envelope.frames)] if known else []
    pair = KEYS[0]
    keys = CurveKeys(pair.public.encode(), pair.secret.encode(), SERVER.public.encode())
    label = (endpoint.address, hello, None if own else keys, senders, parts)
    attacker = multiprocessing.get_context("spawn").Process(target=attack, args=label)
    try:
        endpoint.wait([], 0.1)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before = memory("VmRSS")
        attacker.start()
        while attacker.is_alive():
            try:
                endpoint.wait([], 0.05)
            except WireError as e:  # without the ingress limiter it arrives whole, and is no envelope
                print(f"({e})")
        return memory("VmHWM") - before
    finally:
        attacker.join()
        endpoint.close()


PEERS = {
    "tcp on 127.0.0.1, an unauthenticated peer": ("127.0.0.1", False, 1),
    "tcp on 127.0.0.1, 20 unauthenticated peers at once": ("127.0.0.1", False, 20),
    "tcp on 127.0.0.1, with the token, after its hello": ("127.0.0.1", True, 1),
    "CURVE listener, with a key, before its hello": ("guarded", False, 1),
    "CURVE listener, with a key, after its hello": ("guarded", True, 1),
}


def main() -> None:
    tiny = options_of(__doc__).parse_args().tiny
    parts, repeats = (FEW_PARTS, 1) if tiny else (PARTS, REPEATS)
    for name, how in list(PEERS.items())[:: 4 if tiny else 1]:
        with patch.object(ingress_limiter, "SECONDS", 3600.0):
            without = growth(*how, parts)
        measured = [growth(*how, parts) for _ in range(repeats)]
        print(f"{name}: {without:.0f} MiB without, {max(measured):.0f} with", flush=True)


if __name__ == "__main__":
    main()
