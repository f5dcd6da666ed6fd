"""The devices of all clients, as --link and --compute describe them: links, computers, energy.

--link is KEY=VALUE,... for all clients, or a CSV file with a line per client and the keys as columns.

    up, down                   rates of the client's link, such as 10mbit (per second); by default unlimited
    rtt, jitter                time of a round trip, and scale of a random delay, such as 40ms
    overhead, loss, initcwnd   TCP on the link (fedsim.tcp_links): bytes per byte of the stream (1.05, or
                               tcp), lost packets (1%), segments in a message's first round trip (10)
    compute, noise             in files: time per example (5ms) or examples per second (200/s), and its spread
    joules_up, joules_down     energy of one byte on the stream in joules, such as 2e-6
    joules_example             energy of one example in joules
    server_up, server_down     the server's link, which all clients share; in a file the line `server`
    edge_up, edge_down, ...    the links of all edge servers (--tree); also edge_rtt, edge_clients_up and
                               edge_clients_down (fedsim.virtual_clock); in a file the lines `edge NAME`

Directions are named from the clients' side: the server's `up` is the rate of all uploads together.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedsim.errors import DataError, UsageError
from fedsim.specs import key_values, number, probability, whole
from fedsim.tcp_links import OVERHEAD
from fedsim.user_files import opened_text, other_separator

_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)?bit")
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_PER_SECOND = re.compile(r"(\d+(?:\.\d+)?)/s")
_SCALE = {None: 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
SERVER = "server"
"""The name in the client column for the server's own link."""
EDGE = "edge"
"""The prefix of an edge server's line, `edge NAME`; the line `edge` has the defaults of these lines."""

