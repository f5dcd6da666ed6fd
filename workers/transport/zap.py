"""Decide who may connect: a small thread answers ZAP requests (https://rfc.zeromq.org/spec/27/).

Only a socket with a ZAP domain refuses peers of ZMTP 1 and 2 and random bytes; without a domain, libzmq
passes the data of such peers to the application. Workers connect before the coordinator waits for them, so a
thread answers. pyzmq's own authenticator would run an event loop for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import zmq
from zmq.utils import z85

from fedsim.errors import UsageError

OLDEST = (4, 3, 5)
"""Older versions can be attacked without a key: CVE-2019-6250, CVE-2019-13132, CVE-2020-15166 and others."""
DOMAIN = b"fedsim"
"""Matched exactly: libzmq refuses all connections of a domain that no handler knows."""
_ADDRESS = "inproc://zeromq.zap.01"


def guard(socket: zmq.Socket[bytes], accepts: Callable[[str], bool]) -> None:
    """Let `accepts` decide about every connection of a socket; call it before the socket is bound.

    `accepts` gets the public key (Z85) that a CURVE connection has proved to own, else ''. The key is also
    the frame property "User-Id" of all that the connection sends. The thread ends with the socket's context.

    Raises:
        UsageError: If libzmq is too old to listen with.
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
    """Answer a request: version, request, domain, address, routing id, mechanism, credentials. The answer is
    version, request, status, text, user, metadata."""
    version, request, domain, _, _, mechanism, *curve_keys = question
    key = z85.encode(curve_keys[0]).decode() if mechanism == b"CURVE" else ""
    good = (version, domain) == (b"1.0", DOMAIN) and mechanism in (b"NULL", b"CURVE") and accepts(key)
    return [version, request, *((b"200", b"", key.encode()) if good else (b"400", b"", b"")), b""]
