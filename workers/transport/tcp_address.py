"""Parse the addresses tcp://ADDRESS:PORT in --bind, --connect and join files.

libzmq itself accepts invalid addresses: it uses only the last 16 bits of a port, ignores characters after the
port's digits, and reads `tcp://A;B:PORT` as two addresses. A ZeroMQ socket needs an option to use IPv6.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.errors import DataError, UsageError
from fedsim.specs import whole

if TYPE_CHECKING:  # options can be parsed without importing zmq
    import zmq

_PARTS = re.compile(r"tcp://(?:\[([^\[\]]*)\]|([^\[\]]*)):([^:\[\]]*)")
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?\.?")


@dataclass(frozen=True)
class TcpAddress:
    """The address at which a socket listens or to which it connects.

    to_listen and to_connect raise UsageError if a text is not an address.

    Attributes:
        host: An IPv4 or IPv6 address, the name of a machine, or the name of an interface to listen on. A
            link-local address includes its zone, as in fe80::1%eth0.
        port: The port; 0 if the system chooses one.
    """

    host: str
    port: int

    @staticmethod
    def to_listen(text: str, owner: str = "--bind") -> TcpAddress:
        """Parse an address of this machine. With the port *, the system chooses a port.

        owner: the option that errors name.
        """
        host, port = _parts(text, owner, " (port * lets the system choose)")
        if host == "*":
            raise UsageError(
                f"{owner} {text} would listen on every network of this machine; name one address of this "
                f"machine, or say tcp://0.0.0.0:{port}"
            )
        return TcpAddress(host, 0 if port == "*" else _port(port, text, owner, ", or *: the system chooses"))

    @staticmethod
    def to_connect(text: str, owner: str = "--connect") -> TcpAddress:
        """Parse an address of another machine."""
        host, port = _parts(text, owner, "")
        if host == "*":
            raise _no_address(owner, text, "* is no address that one can connect to")
        return TcpAddress(host, _port(port, text, owner, ""))

    def resolved(self) -> list[tuple[socket.AddressFamily, str]]:
        """Return the addresses of the host, IPv4 first.

        Raises:
            OSError: if the host's name is not known.
        """
        resolved = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
        pairs = dict.fromkeys((family, str(address[0])) for family, _, _, _, address in resolved)
        return sorted(pairs, key=lambda pair: pair[0] != socket.AF_INET)

    def allow(self, zmq_socket: zmq.Socket[bytes]) -> None:
        """Enable IPv6 for a socket if this is an IPv6 address or a name that has no IPv4 address."""
        from zmq import IPV6

        six = ":" in self.host
        if not _is_address(self.host) and self.host not in interfaces():
            try:
                six = self.resolved()[0][0] == socket.AF_INET6
            except OSError:  # libzmq resolves the name again at every attempt to connect
                six = False
        zmq_socket.setsockopt(IPV6, int(six))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port or '*'}"


def checked_url(url: str | None, of_file: str, file: Path) -> str:
    """Return the address to connect to: the value of --connect, or else the join file's address.

    Raises:
        UsageError: if --connect is not a valid address.
        DataError: if the file does not contain a valid address.
    """
    if url is not None:
        return str(TcpAddress.to_connect(url))
    try:
        return str(TcpAddress.to_connect(of_file, f"{file}: url"))
    except UsageError as e:
        raise DataError(f"{e}; give the coordinator's address with --connect") from None


def interfaces() -> set[str]:
    """Return the names of this machine's network interfaces."""
    return {name for _, name in socket.if_nameindex()}


def _parts(text: str, owner: str, more: str) -> tuple[str, str]:
    """Return the host and the port of tcp://HOST:PORT."""
    parts = _PARTS.fullmatch(text)
    if parts is None:
        if text.startswith("tcp://") and not re.fullmatch(r"tcp://(\[.*\]|[^:\[\]]*)", text):
            brackets = "the brackets of an IPv6 address stand around it: tcp://[::1]:5555"
            raise _no_address(owner, text, brackets)
        what = "the port is missing" if text.startswith("tcp://") else "it begins with tcp://"
        raise _no_address(owner, text, f"{what}{more}")
    six, host, port = parts.groups()
    if six is not None:
        if not _is_address(six) or ":" not in six:
            raise _no_address(owner, text, f"{six!r} is no IPv6 address")
        return six, port
    if ":" in host:
        raise _no_address(owner, text, "an IPv6 address stands in brackets: tcp://[::1]:5555")
    if not host:
        raise _no_address(owner, text, f"the address is missing{more}")
    if host != "*" and not _is_address(host) and (not _NAME.fullmatch(host) or re.fullmatch(r"[\d.]+", host)):
        raise _no_address(owner, text, f"{host!r} is neither an address nor a name")
    return host, port


def _port(text: str, whole_text: str, owner: str, more: str) -> int:
    if not 0 < whole(text) < 1 << 16:
        reason = f"port {text!r} is no whole number from 1 to 65535" if text else "the port is missing"
        raise _no_address(owner, whole_text, reason + more)
    return int(text)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _no_address(owner: str, text: str, why: str) -> UsageError:
    return UsageError(f"{owner} {text!r} is no tcp://ADDRESS:PORT: {why}")