SHARED = ("clients_up", "clients_down")
"""The columns of the link that an edge server's clients share; only lines of edge servers have them."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Link:
    """A link: bits per second in each direction, the seconds of a round trip, and joules per byte.

    jitter: seconds; an exchange lasts jitter |z| longer, z ~ N(0, 1). overhead, loss, initcwnd: parameters
    of fedsim.tcp_links, in both directions.
    """

    up: float = math.inf
    down: float = math.inf
    rtt: float = 0.0
    jitter: float = 0.0
    joules_up: float = 0.0
    joules_down: float = 0.0
    overhead: float = 1.0
    loss: float = 0.0
    initcwnd: float = math.inf


@dataclass(frozen=True)
class Computer:
    """A computer: seconds and joules per example. noise: standard deviation of log(seconds) over tasks."""

    seconds: float = 0.0
    noise: float = 0.0
    joules: float = 0.0


@dataclass(frozen=True, eq=False)
class Devices:
    """Links and computers of all K clients: one column (K,) for each field of Link and Computer."""

    up: Floats
    down: Floats
    rtt: Floats
    jitter: Floats
    joules_up: Floats
    joules_down: Floats
    overhead: Floats
    loss: Floats
    initcwnd: Floats
    seconds: Floats
    noise: Floats
    joules: Floats

    @staticmethod
    def alike(link: Link, computer: Computer, clients: int) -> Devices:
        """Make devices with the same link and the same computer for all clients."""
        return Devices(**{name: np.full(clients, value) for name, value in _numbers(link, computer).items()})

    def link(self, client: int) -> Link:
        return Link(**{f.name: float(getattr(self, f.name)[client]) for f in fields(Link)})

    def computer(self, client: int) -> Computer:
        return Computer(**{f.name: float(getattr(self, f.name)[client]) for f in fields(Computer)})

    @property
    def has_energy(self) -> bool:
        """True if any client spends energy on its link or computer."""
        return any(bool(column.any()) for column in (self.joules_up, self.joules_down, self.joules))


@dataclass(frozen=True, eq=False)
class Network:
    """The clients' devices, the server's link, and the links of edge servers by name; '' has the defaults."""

    devices: Devices
    server: Link = Link()
    edges: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def network(link: str, compute: str, *, clients: int) -> Network:
    """Return the devices that --link and --compute describe."""
    of_all = computer(compute, f"--compute {compute}")
    if is_file(link):
        file = _File(link, clients, of_all)
        if compute and file.computes:
            raise UsageError(f"--compute {compute}: {link} says already what its clients compute with")
        return Network(file.devices, file.server, file.edges)
    where = f"--link {link}"
    values = {key: parse_value(key, value, where) for key, value in key_values(link, where)}
    shared = Link(**{side: values.pop(f"server_{side}", math.inf) for side in ("up", "down")})
    edge = {key.removeprefix("edge_"): values.pop(key) for key in [*values] if key.startswith("edge_")}
    if "joules_example" in values:
        of_all = Computer(of_all.seconds, of_all.noise, values.pop("joules_example"))
    return Network(Devices.alike(Link(**values), of_all, clients), shared, {"": edge} if edge else {})


def is_file(link: str) -> bool:
    """Return whether --link names a CSV file."""
    return link.endswith(".csv")


def computer(text: str, where: str) -> Computer:
    """Parse a computer: 5ms, 200/s or 5ms,noise=0.3. Error messages start with `where`."""
    if not text:
        return Computer()
    first, _, rest = text.partition(",")
    noise = 0.0
    for key, value in key_values(rest, where):
        noise = number(value)
        if key != "noise" or not 0 <= noise < math.inf:
            raise UsageError(f"{where}: {text!r}: write 5ms or 5ms,noise=0.3")
    return Computer(_per_example(first, where), noise)


# ---- the file


@dataclass
class _Column:
    """A column of the file: its parser, its array of values, and the parsed values of texts seen so far."""

    name: str
    read: Callable[[str, str], float]
    values: list[float]
    known: dict[str, float] = field(default_factory=dict)

    def value(self, cell: str, where: str) -> float:
        self.known[cell] = result = self.read(cell, where)
        return result


class _File:
    """A file of devices, read line by line, because it may have a million lines.

    devices: the clients' devices. server: the link in the line `server`. edges: the lines `edge NAME`.
    computes: True if the file has a computer for any client.
    """

    def __init__(self, text: str, clients: int, of_all: Computer) -> None:
        self._text, self._clients = text, clients
        self._defaults = _numbers(Link(), of_all)
        self._lists = {name: [value] * clients for name, value in self._defaults.items()}
        self._seen = bytearray(clients)
        self.server, self.computes, self.edges = Link(), False, dict[str, dict[str, float]]()
        try:
            with opened_text(Path(text)) as file:
                rows = (row for row in csv.reader(file) if row)
                heads = next(rows, [])
                if wrong := other_separator(",".join(heads)):
                    raise DataError(f"--link {text}: {wrong}")
                self._read(heads, rows)
        except OSError as e:
            raise UsageError(f"--link {text}: {e.strerror}") from None
        except csv.Error as e:
            raise DataError(f"--link {text} is no CSV file: {e}") from None
        missing = self._seen.find(0)
        if missing >= 0:
            raise DataError(f"{text} has no line for client {missing}; it needs client,up,down,rtt of each")
        self.devices = Devices(**{name: np.array(values) for name, values in self._lists.items()})

    def _read(self, heads: list[str], rows: Iterable[list[str]]) -> None:
        at = heads.index("client") if "client" in heads else len(heads)
        columns = [(i, self._column(name, heads)) for i, name in enumerate(heads) if i != at]
        cells = [(i, column.known, column.values, column) for i, column in columns]
        compute = heads.index("compute") if "compute" in heads and "noise" not in heads else None
        noise = self._lists["noise"]
        for line, row in enumerate(rows, start=2):
            if len(row) > len(heads):
                raise DataError(f"{self._where(line)} has more cells than the first line has columns")
            row += [""] * (len(heads) + 1 - len(row))
            k = whole(row[at])
            if not 0 <= k < self._clients:
                self._other(row[at], heads, row, line)
                continue
            if self._seen[k]:  # a client's last line replaces its earlier lines
                for name, values in self._lists.items():
                    values[k] = self._defaults[name]
            self._seen[k] = 1
            for i, known, values, column in cells:
                if cell := row[i]:
                    value = known.get(cell)
                    values[k] = column.value(cell, self._where(line)) if value is None else value
            if compute is not None and (cell := row[compute]):
                noise[k] = self._noises[cell]
        self.computes = any(column.known for _, column in columns if column.name in ("compute", "noise"))

    def _column(self, name: str, heads: list[str]) -> _Column:
        if name == "compute":
            self._noises: dict[str, float] = {}
            return _Column(
                name, self._alone if "noise" in heads else self._with_noise, self._lists["seconds"]
            )
        if name == "joules_example":
            return _Column(name, _amount, self._lists["joules"])
        if name in SHARED:
            return _Column(name, _of_edges, [])
        if name in _READ and not name.startswith((SERVER, EDGE)):
            return _Column(name, _READ[name], self._lists[name])
        return _Column(name, lambda cell, where: parse_value("", f"{name}={cell}", where), [])

    def _with_noise(self, cell: str, where: str) -> float:
        parsed = computer(cell, where)
        self._noises[cell] = parsed.noise
        return parsed.seconds

    def _alone(self, cell: str, where: str) -> float:
        if "," in cell:
            raise DataError(f"{where}: {cell!r}: there is a column noise, so write the time alone, 5ms")
        return _per_example(cell, where)

    def _other(self, client: str, heads: list[str], row: list[str], line: int) -> None:
        """Read the line of the server or of an edge server; any other line without a client is an error."""
        where = self._where(line)
        kind, _, name = client.partition(" ")
        cells = {name: cell for name, cell in zip(heads, row, strict=False) if cell and name != "client"}
        if kind == EDGE:
            if wrong := sorted(cells.keys() - {"up", "down", "rtt", *SHARED}):
                known = ", ".join(("up", "down", "rtt", *SHARED))
                raise DataError(f"{where}: an edge server's link has {known}, but no {wrong[0]}")
            self.edges[name] = {key: _READ[f"{EDGE}_{key}"](cell, where) for key, cell in cells.items()}
            return
        if client != SERVER:
            last = self._clients - 1
            raise DataError(f"{where}: client {client!r}; clients count from 0 to {last}")
        if wrong := sorted(cells.keys() - {"up", "down"}):
            raise DataError(f"{where}: the server's link has up and down, but no {wrong[0]}")
        self.server = Link(**{side: _rate(cell, where) for side, cell in cells.items()})

    def _where(self, line: int) -> str:
        return f"{self._text}, line {line}"


# ---- single values


def _numbers(link: Link, computer: Computer) -> dict[str, float]:
    """Return the fields of a link and a computer, by name."""
    return {f.name: getattr(value, f.name) for value in (link, computer) for f in fields(value)}


def parse_value(key: str, text: str, where: str) -> float:
    """Parse a value of --link KEY=VALUE,... to bits/s, seconds or joules. Errors start with `where`."""
    read = _READ.get(key)
    if read is None or key == "noise":
        shown = f"{key}={text}" if key else text
        raise UsageError(f"{where}: '{shown}'; write up=10mbit,down=50mbit,rtt=40ms ({', '.join(_KEYS)})")
    return read(text, where)


def _rate(text: str, where: str) -> float:
    if (result := _RATE.fullmatch(text)) and float(result[1]) > 0:
        return float(result[1]) * _SCALE[result[2]]
    raise UsageError(f"{where}: {text!r} is no rate; write 10mbit, 500kbit or 1gbit (per second)")


def parse_time(text: str, where: str) -> float:
    """Parse a time such as 40ms to seconds; error messages start with `where`."""
    if result := _TIME.fullmatch(text):
        return float(result[1]) * _SCALE[result[2]]
    raise UsageError(f"{where}: {text!r} is no time; write 40ms, 2s or 150us")


def _per_example(text: str, where: str) -> float:
    """Parse a time or a number of examples per second to seconds per example."""
    if (result := _PER_SECOND.fullmatch(text)) and float(result[1]) > 0:
        return 1 / float(result[1])
    return parse_time(text, where)


def _of_edges(text: str, where: str) -> float:
    raise DataError(f"{where}: only a line `edge NAME` has {' and '.join(SHARED)}")


def _amount(text: str, where: str) -> float:
    value = number(text)
    if 0 <= value < math.inf:
        return value
    raise UsageError(f"{where}: {text!r} is no number of at least 0; write 2e-6")


def _overhead(text: str, where: str) -> float:
    if text == "tcp":
        return OVERHEAD
    value = number(text)
    if 1 <= value < math.inf:
        return value
    raise UsageError(f"{where}: {text!r} is no number of at least 1; write tcp, which is {OVERHEAD:.4f}")


def _loss(text: str, where: str) -> float:
    value = probability(text, where)
    if value < 1:
        return value
    raise UsageError(f"{where}: {text!r}: a link that loses every packet carries nothing; write 1%")


def _initcwnd(text: str, where: str) -> float:
    if (value := whole(text)) >= 1:
        return float(value)
    raise UsageError(f"{where}: {text!r} is no whole number of at least 1; write 10, as Linux has it")


_READ: Mapping[str, Callable[[str, str], float]] = {
    "up": _rate,
    "down": _rate,
    "rtt": parse_time,
    "jitter": parse_time,
    "noise": _amount,
    "joules_up": _amount,
    "joules_down": _amount,
    "joules_example": _amount,
    "overhead": _overhead,
    "loss": _loss,
    "initcwnd": _initcwnd,
    "server_up": _rate,
    "server_down": _rate,
    "edge_up": _rate,
    "edge_down": _rate,
    "edge_rtt": parse_time,
    "edge_clients_up": _rate,
    "edge_clients_down": _rate,
}
_KEYS = tuple(key for key in _READ if key != "noise")
