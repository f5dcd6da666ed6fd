"""Check the ledger rows (the account) that an edge server sends to the root.

An account of an exchange may have rows of these kinds:

    algorithm             exactly the rows of the tasks that the root has given to this edge server's clients
                          in this exchange, and of the uploads whose headers the root has
    retry                 tasks and uploads of its clients up to this round, with the names and sizes that
                          schema and codecs allow
    simulation, control   envelopes that workers and edge servers exchange, up to this round

An edge server thus cannot invent, omit or change rows of folded uploads. Only the edge server knows the
number of rows of the other kinds, so any number is accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec

from fedsim.problem import Problem
from fedsim.wire.codecs import codec
from fedsim.wire.envelope import NONE, Envelope, field_spec
from fedsim.wire.header import MAX_FIELDS, MAX_HEADER, MAX_PARTS
from fedsim.wire.ledger import Ledger, kind_of
from fedsim.wire.ledger_rows import Entry
from fedsim.wire.schema import DTYPES, Field, schema
from fedsim.wire.wire_size import Mechanism
from workers.coordinator.failures import ProtocolViolation

MOST = 1 << 40
"""The largest accepted size of a row in bytes, far above the size of any envelope."""
ALL = 1 << 50
"""The largest accepted total of an edge server's accounts in bytes, so that no sum overflows."""
DIRECTIONS = {
    **dict.fromkeys(("task", "gone", "evaluate", "state", "last"), ("down",)),
    **dict.fromkeys(("welcome", "stop", "refused", "rejoin"), ("down",)),
    **dict.fromkeys(("upload", "score", "draft", "absent", "hello", "ready", "failed"), ("up",)),
}
"""The directions of envelopes between a worker and its edge server, by kind. All other kinds go both ways."""
NAMES = {
    "evaluate": ("mean", "precision", "triangle", "samples"),
    "score": ("score",),
    "state": ("state",),
    "draft": ("state",),
    "hello": ("hello",),
    "ready": ("ready",),
    "welcome": ("welcome",),
    "failed": ("error",),
    "stop": ("reason",),
    "refused": ("reason",),
}
"""The field names of envelopes by kind, for kinds whose fields do not depend on the algorithm."""


