"""Aggregate (fold) the uploads of an exchange in a thread, in ascending client id.

The thread gives the algorithm an iterator that blocks until the next upload has arrived, so the fold overlaps
with the clients' computations. One upload is decoded at a time, so memory does not depend on K.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fedsim.algorithm import Arrival
from fedsim.errors import WireError
from fedsim.problem import Problem
from fedsim.tree import Tree, sums_dims, sums_message
from fedsim.wire import limits
from fedsim.wire.envelope import NONE, VERSION, Envelope, Header, Payload, pack, scaled
from fedsim.wire.message_context import codec_stream, of_upload
from fedsim.wire.schema import check_values, scalars_of, summed_scalars
from fedsim.wire.wire_size import field_headers
from workers.coordinator.broadcasts import Broadcast

_Job = tuple[Any, Broadcast, Mapping[int, Any]]
"""The arguments of AggregationThread.start."""


class _Stop(BaseException):
    """An exception that ends the fold thread."""


@dataclass(frozen=True)
class Fold:
    """The result of a fold.

    server: the next server state. scalars: the uploads' scalars, aggregated by FieldKind.over. limits: the
    fedsim.wire.limits of the broadcast ("down") and of one upload ("up", "kl"). edges: pairs of an edge
    server and an envelope that it sends to the root (its sums, or an upload), without frames.
    """

    server: Any
    scalars: dict[str, float]
    limits: dict[str, Any] = field(default_factory=dict)
    edges: tuple[tuple[int, Envelope], ...] = ()


class AggregationThread:
    """A thread that computes one fold at a time: start(), then release() for each upload, then close().

    At the end of the fold the thread calls on_done, and result() returns the fold.
    """

    def __init__(
        self, problem: Problem, take: Callable[[int], tuple[Envelope, int]], on_done: Callable[[], None]
    ) -> None:
        """Start the thread. take: returns a client's upload and the worker that sent it."""
        self.problem, self._take, self._on_done = problem, take, on_done
        self._uploads: queue.SimpleQueue[int | _Stop | None] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Fold | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fold", daemon=True)
        self._thread.start()

    def start(self, server: Any, current: Broadcast, answered: Mapping[int, Any]) -> None:
        """Begin the fold of an exchange.

        current: the exchange's broadcast. answered: the decoded broadcast that each client's upload answers.
        """
        self._jobs.put((server, current, answered))

    def release(self, client: int) -> None:
        """Queue a client's upload for the fold."""
        self._uploads.put(client)

    def close(self) -> None:
        """Tell the thread that the exchange has no further upload."""
        self._uploads.put(None)

    def result(self) -> Fold:
        """Return the fold. Call this method once after each call of on_done.

        Raises:
            FedsimError: If an upload is invalid. Any other error of the fold is raised unchanged.
        """
        result = self._done.get(timeout=1.0)
        if isinstance(result, BaseException):
            raise result
        return result

    def stop(self, deadline: float = 5.0) -> None:
        self._uploads.put(_Stop())
        self._jobs.put(None)
        self._thread.join(deadline)

    def _run(self) -> None:
        torch.set_num_threads(self.problem.experiment.threads)
        while (job := self._jobs.get()) is not None:
            try:
                self._done.put(self._fold(*job))
            except _Stop:
                return
            except BaseException as e:  # passed to the main thread, which handles it
                self._done.put(e)
            del job  # free the previous round's server
            self._on_done()

    def _fold(self, server: Any, current: Broadcast, answered: Mapping[int, Any]) -> Fold:
        problem, command, down = self.problem, current.opened, current.decoded
        round, exchange = command.round, command.exchange
        scalars = _Scalars(problem.messages.exchange(round, exchange).up)

        first = self._next()
        if first is None:  # no upload is to be folded
            return Fold(server, {})
        measured: dict[str, Any] = {}
        to_root = None if problem.rounds.tree is None else _EdgeMessages(problem, problem.rounds.tree)
        aim = limits.measured(command)
        ctx = problem.context(round, exchange, command.folded_rounds, command.asked)

        def arrivals() -> Iterator[Arrival]:
            k: int | None = first
            while k is not None:
                envelope, worker = self._take(k)
                up = read_upload(problem, envelope, answered[k], worker)
                if up is not None:
                    scalars.add(up, problem.sizes[k])
                if to_root is not None:
                    to_root.add(envelope)
                elif k >= aim and up is not None and not measured:
                    measured.update(self._limits(envelope, up, answered[k], current.payload))
                yield ctx.arrival(k, answered[k], up, problem.rounds.policy.weight(round, k))
                del envelope, up  # free them before the next upload is read
                k = self._next()

        stream = arrivals()
        next_server = problem.algorithm.server_update(server, down, stream, ctx)
        for _ in stream:  # consume the uploads that an algorithm has not read
            pass
        edges = () if to_root is None else to_root.envelopes()
        return Fold(next_server, scalars.result(), measured, edges)

    def _limits(self, envelope: Envelope, up: Any, down: Any, payload: Payload) -> dict[str, Any]:
        """Return the costs and limits of the broadcast and of this upload (fedsim.wire.limits), if any."""
        problem, h = self.problem, envelope.header
        exchange, layout = problem.messages.exchange(h.round, h.exchange), problem.net.layout
        context = of_upload(down)
        sent = limits.of_message(exchange.down, payload, layout)
        received = limits.of_message(exchange.up, Payload(h.fields, envelope.frames), layout)
        kl = limits.divergence(up, down)
        return {
            **({"down": sent} if sent else {}),
            **({"up": limits.with_rounding(received, up, down, context.scale)} if received else {}),
            **({} if kl is None else {"kl": kl}),
        }

    def _next(self) -> int | None:
        """Return the client of the next upload, or None after the last upload."""
        k = self._uploads.get()
        if isinstance(k, _Stop):
            raise k
        return k


