"""The root compares an edge server's sums, accounts and upload headers with what it knows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from fedsim.errors import WireError
from fedsim.round_events import Open, TaskId
from fedsim.wire.envelope import NONE, Envelope, Payload, blob, encode, pack
from fedsim.wire.ledger import Ledger
from fedsim.wire.ledger_rows import Entry
from protocols import find
from tests.support.harness import problem_of
from workers import edge_messages, protocol_messages as messages
from workers.coordinator import edge_sums
from workers.coordinator.aggregation import AggregationThread, _Scalars
from workers.coordinator.edge_servers import EdgeServers
from workers.coordinator.failures import ProtocolViolation

WORKERS = 2
EDGE = WORKERS
"""The number under which edge server 0 registers. Worker 0 is behind it, with clients 0 and 1."""
OPENED = Open(1, 1, (0, 1, 2), True, asked=3)


@pytest.fixture(scope="module")
def problem() -> Any:
    return problem_of(find("fedavg"), clients=4, tree="2x2", codecs={"up.mean": "bf16"})


@dataclass
class Root:
    """The root's side of an exchange in which clients 0 and 1 were asked, and 1 has dropped out."""

    problem: Any
    ledger: Ledger = field(default_factory=Ledger)
    sent: list[tuple[int, Envelope]] = field(default_factory=list)
    merged: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        send = lambda w, e, _: self.sent.append((w, e))  # noqa: E731
        self.edges = EdgeServers(self.problem, WORKERS, send, self.ledger, ("run", 1), lambda: 0.0)
        server = self.problem.algorithm.server_init(self.problem.context(0, 0))
        self.down = self.problem.algorithm.broadcast(server, self.problem.context(1, 1))
        layout = self.problem.net.layout
        self.broadcast = encode(self.down, {}, self.problem.dims, layout=layout)
        kind, values = self.problem.exchange(1, 1).up, torch.arange(layout.size).float()
        self.up = kind(
            values, *[1 + values] * (len(fields(kind)) - 2), 0.5
        )  # with a precision, if it has one
        self.payload = encode(self.up, self.problem.codecs["up"], self.problem.dims, layout=layout)
        task = messages.task("run", 1, TaskId(1, 1, 0, 0), self.broadcast, asked=3)
        self.task = task
        self.gone = messages.task("run", 1, TaskId(1, 1, 1, 0), self.broadcast, True, asked=3)
        self.upload = messages.upload(task.header, self.payload, 1000)
        self.edges.open(
            OPENED, edge_messages.relayed("run", 1, OPENED, self.broadcast), server, self.merged.append
        )

    def answered(self) -> Root:
        """All uploads have come, and the root has asked for the sums."""
        self.edges.answered(0, self.upload)
        self.edges.release(0)
        self.edges.close()
        return self

    @property
    def rows(self) -> list[Entry]:
        """An honest account."""
        edge = Ledger()
        edge.book_handshake(0)
        edge.book(messages.idle("run"), 0, "up")
        edge.book(messages.idle("run"), 0, "up")
        edge.book(self.task, 0, "down")
        edge.book(self.gone, 0, "down")
        edge.book(self.upload, 0, "up")
        edge.book(self.upload, 0, "up", retry=True)
        return edge.close(1)

    @property
    def sums(self) -> Envelope:
        sent = edge_sums.summed(self.problem, OPENED, self.down, 0, [(0, self.up)])
        return edge_messages.sums("run", 1, OPENED, sent.payload)

    def take(self, envelope: Envelope, worker: int = EDGE) -> None:
        self.ledger.book(envelope, worker, "up")
        self.edges.take(worker, envelope)

    def account(
        self, rows: list[Any] | None = None, place: tuple[int, int] = (1, 1), residual: Any = None
    ) -> None:
        rows = self.rows if rows is None else rows
        fields, frames = blob("rows", msgspec.json.encode([[tuple(row) for row in rows], residual]))
        header = msgspec.structs.replace(
            edge_messages.ask_account("run").header, round=place[0], exchange=place[1], fields=fields
        )
        self.take(pack(header, frames))

    @property
    def booked(self) -> list[Entry]:
        """What the root has of its own and of accounts, but for envelopes that carry an account."""
        return [row for row in self.ledger.close(10**9) if row.message != "account"]


