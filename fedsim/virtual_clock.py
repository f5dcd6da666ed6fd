"""The virtual clock computes how long a client would take with a given link and a given computer.

    seconds = rtt + jitter |y| + 8 bytes_down / down + N_k compute exp(noise z) + 8 bytes_up / up
    joules  = joules_down bytes_down + joules_example N_k + joules_up bytes_up

With `overhead`, `loss` or `initcwnd` in --link, the seconds of fedsim.tcp_links replace 8 bytes / rate.

y and z are N(0, 1), drawn from (seed, round, exchange, client) and (seed, round, client). Bytes are
those of the ledger, so a codec that saves bytes saves time and energy. For a client that sends nothing back,
only the download counts. All clients of an exchange share the server's own link: in each direction, the
exchange lasts at least as long as all their bytes take on this link. A client's own time does not change.
With a tree, every edge server has a link to the root and a link that its clients share:

    T_e = the time of the slowest upload of edge server e's clients, and at least the time of all their
          bytes on clients_down and clients_up
    E_e = rtt + 8 hop_down / down + T_e + 8 hop_up / up

hop_down are the bytes of the broadcast, which the edge server gets once; hop_up are the bytes of its sums. An
exchange lasts as long as the slowest E_e, and at least the time of all hops' bytes on the root's own link.

No code sleeps or measures time: whether a client meets a deadline is a pure function of the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from fedsim import tcp_links
from fedsim.client_devices import Devices, Floats, Link, network, parse_time
from fedsim.errors import UsageError
from fedsim.round_events import TaskId
from fedsim.seeds import standard_normals
from fedsim.tree import Tree

Ints = npt.NDArray[np.int64]

BLOCK = 64
"""The number of clients that share a jitter stream, because a million streams take seconds to set up."""


# ---- edge servers


@dataclass(frozen=True, eq=False)
class EdgeLinks:
    """The links of all edge servers, in columns (E,). up, down, rtt: bits per second, and seconds of a round
    trip, on the hop to the root. clients_up, clients_down: bits per second of the link that clients share."""

    up: Floats
    down: Floats
    rtt: Floats
    clients_up: Floats
    clients_down: Floats

    @staticmethod
    def of(values: Mapping[str, Mapping[str, float]], names: tuple[str, ...]) -> EdgeLinks:
        """Make the columns. values: the values by edge server and column; those of '' are defaults."""
        every = values.get("", {})
        columns = {
            f.name: np.array([{**every, **values.get(e, {})}.get(f.name, _DEFAULT[f.name]) for e in names])
            for f in fields(EdgeLinks)
        }
        return EdgeLinks(**columns)

    @property
    def shared(self) -> bool:
        """True if clients of an edge server share a link."""
        return bool(np.isfinite(self.clients_up).any() or np.isfinite(self.clients_down).any())


_DEFAULT = {"rtt": 0.0, **dict.fromkeys(("up", "down", "clients_up", "clients_down"), math.inf)}


@dataclass(frozen=True, eq=False)
class Hops:
    """Stream bytes between each edge server and the root in one exchange, shape (E,) each; 0 for edge servers
    without a client in the exchange."""

    down: Ints
    up: Ints

    @staticmethod
    def none(tree: Tree) -> Hops:
        """Return the bytes of a tree before any are added."""
        return Hops(np.zeros(len(tree.names), np.int64), np.zeros(len(tree.names), np.int64))

    def add(self, edge: int, direction: str, stream_bytes: int) -> None:
        """Add bytes of an envelope."""
        (self.up if direction == "up" else self.down)[edge] += stream_bytes


def _tree_seconds(
    tree: Tree,
    links: EdgeLinks,
    deadline: float,
    clients: Ints,
    answers: tuple[Floats, npt.NDArray[np.bool_]],
    sent: tuple[Ints, Ints],
    hops: Hops,
) -> float:
    """Return the seconds until the last sums arrive at the root; the arguments are those of Clock.duration.

    deadline: the deadline of an edge server's clients, in seconds; inf for none.
    """
    owners, count = tree.owners[clients], len(tree.names)
    seconds, answered = answers
    slowest = np.zeros(count)
    np.maximum.at(slowest, owners[answered], seconds[answered])
    down, up = (np.bincount(owners, weights=w, minlength=count) for w in sent)
    inside = np.maximum(slowest, np.maximum(8 * down / links.clients_down, 8 * up / links.clients_up))
    if deadline < math.inf:
        silent = np.bincount(owners[~answered], minlength=count) > 0
        inside = np.where(silent, deadline, np.minimum(inside, deadline))
    lasts = links.rtt + 8 * hops.down / links.down + inside + 8 * hops.up / links.up
    return float(lasts[np.unique(owners)].max(initial=0.0))


# ---- clients


@dataclass(frozen=True, eq=False)
class Clock:
    """The virtual clock. devices: the clients' devices. deadline: seconds for an exchange; inf for none.
    server: the server's link. edges: the links of edge servers, if there is a tree."""

    devices: Devices
    deadline: float
    seed: int
    server: Link = Link()
    tree: Tree | None = None
    edges: EdgeLinks | None = None

    @property
    def has_shared_edges(self) -> bool:
        """True if clients share a link of an edge server."""
        return self.edges is not None and self.edges.shared

    def seconds(
        self, round: int, client: int, examples: int, bytes_down: int, bytes_up: int, exchange: int = 1
    ) -> float:
        """Return a client's seconds in one exchange, from the broadcast to the last bit of the upload."""
        clients, sizes = np.array([client]), np.array([examples])
        return float(self.seconds_of(round, clients, sizes, bytes_down, bytes_up, exchange)[0])

    def seconds_of(
        self,
        round: int,
        clients: Ints,
        examples: Ints,
        bytes_down: int | Ints,
        bytes_up: int | Ints,
        exchange: int = 1,
    ) -> Floats:
        """Return the seconds of clients (n,), bit for bit those of `seconds`. examples: N_k of each, (n,)."""
        d = self.devices
        computing, noise, jitter = examples * d.seconds[clients], d.noise[clients], d.jitter[clients]
        noisy = np.flatnonzero(noise)
        if len(noisy):
            draws = standard_normals(self.seed, "compute", round, clients[noisy].tolist(), "noise")[:, 0]
            factors = [math.exp(s * z) for s, z in zip(noise[noisy].tolist(), draws.tolist(), strict=True)]
            computing[noisy] *= factors
        result = self._on_the_link(clients, bytes_down, bytes_up) + computing
        shaken = np.flatnonzero(jitter)
        if len(shaken):
            result[shaken] += jitter[shaken] * np.abs(self._normals(round, exchange, clients[shaken]))
        return result

    def download_of(self, clients: Ints, bytes_down: int | Ints) -> Floats:
        """Return the seconds of clients (n,) that get the broadcast and send nothing."""
        return self._carried(clients, bytes_down, self.devices.down)

    def joules_of(
        self, clients: Ints, examples: Ints, bytes_down: int | Ints, bytes_up: int | Ints
    ) -> Floats:
        """Return the energy of clients (n,) in joules. examples: the examples that each computes, (n,)."""
        d = self.devices
        links = d.joules_down[clients] * bytes_down + d.joules_up[clients] * bytes_up
        return links + d.joules[clients] * examples

    def duration(
        self,
        clients: Ints,
        answers: tuple[Floats, npt.NDArray[np.bool_]],
        sent: tuple[Ints, Ints],
        hops: Hops | None = None,
    ) -> float:
        """Return the seconds of an exchange until its last upload, or sums, arrive.

        If a client missed the deadline or sent nothing, the server (or the client's edge server) waits until
        the deadline. clients: those that got the broadcast, (n,). answers: each client's seconds (n,), and
        whether it sent an upload (n,). sent: the bytes down and up of each client, (n,) each. hops: bytes
        between edge servers and the root, if there is a tree.
        """
        if self.tree is None or self.edges is None or hops is None:
            seconds, answered = answers
            slowest, silent = float(seconds[answered].max(initial=0.0)), not answered.all()
            return self.exchange_seconds(slowest, silent, int(sent[0].sum()), int(sent[1].sum()))
        lasts = _tree_seconds(self.tree, self.edges, self.deadline, clients, answers, sent, hops)
        shared = self.server.down, self.server.up
        return max(lasts, 8 * float(hops.down.sum()) / shared[0], 8 * float(hops.up.sum()) / shared[1])

    def exchange_seconds(self, slowest: float, silent: bool, bytes_down: int, bytes_up: int) -> float:
        """Return the seconds of an exchange without a tree. slowest: the seconds until the last upload.

        The exchange lasts at least as long as all bytes take on the server's link. If a client missed the
        deadline, or got the broadcast and sent nothing (silent), the exchange lasts until the deadline.
        """
        if silent and self.deadline < math.inf:
            return self.deadline
        shared = self.server.down, self.server.up
        return min(max(slowest, 8 * bytes_down / shared[0], 8 * bytes_up / shared[1]), self.deadline)

    def _on_the_link(self, clients: Ints, bytes_down: int | Ints, bytes_up: int | Ints) -> Floats:
        d = self.devices
        down, up = self._carried(clients, bytes_down, d.down), self._carried(clients, bytes_up, d.up)
        return d.rtt[clients] + down + up

    def _carried(self, clients: Ints, stream_bytes: int | Ints, rates: Floats) -> Floats:
        """Return the seconds of messages in one direction. rates: of all clients in this direction, (K,)."""
        d = self.devices
        tcp = d.overhead[clients], d.loss[clients], d.initcwnd[clients]
        return tcp_links.seconds(stream_bytes, rates[clients], d.rtt[clients], *tcp)

    def _normals(self, round: int, exchange: int, clients: Ints) -> Floats:
        """Return y of each client: the draw at the client's position in the stream of its block."""
        blocks, at = np.unique(clients // BLOCK, return_inverse=True)
        purpose = f"jitter.{exchange}"
        draws = standard_normals(self.seed, purpose, round, blocks.tolist(), "rtt", BLOCK)
        return draws[at, clients % BLOCK]


@dataclass(frozen=True)
class ExchangeCost:
    """The duration of an exchange in seconds, and the joules of all clients; None without energy costs."""

    seconds: float
    joules: float | None = None


class ExchangeClock:
    """The virtual time of successive exchanges.

    Without a clock, no upload is late and an exchange has no duration.
    """

    def __init__(
        self,
        clock: Clock | None,
        sizes: tuple[int, ...],
        decided: Callable[[int], float] | None = None,
    ) -> None:
        """Start a clock.

        decided: returns a round's seconds in an asynchronous run, where no upload is late.
        """
        self._clock, self._sizes, self._decided = clock, sizes, decided
        self._tree = None if clock is None else clock.tree
        self._hops = self._no_hops()
        self._down: dict[int, int] = {}
        """Stream bytes of the broadcast, by client."""
        self._up: dict[int, int] = {}
        """Stream bytes of the upload, by client."""
        self._answers: dict[int, float] = {}
        """Seconds until the upload arrived, by client."""

    def hop(self, edge: int, direction: str, stream_bytes: int) -> None:
        """Record an envelope between an edge server and the root."""
        if self._hops is not None:
            self._hops.add(edge, direction, stream_bytes)

    def _no_hops(self) -> Hops | None:
        return None if self._tree is None else Hops.none(self._tree)

    def gave(self, client: int, stream_bytes: int) -> None:
        """Record that the broadcast was sent to a client."""
        self._down[client] = stream_bytes

    def late(self, task: TaskId, stream_bytes: int) -> bool:
        """Record the bytes of an upload, and return whether it arrives after the deadline."""
        k = task.client
        self._up[k] = stream_bytes
        if self._clock is None or (self._decided and task.round):
            return False
        seconds = self._clock.seconds(
            task.round, k, self._sizes[k], self._down[k], stream_bytes, task.exchange
        )
        self._answers[k] = seconds
        return seconds > self._clock.deadline

    def close(self, round: int) -> ExchangeCost | None:
        """End the exchange, and return its duration (Clock.duration) and energy; None without a clock."""
        down, up, answers, hops = self._down, self._up, self._answers, self._hops
        self._down, self._up, self._answers, self._hops = {}, {}, {}, self._no_hops()
        if self._clock is None:
            return None
        ids = sorted(down)
        clients = indices(ids)
        sent = indices([down[k] for k in ids]), indices([up.get(k, 0) for k in ids])
        joules = None
        if self._clock.devices.has_energy:
            sizes = indices([self._sizes[k] if k in up else 0 for k in ids])
            joules = math.fsum(self._clock.joules_of(clients, sizes, *sent).tolist())
        if self._decided and round:
            return ExchangeCost(self._decided(round), joules)
        seconds = np.array([answers.get(k, 0.0) for k in ids])
        answered = np.array([k in answers for k in ids], dtype=np.bool_)
        return ExchangeCost(self._clock.duration(clients, (seconds, answered), sent, hops), joules)


def clock(
    link: str, compute: str, deadline: str, *, clients: int, seed: int, tree: Tree | None = None
) -> Clock | None:
    """Return the clock that --link, --compute and --deadline describe; None if none of them is set."""
    if not (link or compute or deadline):
        return None
    limit = parse_time(deadline, "--deadline") if deadline else math.inf
    described = network(link, compute, clients=clients)
    of_clients, server = described.devices, described.server
    edges = _edge_links(described.edges, tree)
    if deadline and not (link or of_clients.seconds.any()):
        raise UsageError("--deadline needs --link or --compute: without them every client answers at once")
    return Clock(of_clients, limit, seed, server, tree, edges)


def _edge_links(described: Mapping[str, Mapping[str, float]], tree: Tree | None) -> EdgeLinks | None:
    """Return the links of a tree's edge servers."""
    if tree is None:
        if described:
            raise UsageError("--link describes edge servers, and there are none: add --tree")
        return None
    if unknown_names := sorted(described.keys() - {"", *tree.names}):
        names = ", ".join(tree.names[:8]) + (", ..." if len(tree.names) > 8 else "")
        raise UsageError(f"--link describes edge server {unknown_names[0]!r}; --tree has {names}")
    return EdgeLinks.of(described, tree.names)


def indices(clients: Sequence[int]) -> Ints:
    """Convert client ids, or other whole numbers, to the array that `seconds_of` takes."""
    return np.array(clients, dtype=np.int64)
