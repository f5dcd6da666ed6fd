"""The rounds of another tool's traffic, found from the time, size and direction of data at a relay.

The meaning of the bytes is not known. A row of this ledger has the kind "opaque", a round, a connection
(column worker), a direction and a number of bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from fedsim.wire.header import NONE
from fedsim.wire.ledger_rows import Entry

KIND, LAYER = "opaque", "stream"
SILENCE = 2.0
SMALLEST = 4096
BURST = 0.05


@dataclass(frozen=True)
class Silence:
    """The rule by which a round begins: the server sends a burst after a silence.

    A burst is a series of pieces that the server sends over one connection with gaps below BURST seconds.
    Only bursts of at least `smallest` bytes count, which excludes heartbeats and polls. Data from clients
    does not begin a round, because the server is also silent while clients train.

    Attributes:
        seconds: Shortest silence before a round, in seconds.
        smallest: Smallest size of a burst that counts, in bytes.
    """

    seconds: float = SILENCE
    smallest: int = SMALLEST


@dataclass(frozen=True)
class RelayedRound:
    """A round and its bytes.

    Attributes:
        number: Number of the round; 0 for the traffic before the first round.
        began: Seconds since the relay began.
        ended: Time of the last piece, in seconds since the relay began; `began` if there is no piece.
        down, up: Bytes from and to the server.
        connections: Number of connections that carried bytes.
    """

    number: int
    began: float
    ended: float
    down: int
    up: int
    connections: int


@dataclass
class _Burst:
    """A burst of the server over one connection, booked when it becomes large or ends.

    Attributes:
        round: The current round when the burst began.
        began, last: Times of the first and the last piece, in seconds.
        size: Bytes.
        large: True if the burst is large enough and booked; further pieces are booked as they arrive.
    """

    round: int
    began: float
    last: float
    size: int = 0
    large: bool = False


class RelayedRounds:
    """Bytes by round, connection and direction; memory does not grow with the number of pieces."""

    def __init__(self, silence: Silence | None) -> None:
        """Start in round 0. silence: the rule that begins rounds; None: only begin() begins a round."""
        self._silence = silence
        self._bytes: Counter[tuple[int, int, str]] = Counter()
        self._times: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
        self._last: float | None = None
        """The time of the last piece of a large burst."""
        self._bursts: dict[int, _Burst] = {}
        """Last burst of each connection."""
        self.round = 0

    def add(self, time: float, connection: int, direction: str, size: int) -> None:
        """Book a piece in the current round, or in the round that it begins.

        Args:
            time: Seconds since the relay began; not less than in the previous call.
            connection: Number of the connection.
            direction: "down" is from the server, "up" to it.
            size: Bytes, above 0.
        """
        if self._silence is None or direction != "down":
            self._book(self.round, connection, direction, size, time)
            return
        burst = self._bursts.get(connection)
        if burst is None or time - burst.last >= min(BURST, self._silence.seconds):
            if burst is not None:
                self._settle(connection, burst)
            burst = self._bursts[connection] = _Burst(self.round, time, time)
        burst.last, burst.size = time, burst.size + size
        if burst.large:
            self._book(self.round, connection, direction, size, time)
        elif burst.size >= self._silence.smallest:
            if self._last is None or burst.began - self._last >= self._silence.seconds:
                self.begin(burst.began)
            burst.large = True
            self._book(self.round, connection, direction, burst.size, time)
        if burst.large:
            self._last = time

    def _settle(self, connection: int, burst: _Burst) -> None:
        """Book a burst that has ended, unless it is booked already."""
        if not burst.large:
            self._book(burst.round, connection, "down", burst.size, burst.last)

    def _book(self, number: int, connection: int, direction: str, size: int, time: float) -> None:
        self._bytes[number, connection, direction] += size
        began, ended = self._times[number]
        self._times[number] = (began, max(ended, time))

    def _settled(self) -> Counter[tuple[int, int, str]]:
        """End the bursts; return all bytes by round, connection and direction."""
        for connection, burst in self._bursts.items():
            self._settle(connection, burst)
        self._bursts.clear()
        return self._bytes

    def begin(self, time: float, number: int | None = None) -> None:
        """Begin the next round, or round `number`; do nothing if `number` is not above the current round."""
        following = self.round + 1 if number is None else number
        if following > self.round:  # a program may write the same line to several logs
            self.round = following
            self._times[following] = (time, time)

    def rounds(self) -> list[RelayedRound]:
        """Return all rounds in ascending order, with round 0 only if data passed before round 1."""
        rows = defaultdict[int, list[tuple[int, str, int]]](list)
        for (number, connection, direction), size in self._settled().items():
            rows[number].append((connection, direction, size))
        result = []
        for number, (began, ended) in sorted(self._times.items()):
            down, up = (sum(n for _, at, n in rows[number] if at == side) for side in ("down", "up"))
            if number or rows[number]:
                connections = len({connection for connection, _, _ in rows[number]})
                result.append(RelayedRound(number, began, ended, down, up, connections))
        return result

    def entries(self) -> list[Entry]:
        """Return the rows of ledger.csv, ordered by round, connection and direction."""
        return [
            Entry(KIND, number, NONE, NONE, connection, direction, "", "", LAYER, "", 0, size)
            for (number, connection, direction), size in sorted(self._settled().items())
        ]