def kinds(rows: list[Entry]) -> set[tuple[str, str]]:
    return {(row.kind, row.message) for row in rows}


def test_an_honest_account_is_booked(problem: Any) -> None:
    root = Root(problem).answered()
    root.take(root.sums)
    root.account()
    assert root.merged == [0]
    booked = root.booked
    assert [row for row in booked if row.message != "sums"] == root.rows
    assert kinds(booked) >= {("algorithm", "task"), ("algorithm", "gone"), ("algorithm", "upload")}


def changed(**changes: Any) -> Callable[[list[Entry]], list[Any]]:
    """The first row of an upload's values, changed."""

    def change(rows: list[Entry]) -> list[Any]:
        at = next(
            i for i, r in enumerate(rows) if (r.kind, r.message, r.layer) == ("algorithm", "upload", "values")
        )
        return [*rows[:at], rows[at]._replace(**changes), *rows[at + 1 :]]

    return change


def more(
    kind: str, message: str, layer: str = "values", /, **changes: Any
) -> Callable[[list[Entry]], list[Any]]:
    """One more row, like the first of its sort."""

    def add(rows: list[Entry]) -> list[Any]:
        first = next(r for r in rows if (r.kind, r.message, r.layer) == (kind, message, layer))
        return [*rows, first._replace(**changes)]

    return add


ACCOUNTS: dict[str, Callable[[list[Entry]], list[Any]]] = {
    "a row twice": more("algorithm", "upload"),
    "a row of a client that was not asked": more("algorithm", "upload", client=3),
    "a row of another edge server's client": more("algorithm", "upload", client=2),
    "no such client": more("algorithm", "upload", client=10**9),
    "a row of the past": more("algorithm", "upload", round=0),
    "a row of the future": more("algorithm", "upload", round=2),
    "another exchange": more("algorithm", "upload", exchange=2),
    "a row is missing": lambda rows: [r for r in rows if r.message != "gone"],
    "nothing": lambda rows: [],
    "one byte more": changed(bytes=1),
    "negative bytes": changed(bytes=-5),
    "2^63": changed(bytes=1 << 63),
    "2^63 - 1": changed(bytes=(1 << 63) - 1),
    "another dense size": changed(dense_bytes=0),
    "another field": changed(field="precision"),
    "another codec": changed(codec="log8"),
    "a comma": changed(field="mean,extra"),
    "NUL": changed(field="mean\0"),
    "an escape": changed(codec="\x1b[2J"),
    "another direction": changed(direction="down"),
    "another message": changed(message="task"),
    "another edge server's worker": changed(worker=1),
    "its own hop": changed(hop="edge1"),
    "an unknown kind": changed(kind="algorithms"),
    "a kind that is not its message's": changed(kind="simulation"),
    "a row of kind edge": changed(kind="edge"),
    "negative retries": more("retry", "upload", bytes=-1),
    "retries of 2^62": more("retry", "upload", bytes=1 << 62),
    "retries larger than the codec allows": more("retry", "upload", bytes=10**6),
    "retries larger than dense": more("retry", "upload", dense_bytes=10**6),
    "retries of a field that is not sent": more("retry", "upload", field="x"),
    "retries with a codec that is not used": more("retry", "upload", codec="log8"),
    "retries of the future": more("retry", "upload", round=2),
    "retries of an exchange that there is not": more("retry", "upload", exchange=2),
    "retries of another client": more("retry", "upload", client=2),
    "a header beyond its limit": more("retry", "upload", "header", bytes=1 << 17),
    "a handshake that is too long": more("control", "handshake", "framing", bytes=10**6),
    "control of 2^62": more("control", "heartbeat", "header", bytes=1 << 62),
    "control of an unknown message": more("control", "heartbeat", "header", message="x\ny"),
    "control of another edge server's worker": more("control", "heartbeat", "header", worker=1),
    "more than all runs together": lambda rows: [
        *rows,
        *[Entry("simulation", 1, 0, NONE, 0, "down", "evaluate", "mean", "values", "dense", 1 << 40, 1 << 40)]
        * 1025,
    ],
}


