"""The virtual clock computes how long a client would take over a given link with a given computer.

    seconds = rtt + 8 bytes_down / down + N_k compute exp(noise z) + 8 bytes_up / up,     z ~ N(0, 1)

z is drawn from (seed, round, client). Bytes are those of the ledger, so a codec that saves them saves time.
No code sleeps, and measured time decides nothing: whether a client meets a deadline is a pure function of
the configuration.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from fedsim.errors import DataError, UsageError
from fedsim.round_events import TaskId
from fedsim.seeds import RandomStream
from fedsim.specs import key_values, number, whole

_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)?bit")
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_SCALE = {None: 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Link:
    """Bits per second in both directions, and the seconds of one round trip."""

    up: float = math.inf
    down: float = math.inf
    rtt: float = 0.0

    def seconds(self, bytes_down: int, bytes_up: int) -> float:
        return self.rtt + 8 * bytes_down / self.down + 8 * bytes_up / self.up


@dataclass(frozen=True)
class Computer:
    """Seconds per example, and the spread of their logarithm from task to task."""

    seconds: float = 0.0
    noise: float = 0.0


@dataclass(frozen=True)
class Clock:
    """Links and computers by client, and the deadline of an exchange in seconds (inf: none)."""

    links: tuple[Link, ...]
    computers: tuple[Computer, ...]
    deadline: float
    seed: int

    def seconds(self, round: int, client: int, examples: int, bytes_down: int, bytes_up: int) -> float:
        """From the broadcast to the upload's last bit, for one exchange."""
        link, computer = self.links[client], self.computers[client]
        factor = 1.0
        if computer.noise:
            draw = RandomStream(self.seed, "compute", round, client).numpy("noise")
            factor = math.exp(computer.noise * float(draw.standard_normal()))
        return link.seconds(bytes_down, bytes_up) + examples * computer.seconds * factor


class ExchangeClock:
    """The time of one exchange after another.

    Without a clock, no upload is late and an exchange has no duration.
    """

    def __init__(
        self,
        clock: Clock | None,
        sizes: tuple[int, ...],
        decided: Callable[[int], float] | None = None,
    ) -> None:
        """decided: the seconds of a round, where a schedule has them already (fedsim.asynchrony); no upload
        is late then."""
        self._clock, self._sizes, self._decided = clock, sizes, decided
        self._down: dict[int, int] = {}
        """Stream bytes of the broadcast, by client."""
        self._answers: dict[int, float] = {}
        """Seconds until the upload arrived, by client."""

    def gave(self, client: int, stream_bytes: int) -> None:
        """Record that the broadcast was sent to a client."""
        self._down[client] = stream_bytes

    def late(self, task: TaskId, stream_bytes: int) -> bool:
        """Whether an upload of so many bytes arrives after the deadline."""
        if self._clock is None or (self._decided and task.round):
            return False
        k = task.client
        seconds = self._clock.seconds(task.round, k, self._sizes[k], self._down[k], stream_bytes)
        self._answers[k] = seconds
        return seconds > self._clock.deadline

    def close(self, round: int) -> float | None:
        """End the exchange, of this round, and return its duration in seconds; None without a clock.

        It lasts until the slowest upload arrives. If a client missed the deadline or sent nothing, it lasts
        until the deadline.
        """
        if self._clock is None:
            return None
        if self._decided and round:
            self._down = {}
            return self._decided(round)
        slowest, limit = max(self._answers.values(), default=0.0), self._clock.deadline
        silent = len(self._answers) < len(self._down) and limit < math.inf
        self._down, self._answers = {}, {}
        return limit if silent else min(slowest, limit)


def clock(link: str, compute: str, deadline: str, *, clients: int, seed: int) -> Clock | None:
    """The clock that --link, --compute and --deadline describe; None if none of them is set.

    Raises:
        UsageError: If one of them cannot be parsed.
        DataError: If the file of links is wrong.
    """
    if not (link or compute or deadline):
        return None
    of_all = _compute(compute, f"--compute {compute}")
    limit = _time(deadline, "--deadline") if deadline else math.inf
    if deadline and not (link or of_all.seconds):
        raise UsageError("--deadline needs --link or --compute: without them every client answers at once")
    if not is_file(link):
        links = (_link(key_values(link), f"--link {link}"),) * clients
        return Clock(links, (of_all,) * clients, limit, seed)
    rows = _rows(link, clients)
    if compute and any(computer is not None for _, computer in rows):
        raise UsageError(f"--compute {compute}: {link} says already what its clients compute with")
    return Clock(
        tuple(each for each, _ in rows),
        tuple(of_all if computer is None else computer for _, computer in rows),
        limit,
        seed,
    )


def is_file(link: str) -> bool:
    """Whether --link names a CSV file."""
    return link.endswith(".csv")


def _rows(text: str, clients: int) -> list[tuple[Link, Computer | None]]:
    """Every client's link, and its computer if the file has the column compute (5ms, or 5ms,noise=0.3)."""
    by_client: dict[int, tuple[Link, Computer | None]] = {}
    try:
        with Path(text).open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.DictReader(file), start=2):
                where = f"{text}, line {number}"
                client = row.pop("client", None) or ""
                if not 0 <= whole(client) < clients:
                    raise DataError(f"{where}: client {client!r}; clients count from 0 to {clients - 1}")
                compute = row.pop("compute", None)
                link = _link([(key, value) for key, value in row.items() if value], where)
                by_client[int(client)] = link, _compute(compute, where) if compute else None
    except OSError as e:
        raise UsageError(f"--link {text}: {e.strerror}") from None
    missing = [k for k in range(clients) if k not in by_client]
    if missing:
        raise DataError(f"{text} has no line for client {missing[0]}; it needs client,up,down,rtt of each")
    return [by_client[k] for k in range(clients)]


def _link(pairs: Iterable[tuple[str, str]], where: str) -> Link:
    link = Link()
    for key, value in pairs:
        if key in ("up", "down"):
            link = replace(link, **{key: _rate(value, where)})
        elif key == "rtt":
            link = replace(link, rtt=_time(value, where))
        else:
            raise UsageError(f"{where}: '{key}={value}'; write up=10mbit,down=50mbit,rtt=40ms")
    return link


def _rate(text: str, where: str) -> float:
    if (result := _RATE.fullmatch(text)) and float(result[1]) > 0:
        return float(result[1]) * _SCALE[result[2]]
    raise UsageError(f"{where}: {text!r} is no rate; write 10mbit, 500kbit or 1gbit (per second)")


def _time(text: str, where: str) -> float:
    if result := _TIME.fullmatch(text):
        return float(result[1]) * _SCALE[result[2]]
    raise UsageError(f"{where}: {text!r} is no time; write 40ms, 2s or 150us")


def _compute(text: str, where: str) -> Computer:
    """5ms or 5ms,noise=0.3."""
    if not text:
        return Computer()
    first, _, rest = text.partition(",")
    noise = 0.0
    for key, value in key_values(rest):
        noise = number(value)
        if key != "noise" or not 0 <= noise < math.inf:
            raise UsageError(f"{where}: {text!r}: write 5ms or 5ms,noise=0.3")
    return Computer(_time(first, where), noise)