@dataclass
class AccountChecks:
    """Checks of edge servers' accounts, which raise ProtocolViolation if a row is impossible.

    mechanism: the ZeroMQ mechanism of the connections between edge servers and their workers.
    """

    problem: Problem
    mechanism: Mechanism
    _ledger: Ledger = field(init=False)
    _booked: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._ledger = Ledger(self.mechanism)

    def exchange(
        self,
        rows: Sequence[Entry],
        edge: int,
        workers: range,
        place: tuple[int, int],
        task: Envelope,
        clients: Iterable[int],
        uploads: Mapping[int, Envelope],
    ) -> None:
        """Check the account of an exchange.

        workers: the workers of the edge server. place: round and exchange. task: a complete task of this
        exchange; the tasks of all clients have the same size. clients: the edge server's clients in this
        exchange. uploads: their uploads, without frames; a client without an upload is a dropout.
        """
        due: Counter[Entry] = Counter()
        for k in clients:
            task_of_client = _retargeted(task, k, "task" if k in uploads else "gone")
            due.update(self._ledger.rows_of(task_of_client, 0, "down"))
            if k in uploads:
                due.update(self._ledger.rows_of(uploads[k], 0, "up"))
        self._others(rows, edge, workers, place[0])
        own = [row for row in rows if row.kind == "algorithm"]
        if (sent := Counter(row._replace(worker=0) for row in own)) != due:
            extra, missing = [*(sent - due)], [*(due - sent)]
            what = f"has {_shown(extra[0])}, which was not sent" if extra else f"lacks {_shown(missing[0])}"
            raise ProtocolViolation(f"sent an account of round {place[0]} that {what}")
        self._count(rows, edge)

    def rest(self, rows: Sequence[Entry], edge: int, workers: range) -> None:
        """Check the last account, whose rows belong to no exchange."""
        self._others(rows, edge, workers, self.problem.experiment.rounds)
        for row in rows:
            if row.kind == "algorithm":
                _refuse(row, "belongs to an exchange")
        self._count(rows, edge)

    def _count(self, rows: Iterable[Entry], edge: int) -> None:
        booked = self._booked[edge] + sum(row.bytes for row in rows)
        if booked > ALL:
            raise ProtocolViolation(f"sent accounts of {booked:,} bytes")
        self._booked[edge] = booked

    def _others(self, rows: Iterable[Entry], edge: int, workers: range, round: int) -> None:
        tree, exchanges = self.problem.tree, max(len(self.problem.algorithm.exchanges), 1)
        assert tree is not None
        most = max(exchanges, len(self.problem.algorithm.setup), self.problem.chunks)
        for row in rows:
            if not all(0 <= n <= MOST for n in (row.bytes, row.dense_bytes)):
                _refuse(row, "has an impossible size")
            if row.message not in (*DIRECTIONS, "handshake", "heartbeat") or row.hop:
                _refuse(row, "is none of an edge server")
            if row.direction not in DIRECTIONS.get(row.message, ("up", "down")):
                _refuse(row, "has the wrong direction")
            if row.kind not in (kind_of(row.message), "retry") or (
                row.kind == "retry" and row.message not in ("task", "gone", "upload")
            ):
                _refuse(row, "has the wrong kind")
            if not (NONE <= row.round <= round and NONE <= row.exchange <= most):
                _refuse(row, "is of another round")
            if not (NONE <= row.client < self.problem.experiment.clients) or (
                row.client != NONE and tree.edge_of(row.client) != edge
            ):
                _refuse(row, "is of a client that it does not have")
            if row.worker not in workers and (row.worker != NONE or row.kind != "control"):
                _refuse(row, "is of a worker that it does not have")
            self._check_part(row)

    def _check_part(self, row: Entry) -> None:
        if row.layer in ("header", "framing"):
            parts = 1 + MAX_FIELDS * MAX_PARTS
            limit = MAX_HEADER if row.layer == "header" else parts * self.mechanism.framing([MAX_HEADER])
            if row.message == "handshake":
                limit = self.mechanism.handshake[row.direction] if row.layer == "framing" else -1
            if (row.field, row.codec, row.dense_bytes) != ("", "", 0) or row.bytes > limit:
                _refuse(row, f"has an impossible {row.layer}")
        elif row.message in ("task", "gone", "upload"):
            self._check_field(row)
        elif row.field not in NAMES.get(row.message, ()) or row.layer != "values":
            _refuse(row, "has a field that it cannot have")
        elif row.codec not in ("dense", "bytes") or row.bytes != row.dense_bytes:
            _refuse(row, "has an impossible size")

    def _check_field(self, row: Entry) -> None:
        problem = self.problem
        sent = problem.algorithm.setup if row.round == 0 else problem.algorithm.exchanges
        if not (row.round >= 0 and 1 <= row.exchange <= len(sent)):
            _refuse(row, "is of an exchange that there is not")
        exchange, side = problem.exchange(row.round, row.exchange), row.direction
        f = next((f for f in schema(getattr(exchange, side)) if f.name == row.field), None)
        if f is None:
            _refuse(row, "has a field that its message does not have")
        selected = codec(problem.codecs[side].get(f.name, "dense"))
        if row.codec not in (selected.name, "dense"):
            _refuse(row, f"has another codec than {selected.name}")
        most, dense = self._sizes(f, row.codec)
        if row.layer not in most or row.bytes > most[row.layer]:
            _refuse(row, "has an impossible size")
        if row.dense_bytes not in dense if row.layer == "values" else row.dense_bytes:
            _refuse(row, "has an impossible dense size")

    def _sizes(self, f: Field, name: str) -> tuple[dict[str, int], Sequence[int]]:
        """Return the largest size of a field by layer, and its possible dense sizes, in bytes."""
        shape, dims = f.shape(self.problem.dims), self.problem.dims
        bounds = [
            codec(name).bounds(field_spec(f, shape, dtype, self.problem.net.layout)) for dtype in f.dtypes
        ]
        most: Counter[str] = Counter()
        for bound in bounds:
            own: Counter[str] = Counter()
            for layer, _, size in bound:
                own[layer] += size
            most |= own
        exact = [f.dense_bytes(dims) // DTYPES[f.kind.dtype].itemsize * DTYPES[d].itemsize for d in f.dtypes]
        return dict(most), range(max(exact) + 1) if f.kind.elastic else exact


def _retargeted(task: Envelope, client: int, kind: str) -> Envelope:
    """Return the same task for another client; its header has the same length."""
    return Envelope(msgspec.structs.replace(task.header, client=client, kind=kind), task.head, ())


def _shown(row: Entry) -> str:
    """Describe a row, with quotes around its names, because a name may be any text."""
    what = f"{row.direction} {row.message!r} {row.field!r} {row.layer!r} {row.codec!r}"
    return f"{row.bytes} of {row.dense_bytes} bytes {what} of client {row.client}"


def _refuse(row: Entry, why: str) -> NoReturn:
    raise ProtocolViolation(f"sent an account with a row that {why}: {row.kind!r}, {_shown(row)}"[:500])