@pytest.mark.parametrize("name", ACCOUNTS)
def test_an_account_that_cannot_be_is_refused_and_nothing_is_booked(name: str, problem: Any) -> None:
    root = Root(problem).answered()
    root.take(root.sums)
    with pytest.raises(ProtocolViolation) as refused:
        root.account(ACCOUNTS[name](root.rows))
    assert str(refused.value).isprintable()
    assert root.merged == []
    (lost,) = root.edges.lost(EDGE)  # its clients' tasks are computed again
    assert lost.clients == (0, 1)
    assert kinds(root.booked) == {("retry", "sums")}


@pytest.mark.parametrize(
    "place", [(0, 1), (1, 2), (2, 1), (-1, 0), (-1, 1), (-2, 1), (1 << 62, 1)], ids=lambda p: f"{p[0]}-{p[1]}"
)
def test_an_account_of_another_exchange_is_refused(place: tuple[int, int], problem: Any) -> None:
    root = Root(problem).answered()
    root.take(root.sums)
    with pytest.raises(ProtocolViolation, match="not asked"):
        root.account(place=place)


def test_an_account_that_was_not_asked_for_is_refused(problem: Any) -> None:
    root = Root(problem)
    root.edges.answered(0, root.upload)
    root.edges.release(0)
    with pytest.raises(ProtocolViolation, match="not asked"):
        root.account()
    assert kinds(root.booked) == set()


def test_a_second_account_is_refused(problem: Any) -> None:
    root = Root(problem).answered()
    root.take(root.sums)
    root.account()
    before = len(root.ledger.totals), root.ledger.bytes_of("algorithm", "up")
    with pytest.raises(ProtocolViolation, match="not asked"):
        root.account()
    assert (len(root.ledger.totals), root.ledger.bytes_of("algorithm", "up")) == before
    assert root.merged == [0]


def test_an_account_without_its_sums_is_refused(problem: Any) -> None:
    root = Root(problem).answered()
    with pytest.raises(ProtocolViolation, match="no sums"):
        root.account()


def test_an_account_that_cannot_be_read_is_refused(problem: Any) -> None:
    root = Root(problem).answered()
    root.take(root.sums)
    with pytest.raises(ProtocolViolation, match="unreadable 'account'"):
        root.account(rows=[["algorithm"]])


def test_a_worker_sends_no_account(problem: Any) -> None:
    root = Root(problem).answered()
    with pytest.raises(ProtocolViolation, match="no edge server"):
        root.take(root.sums, worker=0)


# ---- sums


def test_sums_that_were_not_asked_for_are_refused(problem: Any) -> None:
    root = Root(problem)
    root.edges.answered(0, root.upload)
    root.edges.release(0)
    with pytest.raises(ProtocolViolation, match="not asked"):
        root.take(root.sums)
    assert kinds(root.booked) == {("retry", "sums")}


def test_sums_are_taken_once(problem: Any) -> None:
    root = Root(problem).answered()
    root.take(root.sums)
    with pytest.raises(ProtocolViolation, match="not asked"):
        root.take(root.sums)
    root.account()
    assert kinds([r for r in root.booked if r.message == "sums"]) == {("edge", "sums"), ("retry", "sums")}


def test_no_sums_are_taken_where_no_upload_counts(problem: Any) -> None:
    """All that its clients have sent was lost."""
    root = Root(problem)
    root.edges.answered(0, root.upload)
    root.edges.close()
    with pytest.raises(ProtocolViolation, match="not asked"):
        root.take(root.sums)


