"""The ledger, a record of every byte that an endpoint sends or receives, by kind, direction and layer.

Kinds (the tasks and uploads of a centralised reference are simulation):

    algorithm    tasks and uploads
    simulation   evaluation, and other traffic that a real federation would not have
    control      handshakes, set-up, stop
    retry        duplicate uploads, and the messages of repeated tasks
    edge         broadcasts and sums between edge servers and the root, which are computed and not sent; the
                 column hop names the edge server

The direction "up" is towards the coordinator. Layers: values and indices (of a field), header, ZMTP framing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

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
}
"""The kind of ledger entry for each kind of envelope; all other envelopes are control. A "gone" envelope is
the task of a client that drops out after the download, according to the schedule of the run."""


class Ledger:
    """The entries that are not written yet, and the totals of all entries."""

    def __init__(self, mechanism: Mechanism = NULL, *, centralised: bool = False) -> None:
        """Start empty. centralised: True if tasks and uploads are simulation, in a centralised reference."""
        self.mechanism = mechanism
        self._kinds = dict.fromkeys(KINDS, "simulation") if centralised else KINDS
        self._open: list[Entry] = []
        self.totals: Counter[tuple[str, str, str, str]] = Counter()
        self._streams: Counter[str] = Counter()
        """Bytes on this process's streams, by direction."""
        self.rounds: Counter[tuple[int, str]] = Counter()
        """Bytes of kind algorithm in rounds that are not closed, by round and direction."""
        self.edge_rounds: Counter[tuple[int, str]] = Counter()
        """Bytes of kind edge in rounds that are not closed, by round and direction."""

    def book(self, envelope: Envelope, worker: int, direction: str, retry: bool = False) -> None:
        """Book the frames and the framing of an envelope that crosses the socket.

        retry: True if the task is repeated because its worker was lost.
        """
        for entry in self.rows_of(envelope, worker, direction, retry):
            self._add(entry)
            self._streams[direction] += entry.bytes

    def book_hop(self, envelope: Envelope, number: int, name: str, direction: str) -> None:
        """Book an envelope between an edge server and the root, which no socket carries.

        number, name: those of the edge server, for the columns worker and hop.
        """
        for entry in self.rows_of(envelope, number, direction, retry=False):
            self._add(entry._replace(kind="edge", hop=name))

    def book_as_retry(self, envelope: Envelope, worker: int) -> None:
        """Change the kind of a booked upload to retry: it is a duplicate, or its task is repeated."""
        counted = self.rows_of(envelope, worker, "up", retry=False)
        for entry, instead in zip(counted, self.rows_of(envelope, worker, "up", retry=True), strict=True):
            self._open.remove(entry)
            self._total(entry, -1)
            self._add(instead)

    def rows_of(self, envelope: Envelope, worker: int, direction: str, retry: bool = False) -> list[Entry]:
        """Return the rows of an envelope, from its header and sizes, without booking them."""
        h = envelope.header
        kind = "retry" if retry else self._kinds.get(h.kind, "control")
        label = (kind, h.round, h.exchange, h.client, worker, direction, h.kind)
        entries = []
        for field in h.fields:
            dense = math.prod(field.shape) * (DTYPES[field.dtype].itemsize if field.dtype in DTYPES else 1)
            for part in field.parts:
                size = dense if part.layer == "values" else 0
                entries.append(Entry(*label, field.name, part.layer, field.codec, size, part.nbytes))
        entries.append(Entry(*label, "", "header", "", 0, len(envelope.head)))
        entries.append(Entry(*label, "", "framing", "", 0, self.mechanism.framing(envelope.sizes)))
        return entries

    def book_handshake(self, worker: int) -> None:
        """Book the ZMTP greeting and commands of a connection in both directions."""
        for direction in ("up", "down"):
            size = self.mechanism.handshake[direction]
            label = ("control", NONE, NONE, NONE, worker, direction, "handshake")
            self._add(Entry(*label, "", "framing", "", 0, size))
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
        """Add to the totals the rows that an earlier start of this run wrote."""
        for row in rows:
            self.totals[row.kind, row.direction, row.field, row.layer] += row.bytes

    def close(self, round: int) -> list[Entry]:
        """Remove the entries and byte counts of rounds up to `round`, and the entries without a round.
        Return these entries in sorted order."""
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
        """Return the bytes of all kinds in one direction on this process's streams."""
        return self._streams[direction]

    def bytes_of(self, kind: str, direction: str) -> int:
        return sum(n for (k, d, _, _), n in self.totals.items() if (k, d) == (kind, direction))

    def nested(self) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
        """Return the totals as {kind: {direction: {field: {layer: bytes}}}}, as in summary.json."""
        out: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
        for (kind, direction, field, layer), n in sorted(self.totals.items()):
            out.setdefault(kind, {}).setdefault(direction, {}).setdefault(field, {})[layer] = n
        return out


def stream_bytes(envelope: Envelope) -> int:
    """Return the bytes of an envelope on an unencrypted stream.

    The virtual clock counts these bytes, because it must not depend on the workers or transport of a run."""
    return sum(envelope.sizes) + framing(envelope.sizes)