def read_upload(problem: Problem, envelope: Envelope, down: Any, worker: int = NONE) -> Any:
    """Return the message of an upload, or None if the client's event rule (+event) withholds it.

    down: the decoded broadcast that the upload answers.

    Raises:
        WireError: If the upload is invalid; the error names client, round, worker and field.
    """
    h = envelope.header
    if problem.rounds.policy.withheld(h):
        return None
    sender = f" from worker {worker}" if worker != NONE else ""
    owner = f"upload of client {h.client} in round {h.round}{sender}"
    kind = problem.messages.exchange(h.round, h.exchange).up
    stream = codec_stream(problem.experiment.seed, h.round, h.exchange, h.client)
    context = of_upload(down, stream, scaled(problem.messages.codecs["up"]))
    up = problem.messages.decode(kind, envelope, "up", owner, context)
    check_values(up, owner, problem.experiment.max_norm or math.inf)
    return up


def why_invalid(problem: Problem, envelope: Envelope, down: Any, worker: int = NONE) -> str:
    """Return why an upload is invalid, or '' if it is valid."""
    try:
        read_upload(problem, envelope, down, worker)
    except WireError as e:
        return str(e)
    return ""


class _EdgeMessages:
    """The envelopes from edge servers to the root in one exchange: sums, or uploads that they forward.

    They are not sent. Their headers have the sizes that the ledger books.
    """

    def __init__(self, problem: Problem, tree: Tree) -> None:
        self._problem, self._tree = problem, tree
        self._forwarded: list[tuple[int, Envelope]] = []
        self._summed: dict[int, tuple[Header, int]] = {}
        """The header of an upload, and the number of uploads that the client's event rule sends, by edge
        server."""

    def add(self, upload: Envelope) -> None:
        """Add an upload that its edge server forwards, or adds to its sum."""
        h = upload.header
        edge = self._tree.edge_of(h.client)
        if self._tree.sums(h.round):
            _, uploads = self._summed.get(edge, (h, 0))
            self._summed[edge] = h, uploads + (not self._problem.rounds.policy.withheld(h))
        else:
            self._forwarded.append((edge, Envelope(h, upload.head, ())))

    def envelopes(self) -> tuple[tuple[int, Envelope], ...]:
        """Return pairs of an edge server and an envelope without frames."""
        sums = ((edge, self._sums(*summed)) for edge, summed in self._summed.items())
        return (*self._forwarded, *sums)

    def _sums(self, upload: Header, uploads: int) -> Envelope:
        """Return the envelope with the sums of this many uploads. upload: the header of one of them."""
        problem, (round, number) = self._problem, (upload.round, upload.exchange)
        exchange = problem.messages.exchange(round, number)
        dims = sums_dims(exchange, problem.messages.dims, uploads)
        fields, _ = field_headers(sums_message(exchange), {}, dims, problem.net.layout)
        return pack(Header(VERSION, "sums", upload.run, upload.epoch, round, number, fields=fields))


class _Scalars:
    def __init__(self, up: type) -> None:
        scalars = [(f, group) for f, group in scalars_of(up) if f.kind.over != "nothing"]
        self._over = {f.name: f.kind.over for f, _ in scalars}
        self._values: dict[str, list[float]] = {name: [] for name in self._over}
        self.sizes: list[int] = []

    def add(self, up: Any, size: int) -> None:
        self.add_row(summed_scalars(up).values(), size)

    def add_row(self, row: Iterable[float], size: int) -> None:
        self.sizes.append(size)
        for values, value in zip(self._values.values(), row, strict=True):
            values.append(value)

    def result(self) -> dict[str, float]:
        if not self.sizes:
            return {}
        return {name: self._summed(over, self._values[name]) for name, over in self._over.items()}

    def _summed(self, over: str, values: list[float]) -> float:
        if over == "min":
            return min(values)
        if over == "sum":
            return sum(values)
        if over == "rss":
            return math.sqrt(sum(v * v for v in values))
        return sum(n * v for n, v in zip(self.sizes, values, strict=True)) / sum(self.sizes)