@pytest.mark.parametrize("count", [0, 2])
def test_sums_of_another_number_of_clients_are_refused(count: int, problem: Any) -> None:
    root = Root(problem).answered()
    ups = [(k, root.up) for k in range(max(count, 1))]
    payload = edge_sums.summed(problem, OPENED, root.down, 0, ups).payload
    if not count:
        at = next(i for i, f in enumerate(payload.fields) if f.name == "scalars")
        (part,) = payload.fields[at].parts
        none = msgspec.structs.replace(
            payload.fields[at],
            shape=(0, 1),
            parts=(msgspec.structs.replace(part, nbytes=0),),
        )
        payload = Payload(
            (*payload.fields[:at], none, *payload.fields[at + 1 :]), (*payload.frames[:at], b"")
        )
    with pytest.raises(ProtocolViolation, match=r"scalars.*not for 1|shape"):
        root.take(edge_messages.sums("run", 1, OPENED, payload))
    assert kinds(root.booked) == {("retry", "sums")}


def test_the_fold_takes_no_sums_of_fewer_clients(problem: Any) -> None:
    """It does not rely on the check at the door."""

    class Edges:
        tree = problem.tree

        def sums_of(self, edge: int) -> tuple[Envelope, tuple[int, ...], None]:
            root = Root(problem)
            return root.sums, (0, 1), None

    fold = AggregationThread(problem, lambda k: pytest.fail("no upload is folded"), lambda: None)
    try:
        fold.edges = Edges()  # type: ignore[assignment]
        fold.close()
        scalars = _Scalars(problem.exchange(1, 1).up)
        server = problem.algorithm.server_init(problem.context(0, 0))
        with pytest.raises(WireError, match="the scalars of 1 uploads where 2 count"):
            fold._fold_sums(server, Root(problem).down, OPENED, 0, scalars)
    finally:
        fold.stop()


# ---- sums by a lossy codec


@pytest.fixture(scope="module")
def lossy() -> Any:
    codecs = {"edge.mean": "sigma:auto+dither", "edge.precision": "ratio:0.25"}
    return problem_of(find("fedlap_cov"), clients=4, tree="2x2", codecs=codecs)


def draft_of(root: Root, change: Callable[[torch.Tensor], torch.Tensor] = lambda r: r) -> Envelope:
    """The remainder that an honest edge server sends before its sums, with both tensors changed."""
    left = edge_sums.summed(root.problem, OPENED, root.down, 0, [(0, root.up)]).remainder
    assert left is not None
    shift, precision = map(change, left.values)
    message = edge_sums._remainder_type(("shift", "precision"))(shift, precision)
    return edge_messages.draft("run", 1, OPENED, encode(message, {}, {"P": len(shift)}))


def test_a_remainder_comes_back_before_the_next_broadcast(lossy: Any) -> None:
    root = Root(lossy).answered()
    root.take(draft_of(root))
    root.take(root.sums)
    root.account()
    _, clients, left = root.edges.sums_of(0)
    assert clients == (0,) and left is not None
    server = lossy.compressed.with_remainders(lossy.algorithm.server_init(lossy.context(0, 0)), {0: left})
    root.sent.clear()
    root.edges.came(EDGE)
    root.edges.open(
        OPENED, edge_messages.relayed("run", 1, OPENED, root.broadcast), server, root.merged.append
    )
    assert [e.header.kind for w, e in root.sent if w == EDGE] == ["state", "relayed"]
    state = next(e for _, e in root.sent if e.header.kind == "state")
    again = edge_sums.read_remainder(lossy, state, "here")
    assert all(torch.equal(a, b) for a, b in zip(again.values, left.values, strict=True))


def test_sums_without_the_remainder_that_goes_with_them_are_refused(lossy: Any) -> None:
    root = Root(lossy).answered()
    with pytest.raises(ProtocolViolation, match="not asked"):
        root.take(root.sums)
    assert kinds([r for r in root.booked if r.message == "sums"]) == {("retry", "sums")}


def test_a_remainder_that_was_not_asked_for_is_refused(problem: Any, lossy: Any) -> None:
    early = Root(lossy)
    twice, exact = Root(lossy).answered(), Root(problem).answered()
    twice.take(draft_of(twice))
    for root in (early, twice, exact):
        with pytest.raises(ProtocolViolation, match="draft of round 1, for which it was not asked"):
            root.take(draft_of(twice))


