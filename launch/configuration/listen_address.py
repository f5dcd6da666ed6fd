"""Check the address for remote workers, before anything is started."""

from __future__ import annotations

import errno
import socket

from fedsim.errors import UsageError
from workers.transport.tcp_address import TcpAddress, interfaces


def check_bind(bind: str) -> None:
    """Refuse an address that is not tcp://ADDRESS:PORT, or at which this machine cannot listen."""
    address = TcpAddress.to_listen(bind)
    if address.host in interfaces():  # an interface's name, which ZeroMQ resolves
        return
    try:
        family, host = address.resolved()[0]
    except (OSError, UnicodeError) as e:
        why = getattr(e, "strerror", None) or e
        raise UsageError(f"--bind {bind}: {address.host} is no address of this machine ({why})") from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(socket.getaddrinfo(host, address.port, family, socket.SOCK_STREAM)[0][4])
        except OSError as e:
            raise UsageError(f"--bind {bind}: {_cause(e, address)}") from None


def _cause(error: OSError, address: TcpAddress) -> str:
    port = address.port or "*"
    if error.errno == errno.EADDRNOTAVAIL:
        own = own_address()
        example = f", such as tcp://{own}:{port}" if own else ""
        host = address.host
        return f"{host} is no address of this machine; write one that is{example}, or tcp://0.0.0.0:{port}"
    if error.errno == errno.EADDRINUSE:
        return f"another program listens on port {port}; choose another port, or * lets the system choose"
    if error.errno == errno.EAFNOSUPPORT:
        return "this machine has no IPv6"
    return f"{error.strerror}"


def own_address() -> str:
    """Return this machine's address in its network, or '' without a network. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""
