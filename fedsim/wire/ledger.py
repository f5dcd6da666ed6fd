"""The ledger, which books every byte on the streams by its meaning, at the endpoint that handles it.

kind: algorithm (tasks and uploads), simulation (evaluation and other traffic that a real federation would not
have; for a centralised reference also tasks and uploads), control (handshakes, set-up, stop), retry, edge
(broadcasts and sums of uploads between edge servers and the root; the column hop names the edge server).
direction: up is towards the coordinator. layer: values or indices (of a field), header, or ZMTP framing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from fedsim.wire.envelope import NONE, Envelope
from fedsim.wire.ledger_rows import Entry
from fedsim.wire.schema import DTYPES
from fedsim.wire.wire_size import NULL, Mechanism, framing

KINDS = {
    "task": "algorithm",
    "gone": "algorithm",
    "upload": "algorithm",
    "evaluate": "simulation",
    "score": "simulation",
    "state": "simulation",
    "last": "simulation",
    "draft": "simulation",
    "relayed": "edge",
    "sums": "edge",
}
"""The kind of ledger entry for each kind of envelope; all other envelopes are control. A "gone" envelope has
the bytes of a task, for a client that the schedule drops after the download."""


def kind_of(message: str) -> str:
    """Return the kind of ledger entry for a kind of envelope."""
    return KINDS.get(message, "control")


class Ledger:
    """Entries not yet written, and totals of all entries ever booked."""

    def __init__(self, mechanism: Mechanism = NULL, *, centralised: bool = False) -> None:
        """Start empty. centralised: True for a centralised reference, whose traffic is all simulation."""
        self.mechanism = mechanism
        self._kinds = dict.fromkeys(KINDS, "simulation") if centralised else KINDS
        self._open: list[Entry] = []
        self.totals: Counter[tuple[str, str, str, str]] = Counter()
        self.hops: Mapping[int, str] = {}
        """Names of edge servers by their numbers and their workers' numbers, if they are processes."""
        self._streams: Counter[str] = Counter()
        """Bytes on this process's streams, by direction."""
        self.rounds: Counter[tuple[int, str]] = Counter()
        """Bytes of kind algorithm in rounds that are not closed, by round and direction."""
        self.edge_rounds: Counter[tuple[int, str]] = Counter()
        """Bytes of kind edge in these rounds, by round and direction."""

    def book(self, envelope: Envelope, worker: int, direction: str, retry: bool = False) -> None:
        """Book one envelope that crosses the socket, every frame and its framing.

        retry: True if the task is repeated because its worker was lost.
        """
        for entry in self.rows_of(envelope, worker, direction, retry):
            self._add(entry)
            self._streams[direction] += entry.bytes

    def take_over(self, entries: Iterable[Entry]) -> None:
        """Book the rows that an edge server has counted in its own process."""
        for entry in entries:
            self._add(entry)

    def book_edge(self, envelope: Envelope, number: int, name: str, direction: str) -> None:
        """Book an envelope between an edge server and the root if edge servers are not processes.

        No socket carries the envelope, so its bytes are computed. number: the edge server's number in the
        column worker."""
        for entry in self.rows_of(envelope, number, direction, retry=False):
            self._add(entry._replace(kind="edge", hop=name))

    def book_as_retry(self, envelope: Envelope, worker: int) -> None:
        """Move a booked upload to retry: it was a duplicate, or the task is computed once more."""
        counted = self.rows_of(envelope, worker, "up", retry=False)
        for entry, instead in zip(counted, self.rows_of(envelope, worker, "up", retry=True), strict=True):
            self._open.remove(entry)
            self._total(entry, -1)
            self._add(instead)

    def rows_of(self, envelope: Envelope, worker: int, direction: str, retry: bool = False) -> list[Entry]:
        """Return the rows of an envelope without booking them; only its header and sizes are needed."""
        h = envelope.header
        kind, hop = "retry" if retry else self._kinds.get(h.kind, "control"), self.hops.get(worker, "")
        if hop and kind == "algorithm":
            kind = "edge"  # an upload that the edge server has passed on
        label = (kind, h.round, h.exchange, h.client, worker, direction, h.kind)
        entries = []
        for field in h.fields:
            dense = math.prod(field.shape) * (DTYPES[field.dtype].itemsize if field.dtype in DTYPES else 1)
            for part in field.parts:
                size = dense if part.layer == "values" else 0
                entries.append(Entry(*label, field.name, part.layer, field.codec, size, part.nbytes, hop))
        entries.append(Entry(*label, "", "header", "", 0, len(envelope.head), hop))
        entries.append(Entry(*label, "", "framing", "", 0, self.mechanism.framing(envelope.sizes), hop))
        return entries

    def book_handshake(self, worker: int) -> None:
        """Book a connection's ZMTP greeting and commands, both directions."""
        for direction in ("up", "down"):
            size, hop = self.mechanism.handshake[direction], self.hops.get(worker, "")
            label = ("control", NONE, NONE, NONE, worker, direction, "handshake")
            self._add(Entry(*label, "", "framing", "", 0, size, hop))
            self._streams[direction] += size

    def _add(self, entry: Entry) -> None:
        self._open.append(entry)
        self._total(entry, 1)

    def _total(self, entry: Entry, sign: int) -> None:
        self.totals[entry.kind, entry.direction, entry.field, entry.layer] += sign * entry.bytes
        if entry.kind == "algorithm":
            self.rounds[entry.round, entry.direction] += sign * entry.bytes
        if entry.kind == "edge":
            self.edge_rounds[entry.round, entry.direction] += sign * entry.bytes

    def restore(self, rows: Iterable[Entry]) -> None:
        """Add the rows that an earlier start of the run wrote to the totals."""
        for row in rows:
            self.totals[row.kind, row.direction, row.field, row.layer] += row.bytes

    def close(self, round: int) -> list[Entry]:
        """Remove and return, sorted, the entries of rounds up to `round` and those without a round.
        Also remove the byte counts of these rounds."""
        ready = [e for e in self._open if e.round <= round]
        self._open = [e for e in self._open if e.round > round]
        for rounds in (self.rounds, self.edge_rounds):
            for key in [key for key in rounds if key[0] <= round]:
                del rounds[key]
        return sorted(ready)

    def forget(self, after: int) -> None:
        """Remove the entries of rounds later than `after`, which will not be committed."""
        for entry in (e for e in self._open if e.round > after):
            self._total(entry, -1)
            if (
                entry.bytes
                and not self.totals[key := (entry.kind, entry.direction, entry.field, entry.layer)]
            ):
                del self.totals[key]
        self._open = [e for e in self._open if e.round <= after]

    def booked(self, direction: str) -> int:
        """All bytes of one direction on this process's streams, of any kind."""
        return self._streams[direction]

    def bytes_of(self, kind: str, direction: str) -> int:
        return sum(n for (k, d, _, _), n in self.totals.items() if (k, d) == (kind, direction))

    def nested(self) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
        """{kind: {direction: {field: {layer: bytes}}}}, as in summary.json."""
        out: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
        for (kind, direction, field, layer), n in sorted(self.totals.items()):
            out.setdefault(kind, {}).setdefault(direction, {}).setdefault(field, {})[layer] = n
        return out


def stream_bytes(envelope: Envelope) -> int:
    """Return the bytes of an envelope on an unencrypted stream, as the virtual clock counts them.

    The time of the virtual clock must not depend on the workers or the transport of the run."""
    return sum(envelope.sizes) + framing(envelope.sizes)