@pytest.mark.parametrize(
    ("change", "why"),
    [(lambda r: r * math.nan, "NaN or Inf"), (lambda r: r[:-1], "has shape")],
)
def test_a_remainder_that_cannot_be_one_is_refused(change: Any, why: str, lossy: Any) -> None:
    root = Root(lossy).answered()
    with pytest.raises(ProtocolViolation, match=why):
        root.take(draft_of(root, change))


# ---- the last account


def last(root: Root) -> list[Entry]:
    return [row for row in root.rows if row.kind != "algorithm"]


def test_a_last_account_is_asked_for_and_taken_once(problem: Any) -> None:
    root = Root(problem)
    with pytest.raises(ProtocolViolation, match="not asked"):
        root.account(last(root), place=(NONE, 0))
    root.edges.accounts()
    root.account(last(root), place=(NONE, 0), residual={"down": 0, "up": 3})
    assert root.edges.residuals == {"edge0": {"down": 0, "up": 3}}
    with pytest.raises(ProtocolViolation, match="not asked"):
        root.account(last(root), place=(NONE, 0))


def test_a_last_account_has_no_row_of_an_exchange(problem: Any) -> None:
    root = Root(problem)
    root.edges.accounts()
    with pytest.raises(ProtocolViolation, match="belongs to an exchange"):
        root.account(place=(NONE, 0))
    assert kinds(root.booked) == set()


@pytest.mark.parametrize(
    "residual", [{"down": 0}, {"down": 0, "up": 1 << 63}, {"down": 0, "up": 0, "x": 1}, 5]
)
def test_a_residual_is_two_numbers(residual: Any, problem: Any) -> None:
    root = Root(problem)
    root.edges.accounts()
    with pytest.raises(ProtocolViolation, match="unreadable"):
        root.account(last(root), place=(NONE, 0), residual=residual)


def test_a_run_does_not_wait_for_the_last_account_of_an_edge_server_that_has_ended(problem: Any) -> None:
    root = Root(problem)
    root.edges.accounts()
    root.edges.lost(EDGE)
    root.edges.lost(EDGE + 1)
    assert root.edges.accounted and set(root.edges.residuals.values()) == {None}


# ---- headers of uploads


def forged(upload: Envelope, **changes: Any) -> Envelope:
    first = msgspec.structs.replace(upload.header.fields[0], **changes)
    return pack(msgspec.structs.replace(upload.header, fields=(first, *upload.header.fields[1:])))


@pytest.mark.parametrize(
    "changes", [{"name": "x"}, {"codec": "log8"}, {"dtype": "f64"}, {"shape": (7,)}, {"parts": ()}], ids=str
)
def test_the_header_of_an_upload_is_checked_where_its_frames_are_elsewhere(
    changes: dict[str, Any], problem: Any
) -> None:
    root = Root(problem)
    root.edges.check_upload(root.upload, passed_on=False)
    with pytest.raises(ProtocolViolation):
        root.edges.check_upload(forged(root.upload, **changes), passed_on=False)


def test_the_sizes_that_a_header_announces_are_those_of_its_codec(problem: Any) -> None:
    root = Root(problem)
    parts = tuple(msgspec.structs.replace(p, nbytes=1 << 40) for p in root.upload.header.fields[0].parts)
    with pytest.raises(ProtocolViolation, match="the layout demands"):
        root.edges.check_upload(forged(root.upload, parts=parts), passed_on=False)


@pytest.mark.parametrize(("kind", "passed_on"), [("upload", True), ("absent", False), ("score", False)])
def test_an_upload_comes_as_edge_servers_send_it(kind: str, passed_on: bool, problem: Any) -> None:
    root = Root(problem)
    header = msgspec.structs.replace(root.upload.header, kind=kind)
    with pytest.raises(ProtocolViolation, match="another way"):
        root.edges.check_upload(pack(header), passed_on)


def test_the_names_of_a_tree_are_no_text_for_a_terminal(tmp_path: Path) -> None:
    from fedsim.errors import DataError
    from fedsim.tree import tree

    file = tmp_path / "tree.toml"
    file.write_text('[edges]\n"a\\u001b[2J" = "0-3"\n')
    with pytest.raises(DataError, match="no name of an edge server"):
        tree(str(file), 4)
