"""Edge servers that are processes, as the root sees them.

Edge servers register like workers. Their numbers follow those of the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsim.compressed_sums import Remainder
from fedsim.errors import WireError
from fedsim.problem import Problem
from fedsim.round_events import EdgeLost, Open, TaskId
from fedsim.wire.envelope import NONE, Envelope, Payload, check_fields
from fedsim.wire.ledger import Ledger, stream_bytes
from workers import edge_messages, protocol_messages as messages
from workers.coordinator.edge_accounts import AccountChecks
from workers.coordinator.edge_sums import check_sums, pack_remainder, read_remainder
from workers.coordinator.failures import ProtocolViolation
from workers.transport.edge_addresses import edge_of_worker, workers_behind


@dataclass
class Closing:
    """The state of one edge server in this exchange.

    sent: True if it was sent the broadcast. remainder: what the codecs took from its sums, if they have any.
    clients: its clients whose uploads count, by ascending id. asked: True if it was asked for its account,
    and for its sums if any. done: True if they have arrived.
    """

    sent: bool = False
    clients: list[int] = field(default_factory=list)
    asked: bool = False
    sums: Envelope | None = None
    remainder: Remainder | None = None
    done: bool = False


class EdgeServers:
    """The edge servers of a run. This class requests their sums and merges them in the tree's order."""

    def __init__(
        self,
        problem: Problem,
        workers: int,
        send: Callable[[int, Envelope, bool], None],
        ledger: Ledger,
        name: tuple[str, int],
        clock: Callable[[], float],
    ) -> None:
        """Set up the edge servers of a run.

        workers: the number of workers. send: sends an envelope to a worker or an edge server; the flag marks
        a retry. name: the run's name and its epoch (1: the launch).
        """
        assert problem.tree is not None
        tree = problem.tree
        self._problem, self._checks = problem, AccountChecks(problem, ledger.mechanism)
        self.tree, self.workers, self._send, self._ledger = tree, workers, send, ledger
        self._run, self._epoch = name
        self._clock, self._heard = clock, dict[int, float]()
        self._opened = Open(0, 0, (), False)
        self._relayed: Envelope | None = None
        self._remainders: Sequence[Remainder | None] = ()
        self._closing: dict[int, Closing] = {}
        self._answers: dict[int, tuple[Envelope, int]] = {}
        """The upload that counts, without frames, and the worker that computed it, by client."""
        self._here: set[int] = set()
        """The connected edge servers: those that have sent a hello and have not ended since."""
        self._present: set[int] = set()
        """The edge servers that have completed their set-up."""
        self._lost: set[int] = set()
        """The edge servers that have ended in this exchange after they were sent its broadcast."""
        self._to_merge: list[int] = []
        self._merge: Callable[[int | None], None] = lambda edge: None
        self.residuals: dict[str, Mapping[str, int] | None] = {}
        """The kernel's byte counts minus the ledger's at each edge server, from its last account."""
        self._over = False
        """True once the root has asked for the last accounts."""
        names = tree.names
        ledger.hops = {w: names[self.edge_of(w)] for w in range(workers + len(names))}

    def is_edge(self, worker: int) -> bool:
        """Return whether this number belongs to an edge server rather than a worker."""
        return worker >= self.workers

    def edge_of(self, worker: int) -> int:
        """Return the index of a worker's edge server, or of the edge server with this number."""
        if self.is_edge(worker):
            return worker - self.workers
        return edge_of_worker(worker, self.workers, len(self.tree.names))

    def workers_of(self, edge: int) -> range:
        """Return the workers behind an edge server."""
        return workers_behind(edge, self.workers, len(self.tree.names))

    def merges(self, round: int) -> bool:
        """Return whether edge servers send sums, not uploads, in a round."""
        return self.tree.merges and round > 0

    def admits(self, worker: int) -> bool:
        """Handle a hello: record an edge server, or return whether a worker's edge server is connected.

        An edge server that the root has removed may still connect workers before it learns of its removal.
        These workers are refused, because their uploads would be lost.
        """
        if self.is_edge(worker):
            self._here.add(self.edge_of(worker))
        return self.edge_of(worker) in self._here

    def starts(self, worker: int) -> bool:
        """Return whether a worker or an edge server that is not ready may be setting itself up.

        A worker waits until its edge server is set up. Once an edge server has sent its hello, silent()
        watches it.
        """
        if self.is_edge(worker):
            return worker not in self._heard
        return self.edge_of(worker) in self._present

    def heard(self, worker: int) -> None:
        """Record that an edge server has sent an envelope. It sends a heartbeat every second."""
        if self.is_edge(worker):
            self._heard[worker] = self._clock()

    def silent(self, seconds: float) -> list[int]:
        """Return the edge servers that have sent nothing for `seconds`, and stop watching them."""
        silent = [w for w, at in self._heard.items() if self._clock() - at > seconds]
        for worker in silent:
            del self._heard[worker]
        return silent

    # ---- an exchange

    def open(self, opened: Open, relayed: Envelope, server: Any, merge: Callable[[int | None], None]) -> None:
        """Start an exchange: send the broadcast to the edge servers of its participants.

        server: the server's state, which has the edge servers' remainders if sums have codecs. merge:
        called with each edge server that has uploads that count, in the order of the tree and once its
        account has arrived, and finally with None.
        """
        self._opened, self._relayed, self._merge = opened, relayed, merge
        self._remainders = server.remainders if self._problem.compressed else ()
        self._lost.clear()
        self._answers.clear()
        self._closing = {edge: Closing() for edge in self.tree.active(opened.participants)}
        self._to_merge = list(self._closing)
        for edge in self._present & self._closing.keys():
            self._relay(edge, again=False)

    def answered(self, worker: int, upload: Envelope) -> None:
        """Record which worker's upload counts; the edge server may have several uploads of a client."""
        self._answers[upload.header.client] = Envelope(upload.header, upload.head, ()), worker

    def release(self, client: int) -> None:
        """Record that a client's upload counts; it is folded after the edge server's account."""
        self._closing[self.tree.edge_of(client)].clients.append(client)

    def clients_of(self, edge: int) -> tuple[int, ...]:
        """Return the clients of an edge server whose uploads count."""
        return tuple(self._closing[edge].clients)

    def close(self) -> None:
        """Ask for sums and accounts, because every upload of the exchange has arrived."""
        for edge, closing in self._closing.items():
            if not closing.asked:
                closing.asked = True
                clients = closing.clients if self.merges(self._opened.round) else []
                uploads = [(k, self._answers[k][1]) for k in clients]
                close = edge_messages.close(self._run, self._epoch, self._opened, uploads)
                self._send(self.workers + edge, close, False)

    def check_upload(self, upload: Envelope, passed_on: bool) -> None:
        """Check an upload's header, and whether it should have frames. passed_on: True if it has frames.

        Raises:
            ProtocolViolation: If no correct edge server of this run would send this upload.
        """
        h, problem = upload.header, self._problem
        if h.kind != "upload" or passed_on == self.merges(h.round):
            raise ProtocolViolation(f"sent {h.kind!r} in another way than its edge server does")
        if problem.unchanged(h):
            return
        owner = f"sent an upload of client {h.client} in round {h.round}"
        kind, layout = problem.exchange(h.round, h.exchange).up, problem.net.layout
        try:
            check_fields(kind, h.fields, problem.codecs["up"], problem.dims, owner, layout)
        except WireError as e:
            raise ProtocolViolation(str(e)) from None

    def take(self, worker: int, envelope: Envelope) -> None:
        """Store an edge server's sums, or check and book its account.

        Raises:
            ProtocolViolation: If the envelope was not requested or is invalid; sums are then a retry.
        """
        try:
            self._take(worker, envelope)
        except (WireError, ProtocolViolation) as e:
            if envelope.header.kind == "sums":
                self._ledger.book_as_retry(envelope, worker)
            raise ProtocolViolation(f"sent {e}" if isinstance(e, WireError) else str(e)) from None

    def _take(self, worker: int, envelope: Envelope) -> None:
        h, edge = envelope.header, self.edge_of(worker)
        if not self.is_edge(worker) or h.run != self._run:
            raise ProtocolViolation(f"sent {h.kind}, and is no edge server of this run")
        if h.kind == "account" and h.round == NONE:
            return self._take_last(worker, envelope)
        closing = self._closing.get(edge)
        here = (h.round, h.exchange) == (self._opened.round, self._opened.exchange)
        if closing is None or not here or not closing.asked or closing.done:
            raise ProtocolViolation(f"sent {h.kind} of round {h.round}, for which it was not asked")
        due = bool(closing.clients) and self.merges(h.round)
        coded = self._problem.compressed is not None
        if h.kind == "draft":
            if not (due and coded) or closing.remainder is not None:
                raise ProtocolViolation(f"sent a draft of round {h.round}, for which it was not asked")
            closing.remainder = read_remainder(self._problem, envelope, f"draft of round {h.round}")
            return None
        if h.kind == "sums":
            if not due or closing.sums is not None or coded != (closing.remainder is not None):
                raise ProtocolViolation(f"sent sums of round {h.round}, for which it was not asked")
            check_sums(self._problem, envelope, len(self._senders(closing)), f"sums of round {h.round}")
            closing.sums = envelope
            return None
        if due and closing.sums is None:
            raise ProtocolViolation(f"sent no sums of round {h.round}")
        rows, _ = edge_messages.read_account(envelope)
        asked = [k for k in self._opened.participants if self.tree.edge_of(k) == edge]
        uploads = {k: self._answers[k][0] for k in asked if k in self._answers}
        place, workers = (h.round, h.exchange), self.workers_of(edge)
        self._checks.exchange(rows, edge, workers, place, self._task(), asked, uploads)
        self._ledger.take_over(rows)
        closing.done = True
        self._merge_in_order()
        return None

    def _take_last(self, worker: int, envelope: Envelope) -> None:
        edge = self.edge_of(worker)
        name = self.tree.names[edge]
        if not self._over or name in self.residuals:
            raise ProtocolViolation("sent its last account, for which it was not asked")
        rows, residual = edge_messages.read_account(envelope)
        self._checks.rest(rows, edge, self.workers_of(edge))
        self._ledger.take_over(rows)
        self.residuals[name] = residual

    def _task(self) -> Envelope:
        """Return a task of this exchange as an edge server sends it, without frames."""
        assert self._relayed is not None
        h = self._relayed.header
        task, payload = TaskId(h.round, h.exchange, 0, 0), Payload(h.fields, ())
        return messages.task(self._run, self._epoch, task, payload, folds=h.folds, asked=h.asked)

    def _merge_in_order(self) -> None:
        while self._to_merge and self._closing[self._to_merge[0]].done:
            edge = self._to_merge.pop(0)
            if self._closing[edge].clients:
                self._merge(edge)
        if not self._to_merge:
            self._merge(None)

    def bytes_of_sums(self, edge: int) -> int:
        """Return the bytes of an edge server's sums on an unencrypted stream, after their arrival."""
        sums = self._closing[edge].sums
        assert sums is not None  # they come before the account
        return stream_bytes(sums)

    def sums_of(self, edge: int) -> tuple[Envelope, tuple[int, ...], Remainder | None]:
        """Return an edge server's sums, the clients whose uploads were summed, and what the codecs took."""
        closing = self._closing[edge]
        assert closing.sums is not None  # merged only after its sums have arrived
        sums, closing.sums = closing.sums, Envelope(closing.sums.header, closing.sums.head, ())
        return sums, self._senders(closing), closing.remainder

    def _senders(self, closing: Closing) -> tuple[int, ...]:
        """Return the clients whose uploads are summed, without those that sent nothing (+event)."""
        headers = ((k, self._answers[k][0].header) for k in closing.clients)
        return tuple(k for k, header in headers if not self._problem.unchanged(header))

    # ---- ends

    def came(self, worker: int) -> None:
        """Send the broadcast to an edge server that has registered, if it needs the broadcast."""
        edge = self.edge_of(worker)
        again = edge in self._lost
        self._present.add(edge)
        if edge in self._closing and not self._closing[edge].sent and not self._closing[edge].done:
            self._relay(edge, again)

    def _relay(self, edge: int, again: bool) -> None:
        """Send the broadcast. again: True if it was sent before the edge server ended, and is now a retry."""
        assert self._relayed is not None
        self._closing[edge].sent = True
        owed = self._remainders[edge] if self._remainders else None
        if owed is not None and self.merges(self._opened.round):
            payload = pack_remainder(self._problem, owed)
            state = edge_messages.state(self._run, self._epoch, self._opened, payload)
            self._send(self.workers + edge, state, False)
        self._send(self.workers + edge, self._relayed, again)

    def lost(self, worker: int) -> list[EdgeLost]:
        """Handle an edge server's end. Its uploads are computed again unless its account has arrived."""
        edge = self.edge_of(worker)
        self._present.discard(edge)
        self._here.discard(edge)
        self._heard.pop(worker, None)
        closing = self._closing.get(edge)
        if self._over:  # everything is folded; only rows that belong to no exchange are missing
            self.residuals.setdefault(self.tree.names[edge], None)
        if closing is None or closing.done:
            return []
        if closing.sums is not None:  # their account has not arrived
            self._ledger.book_as_retry(closing.sums, worker)
        if closing.sent:
            self._lost.add(edge)
        self._closing[edge] = Closing()
        clients = [k for k in self._opened.participants if self.tree.edge_of(k) == edge]
        for k in clients:
            answer = self._answers.pop(k, None)
            if answer is not None and not self.merges(self._opened.round):  # else only headers arrived
                self._ledger.book_as_retry(*answer)
        return [EdgeLost(tuple(clients))]

    def accounts(self) -> None:
        """Ask all edge servers for the rows that belong to no exchange, and for the kernel's byte count."""
        self.residuals, self._over = {}, True
        for edge in range(len(self.tree.names)):
            self._send(self.workers + edge, edge_messages.ask_account(self._run), False)

    @property
    def accounted(self) -> bool:
        """True if all edge servers have answered, or have ended."""
        return len(self.residuals) == len(self.tree.names)
