"""Edge servers that are processes, as the root sees them: what each was given and has sent in an exchange.

They register as workers do, with the numbers behind those of the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fedsim.round_events import EdgeLost, Open
from fedsim.tree import Tree
from fedsim.wire.envelope import Envelope
from fedsim.wire.ledger import Ledger
from workers import edge_messages
from workers.coordinator.failures import ProtocolViolation
from workers.transport.edge_addresses import edge_of_worker, workers_behind


@dataclass
class Closing:
    """One edge server in the present exchange.

    sent: it has the broadcast. clients: whose uploads count, ascending. asked: the root has said so. done: it
    has sent its sums, if there are any, and its account.
    """

    sent: bool = False
    clients: list[int] = field(default_factory=list)
    asked: bool = False
    sums: Envelope | None = None
    done: bool = False


class EdgeServers:
    """Says to edge servers what counts, and takes their sums in the order of the tree."""

    def __init__(
        self,
        tree: Tree,
        workers: int,
        send: Callable[[int, Envelope, bool], None],
        ledger: Ledger,
        name: tuple[str, int],
        clock: Callable[[], float],
    ) -> None:
        """workers: how many there are. send: to a worker's or an edge server's number, and whether it had it
        before. name: the run's, and this start's number."""
        self.tree, self.workers, self._send, self._ledger = tree, workers, send, ledger
        self._run, self._epoch = name
        self._clock, self._heard = clock, dict[int, float]()
        self._opened = Open(0, 0, (), False)
        self._relayed: Envelope | None = None
        self._closing: dict[int, Closing] = {}
        self._answers: dict[int, tuple[Envelope, int]] = {}
        """By client the header of the upload that counts, and its worker."""
        self._here: set[int] = set()
        """Those that have said hello, and not ended since."""
        self._present: set[int] = set()
        """Those of them that are set up."""
        self._lost: set[int] = set()
        """Those of this exchange that have ended with its broadcast."""
        self._to_merge: list[int] = []
        self._merge: Callable[[int | None], None] = lambda edge: None
        self.residuals: dict[str, Mapping[str, int] | None] = {}
        """The kernel's count minus the ledger, of each that has sent its last account."""
        names = tree.names
        ledger.hops = {w: names[self.edge_of(w)] for w in range(workers + len(names))}

    def is_edge(self, worker: int) -> bool:
        """Whether a number is that of an edge server."""
        return worker >= self.workers

    def edge_of(self, worker: int) -> int:
        """The edge server of a worker, or the one that has this number."""
        if self.is_edge(worker):
            return worker - self.workers
        return edge_of_worker(worker, self.workers, len(self.tree.names))

    def workers_of(self, edge: int) -> range:
        """The workers behind an edge server."""
        return workers_behind(edge, self.workers, len(self.tree.names))

    def merges(self, round: int) -> bool:
        """Whether sums come up in a round, and not uploads."""
        return self.tree.merges and round > 0

    def admits(self, worker: int) -> bool:
        """Note the hello of an edge server; whether a worker may come in, as only behind one that is here.

        An edge server that was given up, and does not know it yet, still connects its workers. What they
        upload there would be lost with what it has.
        """
        if self.is_edge(worker):
            self._here.add(self.edge_of(worker))
        return self.edge_of(worker) in self._here

    def starts(self, worker: int) -> bool:
        """Whether a worker that is not ready could be on its way: its edge server is there.

        An edge server is on its way until its hello; from then on silent() knows of it.
        """
        if self.is_edge(worker):
            return worker not in self._heard
        return self.edge_of(worker) in self._present

    def heard(self, worker: int) -> None:
        """Note a sign of life; an edge server gives one every second."""
        if self.is_edge(worker):
            self._heard[worker] = self._clock()

    def silent(self, seconds: float) -> list[int]:
        """The edge servers that have given none for so long: they hang or are stopped."""
        silent = [w for w, at in self._heard.items() if self._clock() - at > seconds]
        for worker in silent:
            del self._heard[worker]
        return silent

    # ---- an exchange

    def open(self, opened: Open, relayed: Envelope, merge: Callable[[int | None], None]) -> None:
        """Send the broadcast to the edge servers of its clients.

        merge: called with an edge server whose sums, or uploads, are next, and with None behind the last one.
        """
        self._opened, self._relayed, self._merge = opened, relayed, merge
        self._lost.clear()
        self._answers.clear()
        self._closing = {edge: Closing() for edge in self.tree.active(opened.participants)}
        self._to_merge = list(self._closing)
        for edge in self._present & self._closing.keys():
            self._relay(edge, again=False)

    def answered(self, worker: int, upload: Envelope) -> None:
        """The upload that counts for a client is this worker's: its edge server may have others."""
        self._answers[upload.header.client] = Envelope(upload.header, upload.head, ()), worker

    def release(self, client: int) -> None:
        """A client's upload counts; it is folded once its edge server's account is here, also where it is."""
        self._closing[self.tree.edge_of(client)].clients.append(client)

    def clients_of(self, edge: int) -> tuple[int, ...]:
        """The clients of an edge server whose uploads count."""
        return tuple(self._closing[edge].clients)

    def close(self) -> None:
        """Every upload of the exchange has arrived: ask for the sums that are not here."""
        for edge, closing in self._closing.items():
            if not closing.asked:
                closing.asked = True
                clients = closing.clients if self.merges(self._opened.round) else []
                uploads = [(k, self._answers[k][1]) for k in clients]
                self._send(
                    self.workers + edge,
                    edge_messages.close(self._run, self._epoch, self._opened, uploads),
                    False,
                )

    def take(self, worker: int, envelope: Envelope) -> None:
        """Take sums or an account.

        Raises:
            ProtocolViolation: If it was not asked for.
        """
        h, edge = envelope.header, self.edge_of(worker)
        if h.kind == "account" and h.round < 0:
            self._ledger.take_over(edge_messages.read_account(envelope)[0])
            self.residuals[self.tree.names[edge]] = edge_messages.read_account(envelope)[1]
            return
        closing = self._closing.get(edge)
        here = (h.round, h.exchange) == (self._opened.round, self._opened.exchange)
        if closing is None or not here or not closing.asked or closing.done:
            raise ProtocolViolation(f"sent {h.kind} of round {h.round}, for which it was not asked")
        if h.kind == "sums":
            closing.sums = envelope
            return
        if closing.clients and closing.sums is None and self.merges(h.round):
            raise ProtocolViolation(f"sent no sums of round {h.round}")
        self._ledger.take_over(edge_messages.read_account(envelope)[0])
        closing.done = True
        while self._to_merge and self._closing[self._to_merge[0]].done:
            edge = self._to_merge.pop(0)
            if self._closing[edge].clients:
                self._merge(edge)
        if not self._to_merge:
            self._merge(None)

    def sums_of(self, edge: int) -> tuple[Envelope, tuple[int, ...]]:
        """An edge server's sums, and of whose uploads they are."""
        closing = self._closing[edge]
        assert closing.sums is not None  # released only then
        sums, closing.sums = closing.sums, Envelope(closing.sums.header, closing.sums.head, ())
        return sums, self.clients_of(edge)

    # ---- ends

    def came(self, worker: int) -> None:
        """An edge server has registered, maybe again: send the broadcast that its clients answer."""
        edge = self.edge_of(worker)
        again = edge in self._lost
        self._present.add(edge)
        if edge in self._closing and not self._closing[edge].sent and not self._closing[edge].done:
            self._relay(edge, again)

    def _relay(self, edge: int, again: bool) -> None:
        """again: an edge server that has ended had it, so the ledger counts it as a retry."""
        assert self._relayed is not None
        self._closing[edge].sent = True
        self._send(self.workers + edge, self._relayed, again)

    def lost(self, worker: int) -> list[EdgeLost]:
        """An edge server has ended: what it had is computed again, unless its sums are here."""
        edge = self.edge_of(worker)
        self._present.discard(edge)
        self._here.discard(edge)
        self._heard.pop(worker, None)
        closing = self._closing.get(edge)
        if closing is None or closing.done:
            return []
        if closing.sums is not None:  # without the account that goes with them
            self._ledger.book_as_retry(closing.sums, worker)
        if closing.sent:
            self._lost.add(edge)
        self._closing[edge] = Closing()
        clients = [k for k in self._opened.participants if self.tree.edge_of(k) == edge]
        for k in clients:
            answer = self._answers.pop(k, None)
            if answer is not None and not self.merges(self._opened.round):  # else no row of it came here
                self._ledger.book_as_retry(*answer)
        return [EdgeLost(tuple(clients))]

    def accounts(self) -> None:
        """Ask all for the rows that belong to no exchange, and for the kernel's count."""
        self.residuals = {}
        for edge in range(len(self.tree.names)):
            self._send(self.workers + edge, edge_messages.ask_account(self._run), False)

    @property
    def accounted(self) -> bool:
        """Whether all have answered that."""
        return len(self.residuals) == len(self.tree.names)
