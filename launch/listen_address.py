"""The address where remote workers come in, tried before anything is started."""

from __future__ import annotations

import errno
import ipaddress
import socket

from fedsim.errors import UsageError


def check_remote_bind(bind: str) -> None:
    """Refuse what is no tcp://ADDRESS:PORT, or where this machine cannot listen.

    Raises:
        UsageError: saying what to write.
    """
    check_form(bind)
    check_bind(bind)


def check_form(bind: str) -> None:
    """Refuse what is no tcp://ADDRESS:PORT.

    Raises:
        UsageError: saying what to write.
    """
    if not bind.startswith("tcp://") or ":" not in bind.removeprefix("tcp://"):
        raise UsageError(
            f"--bind {bind!r} is no tcp://ADDRESS:PORT of this machine; port * lets the system choose"
        )


def check_bind(bind: str) -> None:
    """Refuse tcp://ADDRESS:PORT if this machine cannot listen there; names of interfaces are left to ZeroMQ.

    Raises:
        UsageError: saying what to write.
    """
    host, _, port = bind.removeprefix("tcp://").rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((str(address), int(port) if port.isdecimal() and int(port) < 1 << 16 else 0))
        except OSError as e:
            raise UsageError(f"--bind {bind}: {_cause(e, host, port)}") from None


def _cause(error: OSError, host: str, port: str) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        own = own_address()
        example = f", such as tcp://{own}:{port}" if own else ""
        return f"{host} is no address of this machine; write one that is{example}, or tcp://0.0.0.0:{port}"
    if error.errno == errno.EADDRINUSE:
        return f"another program listens on port {port}; choose another port, or * lets the system choose"
    return f"{error.strerror}"


def own_address() -> str:
    """The address of this machine that others would see; '' without a network. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""
