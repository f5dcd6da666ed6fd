"""Decide which peers may connect: a thread answers ZAP requests (https://rfc.zeromq.org/spec/27/).

A socket with a ZAP domain refuses random bytes, and peers that speak ZMTP 1 or 2. Without a domain, libzmq
passes their data to the application. A thread answers, because workers connect before the coordinator waits
for them. pyzmq's own authenticator would run an event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import zmq
from zmq.utils import z85

from fedsim.errors import UsageError

OLDEST = (4, 3, 5)
"""The oldest accepted libzmq. Older ones can be attacked without a key: CVE-2019-6250,
CVE-2019-13132, CVE-2020-15166 and others."""
DOMAIN = b"fedsim"
"""The ZAP domain of all listeners. libzmq refuses connections of a domain that no handler knows."""
_ADDRESS = "inproc://zeromq.zap.01"


def guard(socket: zmq.Socket[bytes], accepts: Callable[[str], bool]) -> None:
    """Let `accepts` decide about every connection of a socket; call it before the socket is bound.

    `accepts` gets the authenticated public key (Z85) of a CURVE connection, else ''. The key is also the
    property "User-Id" of every frame from the connection. The thread ends with the socket's context.

    Raises:
        UsageError: if libzmq is older than OLDEST.
    """
    if zmq.zmq_version_info() < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise UsageError(
            f"libzmq {zmq.zmq_version()} has known security holes; fedsim needs {needed} (pyzmq 26)"
        )
    asked = socket.context.socket(zmq.REP)
    asked.linger = 0
    asked.bind(_ADDRESS)
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    threading.Thread(target=_answer, args=(asked, accepts), name="zap", daemon=True).start()


def _answer(asked: zmq.Socket[bytes], accepts: Callable[[str], bool]) -> None:
    with asked, suppress(zmq.ContextTerminated):
        while True:
            asked.send_multipart(_verdict(asked.recv_multipart(), accepts))


def _verdict(question: list[bytes], accepts: Callable[[str], bool]) -> list[bytes]:
    """Return the answer (version, request, status, text, user, metadata) to a request (version, request,
    domain, address, routing id, mechanism, credentials)."""
    version, request, domain, _, _, mechanism, *curve_keys = question
    key = z85.encode(curve_keys[0]).decode() if mechanism == b"CURVE" else ""
    good = (version, domain) == (b"1.0", DOMAIN) and mechanism in (b"NULL", b"CURVE") and accepts(key)
    return [version, request, *((b"200", b"", key.encode()) if good else (b"400", b"", b"")), b""]
